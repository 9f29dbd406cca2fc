"""CFConv's pairs of edges: one filter for both directions where they are alike, one for each where anything differs."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn.models.schnet import CFConv

from stretto.layers import record_of
from stretto.layers.edges import pairs
from tests.layers.inputs import gradients_of, lengths
from tests.layers.options import SPECS
from tests.layers.test_convs import pair_of

SPEC = SPECS[CFConv]


@pytest.fixture(autouse=True)
def few_edges_count(monkeypatch):
    monkeypatch.setattr(pairs, "MANY", 1)


def paired(data, grad=False):
    """Whether the filters were shared; results and gradients are checked."""
    stock, fast = pair_of(SPEC, {})
    gradients_of(fast, data)  # unsorted edges are sorted when the same features come a second time
    wanted, got = gradients_of(stock, data), gradients_of(fast, data)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    assert record_of(fast).path == "fast"
    return "both directions" in record_of(fast).plan


def changed(data, at, value):
    args = list(data.args)
    args[at] = value
    return type(data)(tuple(args), data.kwargs, data.learned)


def test_symmetric_edges_share_their_filters():
    data = lengths("symmetric", SPEC, torch.float64)
    assert paired(data)
    shuffled = torch.randperm(data.args[1].size(1), generator=torch.Generator().manual_seed(0))
    mixed = (data.args[0], data.args[1][:, shuffled], data.args[2][shuffled], data.args[3][shuffled])
    assert paired(type(data)(mixed, {}, (0,)))


def test_what_differs_is_not_shared():
    data = lengths("symmetric", SPEC, torch.float64)
    length, attr = data.args[2].clone(), data.args[3].clone()
    length[3] += 1e-9
    attr[5, 1] += 1e-9
    assert not paired(changed(data, 2, length))
    assert not paired(changed(data, 3, attr))
    assert not paired(type(data)(data.args, {}, (0, 3)))  # each edge's features have a gradient of their own


@pytest.mark.parametrize("graph", ["directed", "duplicates", "self_loops", "isolated", "one_loop", "empty", "one_node"])
def test_other_graphs(graph):
    paired(lengths(graph, SPEC, torch.float64))


def test_loops_are_their_own_reverse():
    index = torch.tensor([[0, 1, 1, 2, 2], [0, 0, 2, 1, 2]])
    index = torch.cat([index, torch.tensor([[0], [1]])], dim=1)
    data = lengths("symmetric", SPEC, torch.float64)
    args = (data.args[0][:3], index, torch.arange(6.0).double() * 0, torch.ones(6, data.args[3].size(1)).double())
    assert paired(type(data)(args, {}, (0,)))


def test_an_evaluation_in_inference_mode_leaves_training_alone():
    """The window of every edge is kept with the batch; what the evaluation made of it must be fit for backward."""
    data = lengths("symmetric", SPEC, torch.float64)
    _, conv = pair_of(SPEC, {})
    with torch.inference_mode():
        wanted = [conv(*data.args) for _ in range(3)][-1]  # kept from the second time on
    x = data.args[0].clone().requires_grad_()
    out = conv(x, *data.args[1:])
    out.sum().backward()
    torch.testing.assert_close(out.detach(), wanted.clone())
    assert x.grad is not None
