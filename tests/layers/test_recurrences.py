"""Polynomials of the adjacency have several orders: Clenshaw or the recurrence, the sum on either side of the weight.

All are plans: equal to stock with their gradients, timed inside real steps, kept on disk, and told by explain()."""

import copy
import itertools

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.compile import CHOOSER, Leaf, Request, Sparse, Term, Transpose, plans
from stretto.compile import choose as choosing
from stretto.compile.plan import rank
from stretto.layers import hops, record_of
from stretto.machine.rates import TYPICAL
from stretto.plug.explain import explain

N, EDGES = 40, 300
LAYERS = {
    "Cheb": lambda: pyg.ChebConv(6, 3, K=5),
    "Cheb widening": lambda: pyg.ChebConv(6, 9, K=4),
    "SSG": lambda: pyg.SSGConv(6, 3, alpha=0.1, K=3),
    "SSG widening": lambda: pyg.SSGConv(6, 9, alpha=0.1, K=2),
    "TAG": lambda: pyg.TAGConv(6, 3, K=5),
}


@pytest.fixture(autouse=True)
def _fresh(fresh_memo, monkeypatch):
    """Every plan is worth timing, however small the graph."""
    monkeypatch.setenv("STRETTO_TUNE", "on")
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setattr(choosing, "CLOSE", 1e9)
    CHOOSER.clear()
    yield
    CHOOSER.clear()


def _case(name):
    torch.manual_seed(0)
    stock = LAYERS[name]().double()
    x = torch.randn(N, 6, dtype=torch.float64, requires_grad=True)
    return stock, stretto.accelerate(copy.deepcopy(stock)), x, torch.randint(N, (2, EDGES))


def _step(conv, x, edge_index):
    out = conv(x, edge_index)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])]


@pytest.mark.parametrize("name", LAYERS)
def test_plans_are_timed_in_real_steps_each_of_them_right_and_found_again(name, fresh_memo, monkeypatch):
    monkeypatch.setattr(choosing, "MOST_TRIED", 64)
    stock, fast, x, edge_index = _case(name)
    wanted, seen = _step(stock, x, edge_index), set()
    _step(fast, x, edge_index)
    count = len(CHOOSER.decision(record_of(fast).key).candidates)
    for _ in range(choosing.WARM + choosing.TRIES * count):
        for got, want in zip(_step(fast, x, edge_index), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        seen.add(record_of(fast).plan)
    decision = CHOOSER.decision(record_of(fast).key)
    assert count >= 3
    assert seen == {plan.name for plan in decision.candidates}
    assert decision.how == "measured"
    (layer,) = explain(fast, x, edge_index).layers
    assert {c.plan for c in layer.candidates if c.measured_ms is not None} == seen
    CHOOSER.clear()  # another process
    _step(fast, x, edge_index)
    again = CHOOSER.decision(record_of(fast).key)
    assert (again.how, again.chosen.name) == ("measured earlier", decision.chosen.name)


def _best(expression, i, o):
    sizes = {"n": 10_000, "E": 200_000, "i": i, "o": o}
    return str(rank(Request(expression), sizes, 4, TYPICAL).best.forward)


def test_sums_are_taken_at_the_narrower_side_of_the_weight():
    assert _best(hops.chebyshev(4), 64, 8).startswith("Clenshaw(A; X W0', ")
    assert "(C4(A) X) W4'" in _best(hops.chebyshev(4), 8, 64)
    assert _best(hops.mixture(2), 64, 8) == "a (X W') + A (c (X W') + A (c (X W')))"
    assert _best(hops.mixture(2), 8, 64) == "(a X + A (c X + A (c X))) W'"


def test_appnp_has_one_order_only():
    (plan,) = plans(Request(hops.teleports(3), ("X",)))
    assert plan.name == "a X + A (a X + A (a X + A (X))); dX = a G + A' (a G + A' (a G + A' (G)))"


def test_gcn2_has_one_order_only():
    """(A X + c R) W with W [k, k]: whatever is wanted, to sum first takes no more of anything than another order."""
    features, weight = Leaf("X", "n", "k"), Leaf("W", "k", "k")
    terms = (
        Term((Sparse("A", "n", "n"), features, Transpose(weight))),
        Term((Leaf("R", "n", "k"), Transpose(weight)), "c"),
    )
    grid = itertools.product(((), ("W",), ("X", "W"), ("X", "W", "R")), (1_000, 1_000_000), (4, 64, 1024))
    for wanted, edges, k in grid:
        best = rank(Request(terms, wanted), {"n": 10_000, "E": edges, "k": k}, 4, TYPICAL).best
        assert str(best.forward) == "(c R + A (X)) W'"


MANY = {
    "SG": lambda: pyg.SGConv(4, 3, K=1200),
    "TAG": lambda: pyg.TAGConv(4, 3, K=300),
    "SSG": lambda: pyg.SSGConv(4, 3, alpha=0.1, K=1200),
    "APPNP": lambda: pyg.APPNP(K=1200, alpha=0.1),
    "Cheb": lambda: pyg.ChebConv(4, 3, K=500, normalization="rw"),
}


@pytest.mark.parametrize("backend", ["stretto", "torch"])
@pytest.mark.parametrize("name", MANY)
def test_more_hops_than_pythons_stack_holds_give_what_stock_gives(name, backend, monkeypatch):
    """Plans are walked by functions that call themselves, hop by hop."""
    monkeypatch.setenv("STRETTO_BACKEND", "torch" if backend == "torch" else "")
    torch.manual_seed(0)
    stock = MANY[name]().double()
    index = torch.randint(20, (2, 60))
    index = torch.cat([index, index.flip(0)], dim=1).unique(dim=1)
    x = torch.randn(20, 4, dtype=torch.float64).requires_grad_()
    wanted = stock(x, index)
    gradient = torch.autograd.grad(wanted.sum(), x)[0]
    fast = stretto.accelerate(copy.deepcopy(stock))
    for _ in range(3):
        out = fast(x, index)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], gradient)
    stretto.report(fast)


@pytest.mark.parametrize("backend", ["stretto", "torch"])
def test_appnps_input_is_the_users_to_edit(backend, monkeypatch):
    """As with stock: x += conv(x). No gradient reads x, of any order."""
    monkeypatch.setenv("STRETTO_BACKEND", "torch" if backend == "torch" else "")
    torch.manual_seed(0)
    index = torch.randint(N, (2, EDGES))
    given = torch.randn(N, 4, dtype=torch.float64).requires_grad_()
    found = []
    for conv in (pyg.APPNP(K=3, alpha=0.1), stretto.accelerate(pyg.APPNP(K=3, alpha=0.1))):
        x = 2 * given
        x += conv(x, index)
        found.append(torch.autograd.grad(x.sin().sum(), given, create_graph=True)[0])
    torch.testing.assert_close(*found)
    assert record_of(conv).path == "fast"
    assert torch.autograd.gradgradcheck(lambda x: conv(x, index).sin(), given)
