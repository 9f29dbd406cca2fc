"""A chain of hops, or the power itself: a plan where it has fewer edges, and equal to stock."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.compile import CHOOSER, HOIST, Adjacency, Request, plans
from stretto.compile import choose as choosing
from stretto.compile.powers import USES, fewer_edges, multiplied
from stretto.graph import Graph
from stretto.layers import hops, record_of


@pytest.fixture(autouse=True)
def _fresh(fresh_memo):
    CHOOSER.clear()
    HOIST.clear()
    yield
    CHOOSER.clear()
    HOIST.clear()


def cliques(count=40, size=6):
    """Directed both ways, without self-loops: with them A A has the edges of A."""
    inside = torch.ones(size, size).fill_diagonal_(0).nonzero().t()
    return torch.cat([inside + size * k for k in range(count)], 1), count * size


def path(n=300):
    one = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    return torch.cat([one, one.flip(0)], 1), n


def random_graph(n=300):
    return torch.randint(n, (2, 8 * n), generator=torch.Generator().manual_seed(0)), n


def _looped(make):
    edge_index, n = make()
    loops = torch.arange(n).expand(2, -1)
    return Graph.of(torch.cat([edge_index, loops], 1), n)


def _count(graph, power):
    for _ in range(USES):
        found = fewer_edges(graph, power)
    return found


def _dense(graph):
    source, target = graph.edge_index
    dense = torch.zeros(graph.num_rows, graph.num_cols, dtype=torch.float64)
    return dense.index_put((target, source), torch.ones(graph.num_edges, dtype=torch.float64), accumulate=True)


@pytest.mark.parametrize(("make", "power"), [(cliques, 2), (cliques, 5), (path, 2), (path, 3)])
def test_edges_of_a_power_are_estimated(make, power):
    graph = _looped(make)
    exact = int((_dense(graph).matrix_power(power) != 0).sum())
    assert abs(_count(graph, power) - exact) <= 0.05 * exact
    assert exact < power * graph.num_edges


def test_walks_are_not_followed_when_they_lead_nowhere_else(monkeypatch):
    """All of a clique is reached in one hop."""
    hops, unique = [], torch.Tensor.unique
    monkeypatch.setattr(torch.Tensor, "unique", lambda *a, **k: (hops.append(1), unique(*a, **k))[1])
    graph = _looped(cliques)
    assert _count(graph, 50) == graph.num_edges
    assert len(hops) < 10


def test_a_power_with_more_edges_is_none():
    assert _count(_looped(random_graph), 2) == 0
    star = torch.stack([torch.zeros(2000, dtype=torch.long), torch.arange(2000)])
    assert _count(Graph.of(torch.cat([star, star.flip(0)], 1), 2000), 2) == 0
    assert _count(Graph.of(torch.empty(2, 0, dtype=torch.long), 5), 2) == 0


def test_a_graph_that_is_new_is_not_looked_at():
    graph = _looped(cliques)
    assert [fewer_edges(graph, 2) > 0 for _ in range(USES + 1)] == [False] * (USES - 1) + [True, True]


@pytest.mark.parametrize("make", [cliques, path, random_graph])
@pytest.mark.parametrize("power", [2, 3])
def test_a_power_is_multiplied_out(make, power):
    graph = _looped(make)
    rows, columns = graph.csr.rows(), graph.csr.columns()
    values = torch.rand(graph.num_edges, dtype=torch.float64)
    dense = torch.zeros(graph.num_rows, graph.num_cols, dtype=torch.float64)
    dense = dense.index_put((rows, columns), values, accumulate=True).matrix_power(power)
    found, held = multiplied(graph, values, power)
    x = torch.randn(graph.num_cols, 3, dtype=torch.float64)
    for each, wanted in ((found, dense), (found.T, dense.t())):
        torch.testing.assert_close(stretto.ops.spmm(each, x, held), wanted @ x, rtol=1e-9, atol=1e-9)


def _gradients(conv, x, edge_index):
    out = conv(x, edge_index)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])]


@pytest.mark.parametrize("backend", ["stretto", "torch"])
@pytest.mark.parametrize("make", [cliques, path])
@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("widths", [(8, 3), (3, 8)])
def test_every_plan_of_sgc_is_stocks(backend, make, power, widths, monkeypatch):
    monkeypatch.setenv("STRETTO_BACKEND", backend)
    torch.manual_seed(0)
    edge_index, n = make()
    stock = pyg.SGConv(*widths, K=power).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x = torch.randn(n, widths[0], dtype=torch.float64, requires_grad=True)
    wanted = _gradients(stock, x, edge_index)
    for _ in range(USES):
        _gradients(fast, x, edge_index)
    decision = CHOOSER.decision(record_of(fast).key)
    formed = [plan for _, plan in decision.ranking.predicted if f"[A^{power}]" in str(plan.forward)]
    assert len(formed) >= 3
    for _, plan in decision.ranking.predicted:
        decision.chosen = plan
        for got, want in zip(_gradients(fast, x, edge_index), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert record_of(fast).plan == plan.name
    with torch.no_grad():
        torch.testing.assert_close(fast(x, edge_index), wanted[0], rtol=1e-9, atol=1e-9)
    assert any(f"[A^{power}]" in c.plan for c in stretto.explain(fast, x, edge_index).layers[0].candidates)


def test_where_it_pays_it_is_chosen_and_single_precision_holds(monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "analytic")
    torch.manual_seed(0)
    edge_index, n = cliques(200, 40)
    stock = pyg.SGConv(32, 16, K=4)
    fast = stretto.accelerate(copy.deepcopy(stock))
    x = torch.randn(n, 32, requires_grad=True)
    for _ in range(USES):
        got = _gradients(fast, x, edge_index)
    assert record_of(fast).plan.startswith("[A^4] (X W')")
    for mine, theirs in zip(got, _gradients(stock, x, edge_index), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_what_it_is_not_for(monkeypatch):
    edge_index, n = cliques()
    x = torch.randn(n, 8)

    def told(*more, grad=True):
        conv = stretto.accelerate(pyg.SGConv(8, 3, K=2))
        for _ in range(USES + 2):
            conv(x.clone().requires_grad_() if grad else x, edge_index, *more)
        return str([p.name for p in _plans(conv)])

    assert "[A^2]" in told()
    assert "[A^2]" not in told(torch.rand(edge_index.size(1)))  # weights may be others in the next step
    assert "[A^2]" not in told(grad=False)  # A^2 X is kept
    monkeypatch.setenv("STRETTO_PLAN", "stock")
    assert all("[" not in p.name for p in plans(Request(hops.power(2), ("X", "W"))))


def _plans(conv):
    return [plan for _, plan in CHOOSER.decision(record_of(conv).key).ranking.predicted]


def test_it_is_timed_in_real_steps_and_found_again(monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "on")
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setattr(choosing, "CLOSE", 1e9)
    monkeypatch.setattr(choosing, "MOST_TRIED", 99)
    edge_index, n = cliques()
    fast = stretto.accelerate(pyg.SGConv(8, 3, K=2))
    x = torch.randn(n, 8, requires_grad=True)
    for _ in range(120):
        fast(x, edge_index).sum().backward()
    decision = CHOOSER.decision(record_of(fast).key)
    assert decision.how == "measured"
    assert sum("[A^2]" in plan.name for plan in decision.ranking.measured) >= 3
    chosen = decision.chosen.name
    CHOOSER.clear()
    fast(x, edge_index).sum().backward()
    decision = CHOOSER.decision(record_of(fast).key)
    assert (decision.how, decision.chosen.name) == ("measured earlier", chosen)


def test_scales_that_differ_have_powers_of_their_own():
    graph = _looped(path)
    x = torch.randn(graph.num_rows, 2, dtype=torch.float64)
    for _ in range(2):
        scale = torch.rand(graph.num_rows, dtype=torch.float64)
        adj = Adjacency(graph, scale, None)
        wanted = (scale[:, None] * _dense(graph)).matrix_power(2) @ x
        torch.testing.assert_close(adj.power(2, x.dtype).apply(x, False), wanted, rtol=1e-9, atol=1e-9)
