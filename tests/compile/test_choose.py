"""Choosing: decided once per signature, timed inside real steps, kept on disk, deterministic when asked; hoisting."""

import pytest
import torch

from stretto import Graph
from stretto.compile import CHOOSER, HOIST, Adjacency, linear
from stretto.compile import choose as choosing
from stretto.layers.gcn import EXPRESSION


@pytest.fixture(autouse=True)
def _fresh():
    CHOOSER.clear()
    HOIST.clear()
    yield
    CHOOSER.clear()
    HOIST.clear()


def _layer(n=300, edges=3000, i=24, o=24):
    torch.manual_seed(0)
    graph = Graph.of(torch.randint(n, (2, edges)), n)
    x, w = torch.randn(n, i), torch.randn(o, i, requires_grad=True)
    return graph, x, w


def _step(graph, x, w):
    seen = []
    out = linear(EXPRESSION, {"X": x, "W": w}, {"A": Adjacency(graph)}, note=lambda key, plan: seen.append((key, plan)))
    if out.requires_grad:
        out.sum().backward()
    return seen[0]


def test_small_inputs_take_the_prediction_at_once():
    graph, x, w = _layer()
    key, plan = _step(graph, x.requires_grad_(), w)
    assert CHOOSER.decision(key).chosen is plan


def test_candidates_are_timed_in_real_steps_and_the_choice_is_kept(monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "on")
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setattr(choosing, "CLOSE", 1e9)
    graph, x, w = _layer()
    x.requires_grad_()
    wanted = graph_result(graph, x, w)
    plans_seen = set()
    for _ in range(20):
        out = linear(EXPRESSION, {"X": x, "W": w}, {"A": Adjacency(graph)}, note=lambda k, p: plans_seen.add(p.name))
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        out.sum().backward()
    key, plan = _step(graph, x, w)
    decision = CHOOSER.decision(key)
    assert len(plans_seen) == choosing.MOST_TRIED
    assert decision.chosen is plan
    assert decision.how == "measured"
    CHOOSER.clear()  # another process
    key, again = _step(graph, x, w)
    assert again.name == plan.name
    assert CHOOSER.decision(key).how == "measured earlier"


def graph_result(graph, x, w):
    dense = torch.zeros(graph.num_rows, graph.num_cols)
    source, target = graph.edge_index
    dense.index_put_((target, source), torch.ones(graph.num_edges), accumulate=True)
    return (dense @ x @ w.t()).detach()


@pytest.mark.parametrize("how", ["analytic", "deterministic"])
def test_the_choice_is_deterministic_when_asked(how, monkeypatch):
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setenv("STRETTO_TUNE", "analytic" if how == "analytic" else "on")
    graph, x, w = _layer()
    torch.use_deterministic_algorithms(how == "deterministic")
    try:
        names = set()
        for _ in range(5):
            CHOOSER.clear()
            names.add(_step(graph, x.requires_grad_(), w)[1].name)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(names) == 1


def test_determinism_switched_on_ends_measuring_and_what_was_measured(monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "on")
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setattr(choosing, "CLOSE", 1e9)
    graph, x, w = _layer()
    x.requires_grad_()
    for steps in (4, 20):  # in the middle of trying, and settled
        for _ in range(steps):
            key, _ = _step(graph, x, w)
        torch.use_deterministic_algorithms(True)
        try:
            names = {_step(graph, x, w)[1].name for _ in range(6)}
            decision = CHOOSER.decision(key)
        finally:
            torch.use_deterministic_algorithms(False)
        assert names == {decision.ranking.best.name}
        assert (decision.how, decision.times) == ("predicted", {})
    assert CHOOSER.decision(key).how == "measured"


def test_decisions_hold_for_a_number_of_threads(monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "on")
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setattr(choosing, "CLOSE", 1e9)
    graph, x, w = _layer()
    x.requires_grad_()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            key, _ = _step(graph, x, w)
            assert CHOOSER.decision(key).how == "predicted"
            for _ in range(20):
                _step(graph, x, w)
            assert CHOOSER.decision(key).how == "measured"
            assert CHOOSER._facts["threads"] == threads
        torch.set_num_threads(1)
        _step(graph, x, w)
        assert CHOOSER.decision(key).how == "measured"
        CHOOSER.clear()  # another process
        _step(graph, x, w)
        assert CHOOSER.decision(key).how == "measured earlier"
    finally:
        torch.set_num_threads(before)


def test_batches_of_similar_size_share_a_decision():
    for n in (1000, 1010, 1020):
        graph, x, w = _layer(n=n, edges=10 * n)
        _step(graph, x.requires_grad_(), w)
    assert len(CHOOSER._known()) == 1


def test_a_constant_input_is_aggregated_once():
    graph, x, w = _layer(i=8, o=32)
    _step(graph, x, w)
    assert HOIST.nbytes() == 0  # seen once: not known to be constant
    for _ in range(3):
        _, plan = _step(graph, x, w)
    assert plan.hoisted
    assert HOIST.nbytes() == x.numel() * 4
    assert not [work for work in plan.works({"n": 300, "m": 300, "E": 3000, "i": 8, "o": 32}) if work.kind == "spmm"]


def test_an_edit_in_place_ends_the_hoist():
    graph, x, w = _layer(i=8, o=32)
    for _ in range(3):
        _step(graph, x, w)
    x.mul_(2)
    out = linear(EXPRESSION, {"X": x, "W": w}, {"A": Adjacency(graph)})
    torch.testing.assert_close(out, graph_result(graph, x, w), rtol=1e-4, atol=1e-3)


def test_what_comes_out_of_dropout_is_never_hoisted():
    graph, x, w = _layer(i=8, o=32)
    for _ in range(4):
        _, plan = _step(graph, torch.nn.functional.dropout(x, 0.5), w)
    assert not plan.hoisted
    assert HOIST.nbytes() == 0


def test_the_budget_is_kept(monkeypatch):
    monkeypatch.setenv("STRETTO_HOIST_MB", "0")
    graph, x, w = _layer(i=8, o=32)
    for _ in range(4):
        _, plan = _step(graph, x, w)
    assert not plan.hoisted
    assert HOIST.nbytes() == 0


def test_hoisted_products_go_with_their_tensor():
    graph, x, w = _layer(i=8, o=32)
    for _ in range(3):
        _step(graph, x, w)
    assert HOIST.nbytes() > 0
    del x
    assert HOIST.nbytes() == 0


def test_calibration_leaves_the_users_random_numbers_alone():
    from stretto.machine.rates import calibrate

    torch.manual_seed(5)
    wanted = torch.rand(4)
    torch.manual_seed(5)
    calibrate(torch.device("cpu"))
    assert torch.equal(torch.rand(4), wanted)


def test_a_sum_with_one_weight_is_kept_whole_and_made_anew_when_its_number_changes():
    from stretto.layers.gin import OWN_ROOT

    graph, x, w = _layer(i=8, o=32)
    sizes = {"n": 300, "m": 300, "E": 3000, "i": 8, "o": 32}
    for c in (1.0, 1.0, 1.0, 0.5):
        noted = []
        w.grad = None
        out = linear(
            OWN_ROOT,
            {"X": x, "W": w},
            {"A": Adjacency(graph)},
            scalars={"c": c},
            note=lambda key, plan: noted.append(plan),  # noqa: B023
        )
        out.square().sum().backward()
        wanted_w = w.detach().clone().requires_grad_()
        wanted = (graph_sum(graph, x) + c * x) @ wanted_w.t()
        wanted.square().sum().backward()
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(w.grad, wanted_w.grad, rtol=1e-4, atol=1e-2)
    kinds = [work.kind for work in noted[0].works(sizes)]
    assert kinds == ["gemm", "gemm"]  # one forward, one for the weight


def graph_sum(graph, x):
    source, target = graph.edge_index
    return torch.zeros(graph.num_rows, x.size(1)).index_add_(0, target, x[source])
