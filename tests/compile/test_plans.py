"""Every plan of every expression computes the same result and gradients, and the space holds what it must."""

import copy
import itertools
import math
import pickle
import sys

import pytest
import torch

from stretto import Graph
from stretto.compile import Adjacency, Leaf, Request, Sparse, Term, Transpose, plans, rules
from stretto.compile import plan as planning
from stretto.compile.constants import candidates
from stretto.compile.cost import Prices
from stretto.compile.execute import Call
from stretto.compile.expr import gradient, leaves
from stretto.compile.layer import run
from stretto.compile.plan import rank
from stretto.compile.rules import forms
from stretto.layers import gcn, gin, hops, sage
from stretto.machine.rates import TYPICAL

EXPRESSIONS = {
    "gcn": gcn.EXPRESSION,
    "sage": sage.WITH_OWN_ROOT,
    "sage bipartite": sage.WITH_OTHER_ROOT,
    "gin": gin.OWN_ROOT,
    "sgc 3": hops.power(3),
    "tag 1": hops.polynomial(1),
    "tag 2": hops.polynomial(2),
    "tag 3": hops.polynomial(3),
    "cheb 3": hops.chebyshev(3),
    "cheb 5": hops.chebyshev(5),
    "ssg 1": hops.mixture(1),
    "ssg 3": hops.mixture(3),
}
ARXIV = {"n": 131072, "m": 131072, "E": 2_200_000}


def _setting(expression, num_rows=9, num_cols=9, edges=40):
    sizes = {"n": num_rows, "m": num_cols, "i": 4, "o": 3, "r": 5}
    torch.manual_seed(0)
    tensors = {}
    for term in expression:
        for factor in term.factors:
            leaf = factor.of if isinstance(factor, Transpose) else factor
            if isinstance(leaf, Leaf):
                shape = sizes[leaf.rows], sizes[leaf.cols]
                tensors.setdefault(leaf.name, torch.randn(shape, dtype=torch.float64).requires_grad_())
    index = torch.stack([torch.randint(num_cols, (edges,)), torch.randint(num_rows, (edges,))])
    graph = Graph.of(index, (num_cols, num_rows))
    adj = Adjacency(graph, torch.rand(num_rows, dtype=torch.float64), torch.rand(num_cols, dtype=torch.float64))
    dense = torch.zeros(num_rows, num_cols, dtype=torch.float64)
    dense.index_put_((index[1], index[0]), torch.ones(edges, dtype=torch.float64), accumulate=True)
    return tensors, adj, adj.row_scale[:, None] * dense * adj.col_scale


def _by_hand(expression, tensors, dense, scalars):
    total = 0
    for term in expression:
        value = None
        for factor in term.factors:
            if isinstance(factor, Sparse):
                matrix = torch.linalg.matrix_power(dense, factor.power) if factor.power > 1 else dense
                matrix = _chebyshev(dense, factor.power) if factor.chebyshev else matrix
            else:
                leaf = factor.of if isinstance(factor, Transpose) else factor
                matrix = tensors[leaf.name].t() if isinstance(factor, Transpose) else tensors[leaf.name]
            value = matrix if value is None else value @ matrix
        total = total + value * (scalars[term.scale] if term.scale else 1)
    return total


def _chebyshev(dense, power):
    """2 T_k(A / 2) = 2 cos(k acos(A / 2)), from the roots of T_k."""
    angles = [math.pi * (j + 0.5) / power for j in range(power)]
    found = torch.eye(len(dense), dtype=dense.dtype)
    for angle in angles:
        found = found @ (dense - 2 * math.cos(angle) * torch.eye(len(dense), dtype=dense.dtype))
    return found


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_plan_agrees_with_dense_algebra(name):
    expression = EXPRESSIONS[name]
    bipartite = "bipartite" in name
    tensors, adj, dense = _setting(expression, num_rows=7 if bipartite else 9)
    names = tuple(leaves(expression))
    scalars = {"c": 1.7, "a": 0.3}
    wanted = _by_hand(expression, tensors, dense, scalars)
    upstream = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad((wanted * upstream).sum(), [tensors[n] for n in names])
    found = plans(Request(expression, names))
    assert len(found) >= 2
    for plan in found:
        out = run(Call(plan, names, {"A": adj}, scalars), tuple(tensors[n] for n in names))
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
        grads = torch.autograd.grad((out * upstream).sum(), [tensors[n] for n in names])
        for got, want in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gcn", "sage", "tag 2", "cheb 3", "ssg 3"])
def test_plans_can_be_differentiated_twice(name):
    expression = EXPRESSIONS[name]
    tensors, adj, _ = _setting(expression, edges=12)
    names = tuple(leaves(expression))
    plan = plans(Request(expression, names))[0]

    def layer(*values):
        return run(Call(plan, names, {"A": adj}, {"c": 1.7, "a": 0.3}), values)

    assert torch.autograd.gradgradcheck(layer, tuple(tensors[n] for n in names))


@pytest.mark.parametrize("backend", ["stretto", "torch"])
def test_plans_do_not_depend_on_our_kernels(backend, monkeypatch):
    monkeypatch.setenv("STRETTO_BACKEND", backend)
    tensors, adj, dense = _setting(gcn.EXPRESSION)
    wanted = _by_hand(gcn.EXPRESSION, tensors, dense, {})
    for plan in plans(Request(gcn.EXPRESSION, ("X", "W"))):
        out = run(Call(plan, ("X", "W"), {"A": adj}), (tensors["X"], tensors["W"]))
        torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
        for got in torch.autograd.grad(out.sum(), (tensors["X"], tensors["W"])):
            assert torch.isfinite(got).all()


def test_the_space_holds_both_orders_and_both_gradients():
    names = {plan.name for plan in plans(Request(gcn.EXPRESSION, ("W", "X")))}
    assert any(n.startswith("A (X W')") for n in names)
    assert any(n.startswith("(A X) W'") for n in names)
    assert any("dW = G' (A X)" in n for n in names)
    assert any("dW = (A' G)' X" in n for n in names)
    assert any("dX = A' (G W)" in n for n in names)
    assert any("dX = (A' G) W" in n for n in names)


def test_horner_is_found_and_the_plain_sum_of_its_terms_is_dropped():
    texts = [str(form) for form in forms(hops.polynomial(3))]
    assert "X W0' + A (X W1' + A (X W2' + A (X W3')))" in texts
    assert "X W0' + A (X W1') + A (A (X W2')) + A (A (A (X W3')))" not in texts


@pytest.mark.parametrize("name", ["tag 2", "tag 3", "cheb 3", "ssg 3"])
def test_no_mixture_of_orientations_is_ever_the_best(name, monkeypatch):
    """Terms and gradients that differ in powers and weights alone take one orientation: priced against all others."""
    expression = EXPRESSIONS[name]
    weights = tuple(leaves(expression))[1:]
    requests = [Request(expression, wanted, h) for wanted in ((), weights, ("X", *weights)) for h in ((), _kept(name))]
    few = [plans(request) for request in requests]
    for module in (rules, planning):
        monkeypatch.setattr(module, "combinations", lambda choices, kinds: list(itertools.product(*choices)))
    for module in (rules, planning):
        monkeypatch.setattr(module, "forms", forms.__wrapped__)  # not those it remembers
    monkeypatch.setattr(planning, "MOST_PLANS", 10**6)
    for request, ours in zip(requests, few, strict=True):
        every = planning.plans.__wrapped__(request)
        assert len(every) >= len(ours)
        for i, o, edges in itertools.product((8, 32, 200), (8, 64), (2_000, 200_000)):
            prices = Prices({"n": 1000, "E": edges, "i": i, "o": o}, 4, TYPICAL)
            assert min(p.seconds(prices) for p in ours) == pytest.approx(min(p.seconds(prices) for p in every))


def _kept(name):
    """All that is known of a constant X."""
    return candidates(EXPRESSIONS[name])


def test_the_number_of_plans_does_not_grow_with_the_hops():
    counts = {len(plans(Request(hops.polynomial(k), ("X", *(f"W{j}" for j in range(k + 1)))))) for k in range(2, 9)}
    assert len(counts) == 1


def test_gradients_are_written_as_products():
    assert [str(t) for t in gradient(gcn.EXPRESSION, "W")] == ["G' A X"]
    assert [str(t) for t in gradient(gcn.EXPRESSION, "X")] == ["A' G W"]
    assert [str(t) for t in gradient(hops.power(2), "X")] == ["A'^2 G W"]


def _widths(expression, wanted, sizes, hoisted=()):
    best = rank(Request(expression, wanted, hoisted), sizes, 4, TYPICAL).best
    return sum(w.width for w in best.works(sizes) if w.kind == "spmm")


# Sparse work per epoch of two-layer nets, in units of E: a constant first layer costs none, the second its best order.
@pytest.mark.parametrize(
    ("widths", "total"),
    [((602, 32, 41), 64), ((100, 256, 47), 94), ((128, 256, 40), 80), ((1433, 16, 7), 14)],
)
def test_sparse_work_of_a_training_step_is_the_least_there_is(widths, total):
    i, h, o = widths
    hoisted = candidates(gcn.EXPRESSION)
    first = _widths(gcn.EXPRESSION, ("W",), {**ARXIV, "i": i, "o": h}, hoisted)
    second = _widths(gcn.EXPRESSION, ("X", "W"), {**ARXIV, "i": h, "o": o})
    assert (first, second) == (0, total)


def test_a_sampled_block_counts_its_sources():
    # Fan-out 10, five times more sources than destinations: update-first would multiply all sources, so the aggregation
    # comes first although it is the wider one.
    sizes = {"n": 10_000, "m": 500_000, "E": 100_000, "i": 256, "o": 47}
    best = rank(Request(gcn.EXPRESSION), sizes, 4, TYPICAL).best
    assert str(best.forward) == "(A X) W'"
    square = rank(Request(gcn.EXPRESSION), {**sizes, "n": 10_000, "m": 10_000, "E": 1_000_000}, 4, TYPICAL).best
    assert str(square.forward) == "A (X W')"


def test_intermediate_values_are_kept_only_where_a_gradient_reads_them():
    for plan in plans(Request(gcn.EXPRESSION, ("W",))):
        kept = [str(node) for node in plan.kept]
        reads = "dW = G' (A X)" in plan.name and plan.name.startswith("(A X)")
        assert kept == (["A X"] if reads else [])


def test_equal_nodes_are_one_object_copied_or_not():
    one, same = hops.polynomial(3), plans(Request(hops.polynomial(3), ("W1",)))
    again = Leaf("X", cols="i", rows="n")
    assert again is Leaf("X", "n", "i")
    assert Sparse("A", "n", "n", 2) is Sparse("A", "n", "n", power=2, transposed=False)
    assert Sparse("A", "n", "n", 2) is not Sparse("A", "n", "n", 2, chebyshev=True)
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one)[2] is one[2]
    assert pickle.loads(pickle.dumps(same[0].forward)) is same[0].forward


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("polynomial", [hops.polynomial, hops.mixture, hops.chebyshev])
def test_a_decision_on_twenty_hops_takes_few_calls(polynomial, fuses):
    """Calls are counted, which is the same everywhere, and not seconds: it must stay well below 10 ms."""
    suffix = f"{polynomial.__name__} {fuses}"  # of leaves: nothing of this is known from earlier tests
    terms = [Term(tuple(_unmet(f, suffix) for f in term.factors), term.scale) for term in polynomial(20)]
    request = Request(tuple(terms), tuple(leaves(tuple(terms))), scales=(("A", True, True),), fuses=fuses)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        rank(request, {"n": 1000, "E": 9000, "i": 64, "o": 16, "fresh": 1}, 4, TYPICAL)
    finally:
        sys.setprofile(None)
    assert calls < 30_000


def _unmet(factor, suffix):
    """The factor with a name of its own."""
    if isinstance(factor, Transpose):
        return Transpose(_unmet(factor.of, suffix))
    return Leaf(f"{factor.name} {suffix}", factor.rows, factor.cols) if isinstance(factor, Leaf) else factor


def test_only_what_a_gradient_reads_is_held_for_it():
    """The features are not, where the weight is frozen; nor are those of a layer without one."""
    assert all(plan.read == {"G", "W"} for plan in plans(Request(gcn.EXPRESSION, ("X",))))
    assert all(plan.read == {"G", "X"} for plan in plans(Request(gcn.EXPRESSION, ("W",))))
    assert all(plan.read == {"G"} for plan in plans(Request(hops.teleports(3), ("X",))))
    assert all(plan.read == set() for plan in plans(Request(gcn.EXPRESSION)))
    kept = Request(gcn.EXPRESSION, ("W",), hoisted=candidates(gcn.EXPRESSION))  # A X, to be differentiated again
    assert all(plan.read == {"G", "X"} for plan in plans(kept))
