"""Layers with several orders of evaluation: all equal, priced, timed inside real steps, kept on disk, and told."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.compile import CHOOSER, Order, Trial, best_order
from stretto.compile import choose as choosing
from stretto.compile.cost import gat_on_cpu, rgcn_seconds
from stretto.layers import gat, record_of, rgcn
from stretto.machine.rates import TYPICAL
from stretto.plug.explain import explain

N, EDGES = 40, 300


@pytest.fixture(autouse=True)
def _fresh(fresh_memo):
    CHOOSER.clear()
    yield
    CHOOSER.clear()


@pytest.fixture
def tried(monkeypatch):
    """Every order is worth timing, however small the graph."""
    monkeypatch.setenv("STRETTO_TUNE", "on")
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setattr(choosing, "CLOSE", 1e9)


LAYERS = {
    "GAT": (lambda: pyg.GATConv(6, 5, heads=3), {gat.REUSE, gat.FOLDED}),
    "GAT averaged": (lambda: pyg.GATConv(6, 5, heads=3, concat=False), {gat.REUSE, gat.FOLDED}),
    "GAT residual": (lambda: pyg.GATConv(6, 5, heads=2, residual=True), {gat.REUSE, gat.FOLDED}),
    "GAT of pairs": (lambda: pyg.GATConv((6, 6), 5, heads=2, add_self_loops=False), {gat.REUSE, gat.FOLDED}),
    "RGCN": (lambda: pyg.RGCNConv(6, 5, 4, num_bases=2), {rgcn.PAIRS, rgcn.BASES}),
    "RGCN sum": (lambda: pyg.RGCNConv(6, 5, 4, num_bases=3, aggr="sum"), {rgcn.PAIRS, rgcn.BASES}),
}


def _case(name):
    torch.manual_seed(0)
    stock = LAYERS[name][0]().double()
    x = torch.randn(N, 6, dtype=torch.float64, requires_grad=True)
    rest = (torch.randint(N, (2, EDGES)),) + ((torch.randint(4, (EDGES,)),) if "RGCN" in name else ())
    return stock, stretto.accelerate(copy.deepcopy(stock)), (x, x.detach() * 2) if "pairs" in name else x, rest


def _step(conv, x, rest):
    leaves = [x[0] if isinstance(x, tuple) else x, *conv.parameters()]
    out = conv(x, *rest)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("name", LAYERS)
def test_orders_are_timed_in_real_steps_each_of_them_right(name, tried):
    stock, fast, x, rest = _case(name)
    wanted = _step(stock, x, rest)
    seen = []
    for _ in range(choosing.WARM + 2 * choosing.TRIES + 2):
        for got, want in zip(_step(fast, x, rest), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        seen.append(record_of(fast).plan)
    assert set(seen) == LAYERS[name][1]
    decision = CHOOSER.decision(record_of(fast).key)
    assert decision.how == "measured"
    assert seen[-1] == seen[-2] == decision.chosen.name
    assert set(decision.ranking.measured) == {order for _, order in decision.ranking.predicted}
    with torch.no_grad():  # another signature
        torch.testing.assert_close(fast(x, *rest), wanted[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["GAT", "RGCN"])
def test_the_choice_is_found_again(name, tried, fresh_memo):
    _, fast, x, rest = _case(name)
    for _ in range(choosing.WARM + 2 * choosing.TRIES):
        _step(fast, x, rest)
    chosen = CHOOSER.decision(record_of(fast).key).chosen.name
    CHOOSER.clear()  # another process
    stretto.Graph.cache_clear()
    _step(fast, x, (rest[0].clone(), *rest[1:]))
    decision = CHOOSER.decision(record_of(fast).key)
    assert (decision.how, decision.chosen.name) == ("measured earlier", chosen)


@pytest.mark.parametrize("name", ["GAT", "RGCN"])
def test_explain_tells_all_orders(name, tried):
    _, fast, x, rest = _case(name)
    for _ in range(choosing.WARM + 2 * choosing.TRIES):
        _step(fast, x, rest)
    (layer,) = explain(fast, x, *rest).layers
    assert {c.plan for c in layer.candidates} == LAYERS[name][1]
    assert sum(c.chosen for c in layer.candidates) == 1
    assert all(c.predicted_ms > 0 and c.measured_ms > 0 for c in layer.candidates)
    assert layer.normalisation == ""
    assert "chosen by measured" in str(explain(fast, x, *rest))


def test_a_small_graph_takes_the_prediction_at_once(monkeypatch):
    entered = []
    monkeypatch.setattr(Trial, "enter", lambda *given: entered.append(given))
    _, fast, x, rest = _case("GAT")
    _step(fast, x, rest)
    assert not entered
    assert CHOOSER.decision(record_of(fast).key).how == "predicted"


@pytest.mark.parametrize(
    ("i", "heads", "width", "first"), [(8, 1, 64, True), (64, 1, 8, False), (16, 8, 16, True), (64, 4, 16, False)]
)
def test_gat_sums_first_where_inputs_are_narrow(i, heads, width, first):
    sizes = {"n": 10_000, "m": 10_000, "E": 200_000, "i": i, "o": heads * width}
    project_first, sum_first = gat_on_cpu(TYPICAL, sizes, heads, 4, 1)
    assert (sum_first < project_first) == first


def test_rgcn_takes_bases_where_pairs_are_many():
    sizes = {"n": 10_000, "m": 10_000, "E": 400_000, "i": 64, "o": 64}
    by_pairs, by_bases = rgcn_seconds(TYPICAL, {**sizes, "P": 300_000}, 4, 4, 1)
    assert by_bases < by_pairs
    by_pairs, by_bases = rgcn_seconds(TYPICAL, {**sizes, "P": 20_000}, 30, 4, 1)
    assert by_pairs < by_bases


def test_a_trial_counts_forward_and_backward(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("stretto.compile.orders.time.perf_counter", lambda: float(next(clock)))
    found = []
    monkeypatch.setattr(CHOOSER, "record", lambda key, order, seconds: found.append(seconds))
    x, w = torch.ones(3, requires_grad=True), torch.ones(3)
    trial = Trial("key", Order("order"))
    y, same = trial.enter(x, w)  # at 0
    assert same is w
    out = trial.leave(y * same)  # at 1
    assert not found
    out.sum().backward()  # from 2 to 3
    assert found == [1.0 + 1.0]
    assert torch.equal(x.grad, w)
    with torch.no_grad():
        trial.leave(*trial.enter(x))
    assert found == [2.0, 1.0]


def test_orders_that_are_dominated_are_not_tried(monkeypatch, tried):
    monkeypatch.setattr(choosing, "CLOSE", 1.6)
    near, far = Order("near"), Order("far")
    sizes = {"n": 10, "m": 10, "E": 10, "i": 4}
    order, trial, key = best_order("a layer", lambda rates: [(5.0, far), (1.0, near)], sizes, torch.ones(1), True)
    assert (order, trial) == (near, None)
    assert [o for _, o in CHOOSER.decision(key).ranking.predicted] == [near, far]
