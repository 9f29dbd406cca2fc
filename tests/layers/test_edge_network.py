"""Layers with a network on each edge that users write themselves: fast and equal to the untouched layer, at once and
in blocks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn import BatchNorm1d, Dropout, LayerNorm, Linear, ReLU, Sequential, SiLU, Tanh

import stretto
from stretto.layers import record_of
from stretto.layers.edges import network, streaming
from stretto.observe.peak_memory import peak_bytes
from tests.graphs import ZOO
from tests.layers.edge_layers import (
    DIM,
    GRAPHS,
    HIDDEN,
    IN,
    KINDS,
    Difference,
    Differences,
    Edges,
    Equivariant,
    Gated,
    Mesh,
    Reversed,
    gradients,
    inputs,
    pair,
    same,
    values,
)


@pytest.fixture(params=["at once", "in blocks"])
def how(request, monkeypatch):
    """Every graph counts as small, or as large with blocks of a few edges."""
    if request.param == "in blocks":
        monkeypatch.setattr(streaming, "LARGE", 0)
        monkeypatch.setattr(streaming, "BLOCK", 5)
    return request.param


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_graph(kind, how):
    stock, fast = pair(kind)
    for name in GRAPHS:
        same(stock, fast, inputs(name), how=how)
    same(stock, fast, inputs("unsorted"), train=False, how=how)
    assert stretto.report(fast).rows[0].path == "fast"


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_aggregation_and_direction(kind, how):
    for aggr in ("sum", "mean", "max", "min"):
        for flow in ("source_to_target", "target_to_source"):
            stock, fast = pair(lambda a=aggr, f=flow: kind(aggr=a, flow=f))
            for name in ("unsorted", "duplicates"):
                same(stock, fast, inputs(name), how=how)


def test_many_nodes_and_few_edges(monkeypatch, how):
    """A Linear on nodes would be more work: without blocks nothing is to be gained."""
    monkeypatch.setattr(network, "FEW", 0)
    stock, fast = pair(Mesh)
    for name in ("isolated", "directed"):
        plan, path = ("", "stock") if how == "at once" else ("network on edges, in blocks", "fast")
        same(stock, fast, inputs(name), how=plan, path=path)
        assert path == "fast" or "more edges than there are nodes" in record_of(fast).reason


NETWORKS = {
    "linear": lambda i: Linear(i, DIM),
    "no bias": lambda i: Linear(i, DIM, bias=False),
    "pyg linear": lambda i: pyg.Linear(i, DIM),
    "deep": lambda i: Sequential(Linear(i, 4), Tanh(), Linear(4, 9), nn.PReLU(), LayerNorm(9), Linear(9, DIM), SiLU()),
    "nested": lambda i: Sequential(Linear(i, 4), Sequential(nn.GELU(), Linear(4, 5)), nn.ELU(), Linear(5, DIM)),
    "in place": lambda i: Sequential(Linear(i, 4), ReLU(inplace=True), Linear(4, DIM), nn.SiLU(inplace=True)),
    "mlp": lambda i: pyg.MLP([i, 4, DIM], norm=None),
    "mlp layer norm": lambda i: pyg.MLP([i, 4, 5, DIM], norm=None, act="silu", bias=False, plain_last=False),
    "pyg layer norm": lambda i: Sequential(Linear(i, 4), pyg.LayerNorm(4, mode="node"), ReLU(), Linear(4, DIM)),
    "batch norm": lambda i: Sequential(Linear(i, 4), BatchNorm1d(4), ReLU(), Linear(4, DIM)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name, how):
    for kind in (Mesh, Difference, Reversed, Gated):
        stock, fast = pair(lambda k=kind: k(NETWORKS[name]))
        for train in (True, False):
            same(stock, fast, inputs("unsorted"), train, how=how)


@pytest.mark.parametrize(
    "net",
    [
        lambda i: Sequential(Linear(i, 4), ReLU(), Dropout(0.4), Linear(4, DIM)),
        lambda i: pyg.MLP([i, 4, DIM], dropout=0.3),
    ],
    ids=["dropout", "mlp"],
)
def test_dropout_draws_as_stock_does_unless_in_blocks(net, how):
    stock, fast = pair(lambda: Mesh(net))
    if how == "at once":
        same(stock, fast, inputs("unsorted"), how=how)
    else:  # other values than stock's: tests/layers/test_edge_norms.py
        gradients(fast, inputs("unsorted"))
        assert how in record_of(fast).plan
        for layer in (stock, fast):  # nor are the statistics of a norm
            layer.load_state_dict(stock.state_dict())
    same(stock, fast, inputs("unsorted"), train=False, how=how)


def test_differences_of_coordinates_stay_on_edges(monkeypatch, how):
    """Where nothing else is moved, that is stock's work: blocks of edges alone make it worth while."""
    stock, fast = pair(Difference)
    same(stock, fast, inputs("unsorted"), how=f"first Linear on nodes, the rest on edges, {how}")
    monkeypatch.setattr(network, "WIDE", IN + 1)
    plan, path = ("", "stock") if how == "at once" else ("network on edges", "fast")
    same(stock, fast, inputs("unsorted"), how=plan, path=path)


def test_coordinates_far_from_the_origin_keep_their_digits():
    """W pos_i - W pos_j would lose what pos_i - pos_j has."""
    stock, fast = pair(lambda: Differences())
    args = inputs("unsorted", torch.float32)
    args[1] = args[1] + 1e5
    exact = gradients(copy.deepcopy(stock), [a.double() if a.is_floating_point() else a for a in args])[0]
    near, mine = (gradients(layer.float(), args)[0] for layer in (stock, fast))
    assert record_of(fast).path == "fast"
    assert (mine - exact).abs().max() <= 2 * (near - exact).abs().max() + 1e-5


@pytest.mark.parametrize("name", ["wide", "tall"])
def test_two_sets_of_nodes(name, how):
    index, (m, n) = ZOO[name]()
    attr = values(index.size(1), DIM)

    class Between(Edges):
        def forward(self, a, b, attr):
            return self.propagate(index, x=(a, b), attr=attr, size=(m, n))

        def message(self, x_i, x_j, attr):
            return self.net(torch.cat([x_j, x_i, attr], dim=-1))

    stock, fast = pair(Between)
    same(stock, fast, [values(m, IN, seed=1), values(n, IN, seed=2), attr], how=how)


def test_second_derivatives(how):
    for kind in (Mesh, Equivariant, Gated):
        found = []
        for layer in pair(kind):
            args = [a.clone().requires_grad_() if a.is_floating_point() else a for a in inputs("unsorted")]
            out = layer(*args)
            leaves = [a for a in args if a.is_floating_point()] + list(layer.parameters())
            first = torch.autograd.grad((out * out).sum(), args[0], create_graph=True)[0]
            found.append(torch.autograd.grad((first * first).sum(), leaves, allow_unused=True, materialize_grads=True))
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", [Mesh, Equivariant], ids=lambda k: k.__name__)
def test_peak_memory_does_not_grow_with_the_edges(kind, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 512)

    def net(i):
        return Sequential(Linear(i, 32), SiLU(), Linear(32, 32), SiLU(), Linear(32, 3 if kind is Mesh else 5))

    torch.manual_seed(0)
    stock = kind(net)
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, pos = torch.randn(300, IN, requires_grad=True), torch.randn(300, 3, requires_grad=True)
    index = torch.randint(300, (2, 60000))
    attr = torch.randn(60000, DIM)
    peaks = [peak_bytes(lambda n=n: n(x, pos, index, attr, None).sum().backward()) for n in (stock, fast)]
    assert record_of(fast).path == "fast"
    assert peaks[1] < peaks[0] / 8
    assert peaks[1] < 60000 * 4 * 8  # not one array of a few channels an edge


class Derived(pyg.EdgeConv):
    """Of a class that has a fast path of its own, which is for exactly that class."""


def _of(*widths):
    return pyg.MLP(list(widths), norm=None)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: pyg.PointNetConv(_of(IN + 3, HIDDEN, DIM), Linear(DIM, 4)), lambda m, x, pos, i: m(x, pos, i)),
        (lambda: pyg.PointGNNConv(_of(IN, 3), _of(IN + 3, 5), _of(5, IN)), lambda m, x, pos, i: m(x, pos, i)),
        (lambda: Derived(_of(2 * IN, HIDDEN, DIM)), lambda m, x, pos, i: m(x, i)),
    ],
    ids=["PointNetConv", "PointGNNConv", "a class derived from EdgeConv"],
)
def test_layers_of_pyg(make, call, how):
    index, (n, _) = ZOO["unsorted"]()
    stock, fast = pair(make)
    args = [values(n, IN), values(n, 3, seed=2)]
    wanted, got = (gradients(m, args, call=lambda x, pos, m=m: call(m, x, pos, index)) for m in (stock, fast))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert record_of(fast).path == "fast", record_of(fast).reason
    assert how in record_of(fast).plan


def test_patch_reaches_them():
    layer = Mesh().double()
    args = inputs("unsorted")
    wanted = layer(*args)
    stretto.patch()
    try:
        torch.testing.assert_close(layer(*args), wanted)
        assert stretto.report(layer).rows[0].path == "fast"
    finally:
        stretto.unpatch()


def test_a_network_put_in_its_place_is_used():
    stock, fast = pair(Mesh)
    same(stock, fast, inputs("unsorted"))
    other = Sequential(Linear(2 * IN + DIM, 4), Tanh(), Linear(4, DIM)).double()
    stock.net, fast.net = other, copy.deepcopy(other)
    same(stock, fast, inputs("unsorted"))


def test_hooks_inside_see_what_they_saw(how):
    for where in (lambda m: m.net, lambda m: m.net[0], lambda m: m.net[2]):
        seen = []
        stock, fast = pair(Mesh)
        for layer in (stock, fast):
            where(layer).register_forward_hook(lambda module, args, out, s=seen: s.append((*args, out)))
            layer(*inputs("unsorted"))
        assert len(seen) == 2
        for mine, theirs in zip(seen[1], seen[0], strict=True):
            torch.testing.assert_close(mine, theirs)
