"""Normalisation: fused, precomputed and dynamic are all there, all equal, and each is chosen where it is the best."""

import itertools

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto import Graph
from stretto.compile import CHOOSER, Adjacency, Leaf, Request, Sparse, Term, Transpose, linear, plans
from stretto.compile.execute import Call
from stretto.compile.expr import Diagonal
from stretto.compile.layer import run
from stretto.compile.plan import _bag, _contains, rank, ways
from stretto.layers import gcn, hops
from stretto.machine.rates import TYPICAL

SCALED = (("A", True, True),)
SIZES = {"n": 100_000, "m": 100_000, "E": 2_000_000, "i": 64, "o": 16, "weighted": 1}


@pytest.fixture(autouse=True)
def _fresh():
    CHOOSER.clear()
    yield
    CHOOSER.clear()


def _names(fuses, wanted=()):
    return [plan.name for plan in plans(Request(gcn.EXPRESSION, wanted, (), SCALED, fuses=fuses))]


def test_kernels_that_fuse_make_the_other_ways_pointless():
    assert ways(True) == ("fused",)
    assert _names(True, ("X", "W")) == [plan.name for plan in plans(Request(gcn.EXPRESSION, ("X", "W")))]


def test_without_fusion_both_other_ways_remain_in_both_orders():
    assert ways(False) == ("precomputed", "dynamic")
    assert set(_names(False)) == {
        "norm(A) (X W')",
        "(norm(A) X) W'",
        "S (A (T (X W')))",  # scalings at the width of the result
        "S (A ((T X) W'))",  # one at either width
        "(S (A (T X))) W'",
        "S ((A (T X)) W')",
    }


def _brackets(factors):
    """(bag of works, kind, size) of every way to bracket a product: also of scalings with the matrix, one by one."""
    if len(factors) == 1:
        yield {}, *factors[0]
        return
    for cut in range(1, len(factors)):
        for (left, a, (rows, _)), (right, b, (_, cols)) in itertools.product(
            list(_brackets(factors[:cut])), list(_brackets(factors[cut:]))
        ):
            bag = {key: left.get(key, 0) + right.get(key, 0) for key in {**left, **right}}
            if "dense" not in (a, b):
                kind, work = "values", None  # a matrix with a value per edge
            elif a == "dense":
                kind, work = "dense", ("gemm", *sorted((rows, "i", cols)))
            else:
                kind, work = "dense", ("scale" if a == "scale" else "spmm", rows, cols)
                if a == "values":
                    bag["values", rows, cols] = bag.get(("values", rows, cols), 0) + 1
            if work is not None:
                bag[work] = bag.get(work, 0) + 1
            yield bag, kind, (rows, cols)


def test_no_way_to_bracket_the_five_factors_beats_all_of_ours():
    """S A T X W' has 14 ways; whatever of them no other contains is the work of one of our plans."""
    factors = [
        ("scale", ("n", "n")),
        ("spmm", ("n", "m")),
        ("scale", ("m", "m")),
        ("dense", ("m", "i")),
        ("dense", ("i", "o")),
    ]
    every = [bag for bag, _, _ in _brackets(factors)]
    assert len(every) == 14
    best = [bag for bag in every if not any(_contains(bag, other) and other != bag for other in every)]
    ours = [_bag(plan) for plan in plans(Request(gcn.EXPRESSION, (), (), SCALED, fuses=False))]
    assert len(best) >= 4
    for bag in best:
        assert bag in ours


def test_scalings_written_out_are_the_matrix_itself():
    bare = Sparse("A", "n", "m", form="bare")
    written = (
        Term((Diagonal("S", "n"), bare, Diagonal("T", "m"), Leaf("X", "m", "i"), Transpose(Leaf("W", "o", "i")))),
    )
    names = {plan.name for plan in plans(Request(written))}
    assert "S (A (T (X W')))" in names
    assert "S ((A (T X)) W')" in names
    adj, x, w = _setting()
    wanted = linear(gcn.EXPRESSION, {"X": x, "W": w}, {"A": adj})
    for plan in plans(Request(written, ("X", "W"))):
        x.requires_grad_()
        out = run(Call(plan, ("X", "W"), {"A": adj}), (x, w))
        torch.testing.assert_close(out, wanted)
        found = torch.autograd.grad(out.square().sum(), (x, w))
        expected = torch.autograd.grad(linear(gcn.EXPRESSION, {"X": x, "W": w}, {"A": adj}).square().sum(), (x, w))
        torch.testing.assert_close(found, expected)


def _setting(n=50, edges=400, i=6, o=4):
    torch.manual_seed(0)
    graph = Graph.of(torch.randint(n, (2, edges)), n)
    scales = torch.rand(n, dtype=torch.float64), torch.rand(n, dtype=torch.float64)
    x = torch.randn(n, i, dtype=torch.float64)
    return Adjacency(graph, *scales), x, torch.randn(o, i, dtype=torch.float64, requires_grad=True)


def _best(**sizes):
    return rank(Request(gcn.EXPRESSION, (), (), SCALED, fuses=False), {**SIZES, **sizes}, 4, TYPICAL).best.name


def test_edges_are_normalised_once_where_the_graph_stays_and_rows_where_it_does_not():
    assert _best() == "norm(A) (X W')"
    assert _best(fresh=1) == "S (A (T (X W')))"
    assert _best(fresh=1, E=50_000, o=512, i=256).startswith("(norm(A) X)")  # few edges: less than rows that wide
    assert _best(fresh=1, i=16, o=64) == "(S (A (T X))) W'"


@pytest.mark.parametrize("expression", [gcn.EXPRESSION, hops.power(2), hops.polynomial(2)], ids=["gcn", "sgc", "tag"])
def test_on_torch_s_kernels_the_choice_is_made_shown_and_right(expression, monkeypatch, fresh_memo):
    adj, x, w = _setting()
    tensors = {"X": x.requires_grad_()} | ({"W": w} if len(expression) == 1 else {f"W{k}": w * k for k in range(1, 4)})
    tensors |= {"W0": tensors.pop("W3")} if "W3" in tensors else {}
    wanted = linear(expression, tensors, {"A": adj})
    monkeypatch.setenv("STRETTO_BACKEND", "torch")
    seen = []
    for _ in range(2):
        out = linear(expression, tensors, {"A": adj}, note=lambda key, plan: seen.append((key, plan.name)))
        torch.testing.assert_close(out, wanted)
    assert seen[0][0] != seen[1][0]  # a graph just met, and one that stays
    for key, name in seen:
        names = [plan.name for _, plan in CHOOSER.decision(key).ranking.predicted]
        assert name in names
        assert any("norm(A)" in other for other in names)
        assert any("S (A (T" in other for other in names)


def test_explain_tells_the_ways(monkeypatch):
    conv = stretto.accelerate(pyg.GCNConv(8, 4))
    x, edge_index = torch.randn(30, 8), torch.randint(30, (2, 90))
    fused = stretto.explain(conv, x, edge_index)
    assert "fused" in fused.layers[0].normalisation
    assert "dynamic" in str(fused)
    monkeypatch.setenv("STRETTO_BACKEND", "torch")
    conv(x, edge_index)
    found = stretto.explain(conv, x, edge_index).layers[0]
    assert found.backend == "torch"
    assert {"norm(A)", "S (A (T"} <= {
        part for c in found.candidates for part in ("norm(A)", "S (A (T") if part in c.plan
    }
    assert sum(c.chosen for c in found.candidates) == 1
