"""Layers whose messages a network makes on edges: in blocks of edges they give what they give all at once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Dropout, Hardswish, Linear, PReLU, ReLU, Sequential, Tanh
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.nn.models.schnet import CFConv

import stretto
from stretto import kernels
from stretto.layers import record_of
from stretto.layers.edges import streaming
from tests.layers.options import SPECS
from tests.layers.test_convs import check

STREAMED = (
    pyg.EdgeConv,
    pyg.FiLMConv,
    pyg.ResGatedGraphConv,
    pyg.CGConv,
    pyg.PNAConv,
    pyg.GINEConv,
    pyg.GATv2Conv,
    pyg.GENConv,
    pyg.NNConv,
    CFConv,
    GATEConv,
)


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Every graph counts as large, and a block holds a few edges."""
    monkeypatch.setattr(streaming, "LARGE", 0)  # times any patience
    monkeypatch.setattr(streaming, "BLOCK", 5)


def drops(spec, options):
    """Whether a layer in blocks drops other values than stock does (tests/layers/test_edge_memory.py)."""
    modules = list(spec.make(**dict(options)).modules())
    kinds = [type(m) for m in modules]
    return Dropout in kinds or any(type(m) is pyg.MLP and any(m.dropout) for m in modules)


@pytest.mark.parametrize("conv", STREAMED, ids=lambda c: c.__name__)
def test_every_option_equals_stock(conv):
    spec = SPECS[conv]
    for options in spec.options:
        for train in (False,) if drops(spec, options) else (True, False):
            check(spec, options, "unsorted", spec.takes[0], train)


@pytest.mark.parametrize("conv", STREAMED, ids=lambda c: c.__name__)
def test_adversarial_graphs(conv):
    spec = SPECS[conv]
    for graph in ("no_nodes", "one_node", "one_loop", "empty", "isolated", "self_loops", "duplicates", "directed"):
        for options in spec.options[:3]:
            check(spec, options, graph, spec.takes[0], not drops(spec, options))


LAYERS = {
    "EdgeConv": (lambda: pyg.EdgeConv(Sequential(Linear(12, 6), Tanh(), Linear(6, 4))), None),
    "EdgeConv MLP": (lambda: pyg.EdgeConv(pyg.MLP([12, 6, 4], norm=None)), None),
    "FiLMConv": (lambda: pyg.FiLMConv(6, 4, act=PReLU()), None),
    "ResGated": (lambda: pyg.ResGatedGraphConv(6, 4, edge_dim=3), 3),
    "ResGated mean": (lambda: pyg.ResGatedGraphConv(6, 4, edge_dim=3, aggr="mean"), 3),
    "CGConv": (lambda: pyg.CGConv(6, 3), 3),
    "GINEConv": (lambda: pyg.GINEConv(Linear(6, 4), edge_dim=3), 3),
    "GATEConv": (lambda: GATEConv(6, 6, 3), 3),
    "GINEConv max": (lambda: pyg.GINEConv(Linear(6, 4), aggr="max"), 6),
    "ResGated max": (lambda: pyg.ResGatedGraphConv(6, 4, aggr="max", act=Tanh()), None),
    "GATv2Conv": (lambda: pyg.GATv2Conv(6, 4, heads=2, edge_dim=3), 3),
    "GENConv": (lambda: pyg.GENConv(6, 4, edge_dim=3, learn_t=True, norm="layer"), 3),
    "GENConv max": (lambda: pyg.GENConv(6, 4, "max", edge_dim=3, norm="layer"), 3),
    "NNConv": (lambda: pyg.NNConv(6, 4, Sequential(Linear(3, 5), Tanh(), Linear(5, 24))), 3),
    "NNConv MLP": (lambda: pyg.NNConv(6, 4, pyg.MLP([3, 5, 7, 24], norm=None, act="silu", act_first=True)), 3),
    "NNConv max": (lambda: pyg.NNConv(6, 4, Sequential(Linear(3, 5), Tanh(), Linear(5, 24)), aggr="max"), 3),
    "NNConv gated": (lambda: pyg.NNConv(6, 4, Sequential(Linear(3, 24), Tanh()), aggr="mean"), 3),
    "EdgeConv layer norm": (
        lambda: pyg.EdgeConv(Sequential(Linear(12, 6), pyg.LayerNorm(6, mode="node"), Hardswish(), Linear(6, 4))),
        None,
    ),
    "PNAConv": (lambda: pyg.PNAConv(6, 4, ["mean", "std"], ["identity"], torch.tensor([1, 2, 3]), edge_dim=3), 3),
}


def pair(make, seed=0):
    torch.manual_seed(seed)
    stock = make().double()
    return stock, stretto.accelerate(copy.deepcopy(stock))


def inputs(dim):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    index = torch.randint(20, (2, 70), generator=generator)
    if dim is None:
        return [x, index]
    return [x, index, torch.randn(70, dim, dtype=torch.float64, generator=generator, requires_grad=True)]


@pytest.mark.parametrize("name", LAYERS)
def test_messages_come_in_blocks(name):
    make, dim = LAYERS[name]
    stock, fast = pair(make)
    args = inputs(dim)
    torch.testing.assert_close(fast(*args), stock(*args))
    assert "in blocks" in record_of(fast).plan


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives(name):
    make, dim = LAYERS[name]
    results = []
    for layer in pair(make):
        args = inputs(dim)
        out = layer(*args)
        leaves = [a for a in args if a.is_floating_point()] + list(layer.parameters())
        first = torch.autograd.grad((out * out).sum(), leaves[0], create_graph=True)[0]
        results.append(torch.autograd.grad((first * first).sum(), leaves, allow_unused=True, materialize_grads=True))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_what_sees_all_edges_runs_at_once():
    """PyG's LayerNorm takes one mean of all edges, or one of each."""
    for mode, how in (("graph", "at once"), ("node", "in blocks")):
        stock, fast = pair(lambda m=mode: pyg.EdgeConv(pyg.MLP([12, 6, 4], norm=pyg.LayerNorm(6, mode=m))))
        args = inputs(None)
        torch.testing.assert_close(fast(*args), stock(*args))
        assert how in record_of(fast).plan


def test_small_messages_are_dropped_as_in_stock(monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 1 << 25)
    stock, fast = pair(lambda: pyg.EdgeConv(Sequential(Linear(12, 6), Dropout(0.5), ReLU(), Linear(6, 4))))
    found = []
    for layer in (stock, fast):
        torch.manual_seed(5)
        found.append(layer(*inputs(None)))
    torch.testing.assert_close(*found)
    assert "at once" in record_of(fast).plan


def test_a_device_with_its_own_memory_makes_at_once_what_that_holds(monkeypatch):
    """As on a card: its memory decides, and once for a graph, since backward may ask again."""
    room = [1 << 30]
    monkeypatch.setattr(kernels, "has_own_memory", lambda device: True)
    monkeypatch.setattr(kernels, "room", lambda device: room[0])
    stock, fast = pair(lambda: pyg.EdgeConv(Sequential(Linear(12, 6), ReLU(), Linear(6, 4))))
    first, second = inputs(None), inputs(None)
    second[1] = second[1].flip(1)
    for args, how in ((first, "at once"), (second, "in blocks"), (first, "at once"), (second, "in blocks")):
        torch.testing.assert_close(fast(*args), stock(*args))
        assert how in record_of(fast).plan
        room[0] = 16  # bytes: from now on memory is full


def test_hooks_inside_see_all_edges():
    seen = []
    stock, fast = pair(lambda: pyg.EdgeConv(Sequential(Linear(12, 6), ReLU(), Linear(6, 4))))
    for layer in (stock, fast):
        layer.nn[2].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
        layer(*inputs(None))
    assert seen == [(70, 4), (70, 4)]


def test_attentive_fp_keeps_a_number_an_edge(monkeypatch):
    """The whole model, GATEConv and GATConv: no array of edges x channels."""
    from stretto.observe.peak_memory import peak_bytes

    monkeypatch.setattr(streaming, "BLOCK", 512)
    torch.manual_seed(0)
    index, batch = torch.randint(300, (2, 40000)), torch.arange(300) // 30
    x, attr = torch.randn(300, 8, requires_grad=True), torch.randn(40000, 4)
    stock = pyg.AttentiveFP(8, 32, 2, 4, num_layers=2, num_timesteps=2)
    fast = stretto.accelerate(copy.deepcopy(stock))
    peaks = [peak_bytes(lambda n=net: n(x, index, attr, batch).sum().backward()) for net in (stock, fast)]
    rows = {row.layer: (row.conv, row.path) for row in stretto.report(fast).rows}
    assert rows["gate_conv"] == ("GATEConv", "fast")
    assert {path for _, path in rows.values()} == {"fast"}, rows
    assert peaks[1] < peaks[0] / 8
    assert peaks[1] < 40000 * 32 * 4  # less than one array of messages


def test_peak_memory_is_that_of_a_block(monkeypatch):
    from stretto.observe.peak_memory import peak_bytes

    monkeypatch.setattr(streaming, "BLOCK", 512)
    torch.manual_seed(0)
    index = torch.randint(400, (2, 40000))
    x = torch.randn(400, 16, requires_grad=True)
    stock = pyg.EdgeConv(Sequential(Linear(32, 64), ReLU(), Linear(64, 16)))
    fast = stretto.accelerate(copy.deepcopy(stock))
    peaks = [peak_bytes(lambda n=net: n(x, index).sum().backward()) for net in (stock, fast)]
    assert peaks[1] < peaks[0] / 8
