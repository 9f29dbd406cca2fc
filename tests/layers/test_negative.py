"""Where a rewrite would be wrong, none is made: barriers, hooks, subclasses, edits in place, mode switches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential

import stretto
from stretto.layers import record_of
from tests.graphs import random_edges, symmetric_edges

EDGES = random_edges(20, 20, 60)
X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def same(stock, *args, path="fast", calls=1):
    """The accelerated copy gives what stock gives, by the path wanted; returns it."""
    fast = stretto.accelerate(copy.deepcopy(stock))
    for _ in range(calls):
        wanted, got = stock(*args), fast(*args)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    assert record_of(fast).path == path, record_of(fast).reason
    return fast


@pytest.mark.parametrize(("i", "o"), [(6, 2), (6, 30)])
def test_maximum_is_not_moved_past_the_weight(i, o):
    for name in ("max", "min"):
        same(pyg.SAGEConv(i, o, aggr=name).double(), X, EDGES)
        same(pyg.GraphConv(i, o, aggr=name).double(), X, EDGES)


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (4, 30)])
def test_gatv2_logits_are_not_folded(heads, width):
    conv = pyg.GATv2Conv(6, width, heads=heads).double()
    fast = same(conv, X, EDGES)
    assert "(W' a)" not in record_of(fast).plan


@pytest.mark.parametrize("o", [2, 30])
def test_bias_reaches_isolated_nodes_once(o):
    edges = torch.tensor([[1, 2, 2], [0, 0, 1]])  # nodes 2.. receive nothing
    for conv in (pyg.SAGEConv(6, o), pyg.GraphConv(6, o, aggr="mean"), pyg.GCNConv(6, o, add_self_loops=False)):
        torch.nn.init.normal_(conv.lin_l.bias if isinstance(conv, pyg.SAGEConv) else next(conv.parameters()))
        same(conv.double(), X, edges)


def test_batch_norm_in_training_sees_the_same_rows():
    stock = pyg.GINConv(Sequential(Linear(6, 8), BatchNorm1d(8), ReLU(), Linear(8, 3))).double()
    fast = same(stock, X, EDGES, calls=3)
    for name, value in fast.named_buffers():
        torch.testing.assert_close(value, dict(stock.named_buffers())[name])
    torch.testing.assert_close(fast.eval()(X, EDGES), stock.eval()(X, EDGES), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: pyg.GCNConv(6, 3), lambda: pyg.SAGEConv(6, 3), lambda: pyg.TAGConv(6, 3)])
def test_dropped_inputs_are_not_kept(make):
    """A new X in every step, in the memory of the old one: nothing of the old X may be used."""
    stock = make().double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.nn.functional.dropout(X, 0.5)
        torch.testing.assert_close(fast(x, EDGES), stock(x, EDGES), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: pyg.GCNConv(6, 3), lambda: pyg.GATConv(6, 3), lambda: pyg.ChebConv(6, 3, 3)])
def test_edits_in_place_are_seen(make):
    stock = make().double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, edges = X.clone(), EDGES.clone()
    for _ in range(3):
        torch.testing.assert_close(fast(x, edges), stock(x, edges), rtol=1e-9, atol=1e-10)
    x.mul_(2)
    torch.testing.assert_close(fast(x, edges), stock(x, edges), rtol=1e-9, atol=1e-10)
    edges[0, :5] = 7
    torch.testing.assert_close(fast(x, edges), stock(x, edges), rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        for model in (stock, fast):
            next(model.parameters()).mul_(3)
    torch.testing.assert_close(fast(x, edges), stock(x, edges), rtol=1e-9, atol=1e-10)


def test_edge_types_edited_in_place_are_seen():
    stock = pyg.RGCNConv(6, 3, 4).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    kinds = torch.randint(4, (60,))
    torch.testing.assert_close(fast(X, EDGES, kinds), stock(X, EDGES, kinds), rtol=1e-9, atol=1e-10)
    kinds[:30] = 1
    torch.testing.assert_close(fast(X, EDGES, kinds), stock(X, EDGES, kinds), rtol=1e-9, atol=1e-10)
    assert record_of(fast).path == "fast"


@pytest.mark.parametrize("make", [pyg.RGCNConv, pyg.FastRGCNConv])
@pytest.mark.parametrize("x", [None, torch.arange(20).flip(0), torch.eye(20).double()], ids=["None", "ids", "float"])
def test_other_edge_types_of_the_same_edges_are_seen(make, x):
    stock = make(20, 3, 5).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    kinds = torch.randint(4, (60,))
    if make is pyg.FastRGCNConv and x is not None and not x.is_floating_point():
        pytest.skip("FastRGCNConv takes no numbers of nodes")

    def check(kinds):
        torch.testing.assert_close(fast(x, EDGES, kinds), stock(x, EDGES, kinds), rtol=1e-9, atol=1e-10)

    check(kinds)
    check(kinds + 1)  # the same pairs of relation and node, with other weights
    check((kinds + 1) % 4)
    check(kinds)
    kinds.add_(1)
    check(kinds)
    assert record_of(fast).path == "fast"


def test_edge_weights_with_gradient_get_it():
    for make in (lambda: pyg.GCNConv(6, 3), lambda: pyg.ChebConv(6, 3, 4), lambda: pyg.LEConv(6, 3)):
        stock = make().double()
        fast = stretto.accelerate(copy.deepcopy(stock))
        grads = []
        for model in (stock, fast):
            weight = torch.linspace(0.5, 2, 60, dtype=torch.float64, requires_grad=True)
            model(X, EDGES, weight).pow(2).sum().backward()
            grads.append(weight.grad)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-10)


class Louder(pyg.GATConv):
    """A user's layer derived from a known one."""

    def message(self, x_j, alpha):
        return 2 * super().message(x_j, alpha)


def test_subclasses_stay_as_they_are():
    conv = Louder(6, 3).double()
    wanted = conv(X, EDGES)
    stretto.accelerate(conv)
    assert type(conv) is Louder
    torch.testing.assert_close(conv(X, EDGES), wanted)
    stretto.patch()
    try:
        torch.testing.assert_close(conv(X, EDGES), wanted)
    finally:
        stretto.unpatch()


@pytest.mark.parametrize("register", ["register_message_forward_hook", "register_propagate_forward_hook"])
def test_hooks_are_called(register):
    seen = []
    for stock in (pyg.GATConv(6, 3), pyg.TransformerConv(6, 3), pyg.EdgeConv(Linear(12, 3))):
        getattr(stock.double(), register)(lambda *a: seen.append(1))
        before = len(seen)
        fast = same(stock, X, EDGES, path="stock")
        assert len(seen) == before + 2
        assert "hook" in record_of(fast).reason


def test_hooks_on_a_linear_inside_are_called():
    for stock, linear in (
        (pyg.GATConv(6, 3), "lin"),
        (pyg.GCNConv(6, 3), "lin"),
        (pyg.EdgeConv(Linear(12, 3)), "nn"),
        (pyg.GINConv(pyg.MLP([6, 4, 3])), "nn"),
        (pyg.CGConv(6), "lin_f"),
    ):
        seen: list[int] = []
        fast = stretto.accelerate(stock.double())
        getattr(fast, linear).register_forward_hook(lambda *a, seen=seen: seen.append(1))
        fast(X, EDGES)
        assert seen


def test_autocast_of_attention_runs_as_stock():
    conv = stretto.accelerate(pyg.GATConv(6, 3))
    with torch.autocast("cpu", torch.bfloat16):
        conv(X.float(), EDGES)
    assert record_of(conv).reason == "autocast is on"


def test_static_graphs_of_other_layers_run_as_stock():
    batched = torch.randn(3, 20, 6, dtype=torch.float64)
    for stock in (pyg.GINConv(Linear(6, 4)), pyg.EdgeConv(Linear(12, 4)), pyg.ResGatedGraphConv(6, 4)):
        same(stock.double(), batched, EDGES, path="stock")


def test_wrong_inputs_raise_what_stock_raises():
    narrow = torch.randn(20, 5, dtype=torch.float64)
    attr = torch.randn(60, 4, dtype=torch.float64)
    calls = [
        (pyg.GATConv(6, 3), (narrow, EDGES)),
        (pyg.GATv2Conv(6, 3), (X, EDGES, attr)),
        (pyg.GINEConv(Linear(6, 3)), (X, EDGES, attr)),
        (pyg.TransformerConv(6, 3), (narrow, EDGES)),
        (pyg.RGCNConv(6, 3, 4), (narrow, EDGES, torch.zeros(60, dtype=torch.long))),
        (pyg.NNConv(6, 3, Linear(2, 18)), (X, EDGES, attr)),
    ]
    for stock, args in calls:
        stock.double()
        with pytest.raises((RuntimeError, AssertionError, ValueError)) as wanted:
            stock(*args)
        with pytest.raises(type(wanted.value)):
            stretto.accelerate(copy.deepcopy(stock))(*args)


def test_modes_and_inference():
    """Constants first made without gradients serve training after, and the other way round."""
    edges = symmetric_edges(20, 40)
    kinds = torch.randint(3, (edges.size(1),))
    for stock, args in (
        (pyg.GCNConv(6, 3), (X, edges, torch.rand(edges.size(1), dtype=torch.float64))),
        (pyg.ChebConv(6, 3, 3), (X, edges)),
        (pyg.RGCNConv(6, 3, 3), (X, edges, kinds)),
        (pyg.ClusterGCNConv(6, 3, diag_lambda=0.5), (X, edges)),
        (pyg.PNAConv(6, 3, ["mean", "std"], ["identity"], torch.tensor([1, 2, 3])), (X, edges)),
    ):
        stretto.Graph.cache_clear()
        fast = stretto.accelerate(copy.deepcopy(stock.double()))
        wanted = stock(*args)
        with torch.inference_mode():
            torch.testing.assert_close(fast(*args), wanted, rtol=1e-9, atol=1e-10)
        with torch.no_grad():
            torch.testing.assert_close(fast(*args), wanted, rtol=1e-9, atol=1e-10)
        got = fast(*args)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)
        got.sum().backward()
        assert record_of(fast).path == "fast"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv, pyg.GCNConv, pyg.SimpleConv])
def test_results_may_be_edited_in_place(make, bias):
    """AttentiveFP does: F.elu_(conv(x, edge_index))."""
    torch.manual_seed(0)
    stock = pyg.SimpleConv() if make is pyg.SimpleConv else make(6, 4, bias=bias).double()
    index, found = torch.randint(30, (2, 140)), []
    for conv in (stock, stretto.accelerate(copy.deepcopy(stock))):
        x = torch.linspace(-1, 1, 180, dtype=torch.float64).view(30, 6).requires_grad_()
        torch.nn.functional.elu_(conv(x, index)).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("diag_lambda", [0.0, 0.5])
def test_degrees_are_counted_in_the_default_type(diag_lambda):
    conv = pyg.ClusterGCNConv(6, 3, diag_lambda=diag_lambda)
    before = torch.get_default_dtype()
    try:
        for kind in (torch.float64, torch.float32):
            torch.set_default_dtype(kind)
            same(conv.double(), X, EDGES)
        torch.set_default_dtype(torch.float64)
        fast = stretto.accelerate(copy.deepcopy(conv).float())
        with pytest.raises(RuntimeError):  # stock's: its messages are wider than the weight
            fast(X.float(), EDGES)
        assert "default type" in record_of(fast).reason
    finally:
        torch.set_default_dtype(before)
