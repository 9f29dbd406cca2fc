"""MetaLayer: its networks on edges in blocks, what of it is ours and what is not, and how much it keeps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn import Linear, ReLU, Sequential

import stretto
from stretto.layers import record_of
from stretto.layers.edges import streaming
from stretto.observe.peak_memory import peak_bytes
from tests.layers.meta_models import EdgeModel, EdgesByLookup, GlobalModel, NodeModel, OwnSize, SourceNodes, Watched
from tests.layers.options import SPECS
from tests.layers.test_convs import check, data_for, pair_of, run


@pytest.fixture
def blocks(monkeypatch):
    """Every graph counts as large, and a block holds a few edges."""
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 5)


SPEC = SPECS[pyg.MetaLayer]


@pytest.mark.parametrize("graph", ["unsorted", "isolated", "empty", "self_loops", "duplicates", "hub"])
def test_every_option_in_blocks(graph, blocks, monkeypatch):
    if graph == "hub":  # one row has 10500 edges: cut into pieces by larger blocks, too
        monkeypatch.setattr(streaming, "BLOCK", 500)
    for options in SPEC.options:
        for train in (True, False):
            check(SPEC, options, graph, "meta", train)


def plan_of(options, train=True):
    _, fast = pair_of(SPEC, options)
    result = run(fast.train(train), data_for(SPEC, options, "unsorted", "meta"))
    assert not isinstance(result, Exception), result
    return record_of(fast)


MOVED = "first Linear on nodes, the rest on edges"


def test_the_report_tells_both_parts(blocks):
    assert plan_of({}).plan == f"edge_model: {MOVED}, in blocks, node_model: {MOVED}, in blocks"
    assert plan_of({"node": SourceNodes}).plan.count("in blocks") == 2
    assert plan_of({"edge": lambda: EdgeModel(norm=True)}).plan.count("in blocks") == 2
    assert plan_of({"node": None}).plan == f"edge_model: {MOVED}, in blocks, node_model: none"
    _, fast = pair_of(SPEC, {})
    run(fast, data_for(SPEC, {}, "unsorted", "meta"))
    rows = stretto.report(nn.ModuleDict({"layer": fast})).rows
    assert [(row.layer, row.conv, row.path) for row in rows] == [("layer", "MetaLayer", "fast")]


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (Watched, "as stock (it uses the messages elsewhere"),
        (OwnSize, "as stock (it scatters into another number of rows"),
        (lambda: NodeModel(norm=True), "as stock (its messages come from random numbers or statistics"),
    ],
    ids=["watched", "own size", "batch norm"],
)
def test_a_node_model_that_is_not_sure_runs_as_written(node, reason):
    check(SPEC, {"node": node}, "unsorted", "meta")
    assert reason in plan_of({"node": node}).plan


def test_a_model_with_other_arguments():
    layer = stretto.accelerate(pyg.MetaLayer(Linear(2, 2)).double())
    with pytest.raises(TypeError):
        layer(*data_for(SPEC, {}, "unsorted", "meta").args)
    assert "five arguments" in record_of(layer).reason


def test_reasons():
    assert "edge_model: index_select()" in plan_of({"edge": EdgesByLookup}).reason
    _, fast = pair_of(SPEC, {})
    fast.edge_model.register_forward_hook(lambda *args: None)
    run(fast, data_for(SPEC, {}, "unsorted", "meta"))
    assert "a hook is registered" in record_of(fast).reason


def test_hooks_on_the_node_model_are_called():
    seen = []
    _, fast = pair_of(SPEC, {})
    fast.node_model.register_forward_hook(lambda module, args, out: seen.append(out))
    run(fast, data_for(SPEC, {}, "unsorted", "meta"))
    assert len(seen) == 1
    assert record_of(fast).path == "fast"


class NoGraph(nn.Module):
    """Without u and batch."""

    def __init__(self):
        super().__init__()
        self.net = Sequential(Linear(13, 6), ReLU(), Linear(6, 3))

    def forward(self, src, dst, edge_attr, u, batch):
        parts = [src, dst, edge_attr]
        if u is not None:
            parts = [*parts, u[batch]]
        return self.net(torch.cat(parts, dim=-1))


def test_without_features_of_graphs(blocks):
    torch.manual_seed(0)
    stock = pyg.MetaLayer(NoGraph()).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, index, attr, _, _ = data_for(SPEC, {}, "unsorted", "meta").args
    torch.testing.assert_close(fast(x, index, attr)[1], stock(x, index, attr)[1])
    assert record_of(fast).path == "fast"
    assert fast(x, index, attr)[2] is None


def test_what_stock_refuses_is_refused_in_its_words():
    stock, fast = pair_of(SPEC, {})
    x, index, attr, u, batch = data_for(SPEC, {}, "unsorted", "meta").args
    for args in (
        (x, index + x.size(0), attr, u, batch),
        (x, index, attr[:-1], u, batch),
        (x, index, attr, u, batch + 9),
    ):
        found = []
        for layer in (stock, fast):
            with pytest.raises((IndexError, RuntimeError)) as caught:
                layer(*args)
            found.append((caught.type, str(caught.value)))
        assert found[0] == found[1]


def test_second_derivatives(blocks):
    found = []
    for layer in pair_of(SPEC, {}):
        args = [
            a.clone().requires_grad_() if a.is_floating_point() else a
            for a in data_for(SPEC, {}, "unsorted", "meta").args
        ]
        x, attr, u = layer(*args)
        leaves = [a for a in args if a.is_floating_point()] + list(layer.parameters())
        total = (x * x).sum() + (attr * attr).sum() + (u * u).sum()
        first = torch.autograd.grad(total, args[0], create_graph=True)[0]
        found.append(torch.autograd.grad((first * first).sum(), leaves, allow_unused=True, materialize_grads=True))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def test_patch_reaches_it():
    stock, _ = pair_of(SPEC, {})
    args = data_for(SPEC, {}, "unsorted", "meta").args
    wanted = stock(*args)
    stretto.patch()
    try:
        for got, theirs in zip(stock(*args), wanted, strict=True):
            torch.testing.assert_close(got, theirs)
        assert stretto.report(stock).rows[0].path == "fast"
        assert "node_model: first Linear" in stretto.report(stock).rows[0].plan
    finally:
        stretto.unpatch()


def test_peak_memory(monkeypatch):
    """Beside the new features of edges [E, 3] and their gradient nothing has a row an edge; stock has [E, 64] often."""
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 512)
    torch.manual_seed(0)
    edge, node = EdgeModel(), NodeModel()
    edge.net = Sequential(Linear(edge.width, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 3))
    node.first = Sequential(Linear(node.width, 64), ReLU(), Linear(64, 64), ReLU(), Linear(64, 5))
    stock = pyg.MetaLayer(edge, node, GlobalModel())
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, index, attr = torch.randn(300, 5, requires_grad=True), torch.randint(300, (2, 40000)), torch.randn(40000, 3)
    u, batch = torch.randn(10, 4), torch.arange(300) // 30
    peaks = [peak_bytes(lambda n=n: n(x, index, attr, u, batch)[2].sum().backward()) for n in (stock, fast)]
    assert record_of(fast).plan.count("in blocks") == 2
    assert peaks[1] < peaks[0] / 8
    assert peaks[1] < 40000 * 4 * 16
