"""Layers with edge features on small graphs, which are one step of autograd: as stock, gradients of gradients too."""

import copy
import weakref

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn.models.schnet import CFConv, ShiftedSoftplus

from stretto.kernels import native
from stretto.layers import gated, gine, record_of, schnet
from stretto.layers.edges import pairs
from stretto.plug.accelerate import accelerate
from tests.graphs import random_edges, symmetric_edges

pytestmark = pytest.mark.skipif(native.library() is None, reason="libstretto is not loaded")
NODES, WIDTH, DIM = 40, 6, 5


def network(bias=True):
    return nn.Sequential(nn.Linear(WIDTH, 9, bias), nn.ReLU(), nn.Linear(9, WIDTH, bias))


def filters():
    return CFConv(WIDTH, WIDTH, 7, nn.Sequential(nn.Linear(DIM, 8), ShiftedSoftplus(), nn.Linear(8, 7)), 4.0)


LAYERS = {
    "GINE": (gine, lambda: pyg.GINEConv(network(), edge_dim=DIM)),
    "GINE, no bias": (gine, lambda: pyg.GINEConv(network(False), eps=0.3, edge_dim=DIM)),
    "GINE, MLP": (gine, lambda: pyg.GINEConv(pyg.MLP([WIDTH, 8, 8, 3], norm=None), edge_dim=DIM)),
    "GINE, one Linear": (gine, lambda: pyg.GINEConv(nn.Linear(WIDTH, 4), edge_dim=DIM)),
    "CGConv": (gated, lambda: pyg.CGConv(WIDTH, DIM)),
    "CGConv, no bias": (gated, lambda: pyg.CGConv(WIDTH, DIM, bias=False)),
    "CGConv, batch norm": (gated, lambda: pyg.CGConv(WIDTH, DIM, batch_norm=True)),
    "CFConv": (schnet, filters),
}


@pytest.fixture
def steps(monkeypatch):
    """How often a layer was one step."""
    seen = []
    for module, name in ((gine, "edge_layer"), (schnet, "edge_layer"), (gated, "gated_layer")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real: (seen.append(1), real(*a))[1])
    monkeypatch.setattr(pairs, "MANY", 1)
    return seen


def inputs(name, pairs, learned=False):
    torch.manual_seed(1)
    index = symmetric_edges(NODES, 60) if pairs else random_edges(NODES, NODES, 110)
    length = (index[0] - index[1]).abs().double() / NODES * 4
    attr = torch.stack([(length - c).square().neg().exp() for c in range(DIM)], dim=1)
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
    return [x, index, *([length] if name == "CFConv" else []), attr.requires_grad_(learned)]


def gradients(conv, given, create_graph=False):
    leaves = [t for t in given if t.requires_grad] + [p for p in conv.parameters() if p.requires_grad]
    out = conv(*given)
    first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=create_graph)
    if not create_graph:
        return [out, *first]
    return [out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_stock(name, pairs, learned, steps):
    torch.manual_seed(0)
    stock = LAYERS[name][1]().double()
    ours = accelerate(copy.deepcopy(stock))
    given = inputs(name, pairs, learned)
    for twice in (False, True):
        got, wanted = gradients(ours, given, twice), gradients(stock, given, twice)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(*given), stock.eval()(*given), rtol=1e-9, atol=1e-10)
    assert record_of(ours).path == "fast"
    assert len(steps) == (1 if name == "CFConv" and learned else 3)  # lengths with gradients: only without them


@pytest.mark.parametrize("name", LAYERS)
def test_frozen_parameters_get_no_gradient(name, steps):
    torch.manual_seed(0)
    stock = LAYERS[name][1]().double()
    for parameter in list(stock.parameters())[::2]:
        parameter.requires_grad_(False)
    ours = accelerate(copy.deepcopy(stock))
    given = inputs(name, True)
    for mine, theirs in zip(gradients(ours, given), gradients(stock, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    given[0].requires_grad_(False)
    for mine, theirs in zip(gradients(ours, given), gradients(stock, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    assert len(steps) == 2


@pytest.mark.parametrize("name", ["GINE", "CGConv", "CFConv"])
def test_a_watched_module_is_called(name, steps):
    conv = LAYERS[name][1]().double()
    seen = []
    watched = {"GINE": lambda: conv.nn[2], "CGConv": lambda: conv.lin_s, "CFConv": lambda: conv.lin1}[name]()
    watched.register_forward_hook(lambda *a: seen.append(1))
    accelerate(conv)(*inputs(name, True))
    assert seen == [1]
    assert not steps


@pytest.mark.parametrize("name", ["GINE", "CFConv"])
def test_features_go_with_their_tensor(name, steps, monkeypatch):
    """Graph.of remembers a mini-batch longer than its features live: what was made of them is not held by it."""
    made = []
    real = pairs.pairs.alike
    monkeypatch.setattr(pairs.pairs, "alike", lambda *a: (made.append(weakref.ref(found := real(*a))), found)[1])
    x, index, *features = inputs(name, True)
    accelerate(LAYERS[name][1]().double())(x, index, *features)
    assert made
    assert all(found() is not None for found in made)
    del features
    assert all(found() is None for found in made)


def test_large_graphs_are_not_one_step(steps, monkeypatch):
    from stretto.ops import edge_layer

    monkeypatch.setattr(edge_layer, "MOST", 100)
    accelerate(LAYERS["GINE"][1]().double())(*inputs("GINE", True))
    assert not steps
