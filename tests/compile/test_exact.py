"""Every plan of every expression in nn/, exactly: integers modulo a prime, where no rounding can hide anything.

Wanted values come from multiplying each term out from left to right; wanted gradients from differences, which are exact
because the result is linear in every leaf. Neither uses the laws, nor gradient(), that the plans were made with.
"""

import importlib
import itertools
import pkgutil

import numpy as np
import pytest
import torch

import stretto.layers
from stretto import Graph
from stretto.compile import Adjacency, Leaf, Request, Sparse, Term, Transpose, plans
from stretto.compile.constants import candidates
from stretto.compile.execute import Call
from stretto.compile.expr import Add, Clenshaw, Diagonal, Horner, MatMul, Scaled, Step, gradient, leaves
from stretto.compile.joint import PRODUCT, ROOT, _combined
from stretto.compile.layer import run
from stretto.compile.plan import Plan
from stretto.compile.powers import chain_of
from stretto.compile.rules import forms
from stretto.layers import gcn, hops

PRIME = 1_000_003
SCALED = (("A", True, True),)
NUMBERS = {"c": 2, "a": 3}
SIZES = {"n": 5, "m": 4, "i": 3, "o": 2, "r": 3}


def _found():
    """Every expression a module of nn/ declares, those that are made per number of hops, and those of joint plans."""
    found = {"joint.PRODUCT": PRODUCT, "joint.ROOT": ROOT}
    for info in pkgutil.iter_modules(stretto.layers.__path__):
        module = importlib.import_module(f"stretto.layers.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, tuple) and value and all(isinstance(term, Term) for term in value):
                found[f"{info.name}.{name}"] = value
    for k in range(1, 6):
        for make in (hops.power, hops.polynomial, hops.chebyshev, hops.mixture, hops.teleports):
            found[f"hops.{make.__name__}({k})"] = make(k)
    return found


EXPRESSIONS = _found()


def _inner(factor):
    return factor.of if isinstance(factor, Transpose) else factor


def _square(expression):
    """Whether sources and destinations are one set of nodes: a leaf of either has the other's number of rows."""
    rows = {leaf.rows for term in expression for leaf in map(_inner, term.factors) if leaf.name == "X"}
    first = {_inner(term.factors[0]).rows for term in expression}
    return len(first) > 1 or rows == {"n"}


def _values(expression, seed=0):
    """Random matrices for all leaves, by name; scalars too."""
    rng = np.random.default_rng(seed)
    sizes = {**SIZES, "m": SIZES["n"]} if _square(expression) else SIZES
    values = {"c": int(rng.integers(2, PRIME)), "a": int(rng.integers(2, PRIME))}
    for term in expression:
        for leaf in map(_inner, term.factors):
            if leaf.name not in values:
                made = rng.integers(0, PRIME, (sizes[leaf.rows], sizes[leaf.cols]), dtype=np.int64)
                values[leaf.name] = made
                if isinstance(leaf, Sparse):
                    values |= _normalised(leaf.name, made * (rng.random(made.shape) < 0.5), rng)
    return values


def _normalised(name, bare, rng):
    """A sparse leaf, and what it is made of: A = S bare T."""
    row, col = (rng.integers(0, PRIME, size, dtype=np.int64) for size in bare.shape)
    full = row[:, None] * bare % PRIME * col % PRIME
    return {name: full, "bare " + name: bare, "S" + name[1:]: row, "T" + name[1:]: col}


def _mod(left, right):
    return (left @ right) % PRIME


def _by_hand(expression, values):
    """Each term from left to right."""
    total = 0
    for term in expression:
        product = None
        for factor in term.factors:
            value = values[_inner(factor).name]
            value = value.T if isinstance(factor, Transpose) else value
            if getattr(factor, "chebyshev", False):
                product = _chebyshev(value, factor.power)
                continue
            for _ in range(getattr(factor, "power", 1)):
                product = value if product is None else _mod(product, value)
        total = (total + product * (values[term.scale] if term.scale else 1)) % PRIME
    return total


def _chebyshev(matrix, power):
    """C_k = A C_{k-1} - C_{k-2}, C_0 = 2, as a matrix; what stands before it, if anything, is no part of it."""
    before, now = 2 * np.eye(len(matrix), dtype=np.int64), matrix
    for _ in range(power - 1):
        before, now = now, (_mod(matrix, now) - before) % PRIME
    return now


def _gradient_by_differences(expression, values, leaf, upstream):
    """d <G, result> / d leaf, one entry at a time."""
    base = _by_hand(expression, values)
    out = np.zeros_like(values[leaf])
    for place in itertools.product(*map(range, out.shape)):
        moved = values[leaf].copy()
        moved[place] += 1
        change = _by_hand(expression, {**values, leaf: moved}) - base
        out[place] = int((upstream * (change % PRIME) % PRIME).sum() % PRIME)
    return out


def _evaluate(node, values, known):
    """A node of a plan, from its children; `known` holds what was computed before."""
    if node not in known:
        known[node] = _compute(node, values, known)
    return known[node]


def _compute(node, values, known):
    if isinstance(node, Leaf):
        return values[node.name]
    if isinstance(node, Transpose):
        return _evaluate(node.of, values, known).T
    if isinstance(node, Scaled):
        return _evaluate(node.of, values, known) * values[node.by] % PRIME
    if isinstance(node, Add):
        return sum(_evaluate(term, values, known) for term in node.terms) % PRIME
    if isinstance(node, Horner):
        total = 0
        for at, term in enumerate(reversed(node.terms)):
            total = total if at == 0 else _mod(_matrix(node.sparse, values), total)
            total = total if term is None else (total + _evaluate(term, values, known)) % PRIME
        return total
    if isinstance(node, Step):
        now, before = _evaluate(node.now, values, known), _evaluate(node.before, values, known)
        return (_mod(_matrix(node.sparse, values), now) - (2 if node.twice else 1) * before) % PRIME
    if isinstance(node, Clenshaw):
        matrix, now, later = _matrix(node.sparse, values), 0, 0
        for k in reversed(range(len(node.terms))):
            term = 0 if node.terms[k] is None else _evaluate(node.terms[k], values, known)
            hop = 0 if k == len(node.terms) - 1 else _mod(matrix, now)
            now, later = (term + hop - (1 if k else 2) * later) % PRIME, now
        return now
    assert isinstance(node, MatMul)
    left, right = node.left, _evaluate(node.right, values, known)
    if isinstance(left, Diagonal):
        return values[left.name][:, None] * right % PRIME
    return _mod(_matrix(left, values) if isinstance(left, Sparse) else _evaluate(left, values, known), right)


def _matrix(sparse, values):
    assert (sparse.power == 1) == (sparse.form != "formed"), "powers are chains, unless they are formed"
    value = values[("bare " if sparse.form == "bare" else "") + sparse.name]
    for _ in range(sparse.power - 1):
        value = _mod(value, values[sparse.name])
    return value.T if sparse.transposed else value


def _requests(expression):
    """Every set of gradients, with nothing kept and with all that may be kept across steps; normalised by kernels that
    fuse it, and by those that do not."""
    names = leaves(expression)
    wanted = [chosen for k in range(len(names) + 1) for chosen in itertools.combinations(names, k)]
    if len(names) > 3:  # of polynomials: none, one weight, all weights, everything
        wanted = [(), tuple(names[1:2]), tuple(names[1:]), tuple(names)]
    for hoisted in dict.fromkeys([(), candidates(expression)]):
        yield from (Request(expression, chosen, hoisted) for chosen in wanted)
        yield from (Request(expression, chosen, hoisted, SCALED, fuses=False) for chosen in wanted)
    power = chain_of(expression)
    if power is not None:
        yield from (Request(expression, chosen, formed=power.power) for chosen in wanted)
        yield from (Request(expression, chosen, (), SCALED, fuses=False, formed=power.power) for chosen in wanted)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_plan_is_exact(name):
    expression = EXPRESSIONS[name]
    values = _values(expression)
    result = _by_hand(expression, values)
    upstream = np.random.default_rng(1).integers(0, PRIME, result.shape, dtype=np.int64)
    wanted = {leaf: _gradient_by_differences(expression, values, leaf, upstream) for leaf in leaves(expression)}
    for request in _requests(expression):
        found = plans(request)
        assert found
        for plan in found:
            _check(plan, request.wanted, values, upstream, result, wanted)


def _check(plan, names, values, upstream, result, wanted):
    """Forward, then every gradient from leaves, upstream gradient, and what the plan says it keeps: nothing else."""
    known = {}
    for node in plan.hoisted:
        _evaluate(node, {k: v for k, v in values.items() if not k.startswith(("W", "V"))}, known)
    constants = dict(known)
    assert np.array_equal(_evaluate(plan.forward, values, known), result), plan.name
    kept = {node: known[node] for node in plan.kept} | {node: constants[node] for node in plan.hoisted}
    assert [leaf for leaf, _ in plan.gradients] == list(names)
    for leaf, node in plan.gradients:
        got = _evaluate(node, {**values, "G": upstream}, dict(kept))
        assert np.array_equal(got, wanted[leaf]), f"d{leaf} of {plan.name}"


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_form_is_exact_also_where_plans_are_pruned(name):
    """plans() drops what no input can make best; forms() is all that is enumerated, forward and of each gradient."""
    expression = EXPRESSIONS[name]
    values = _values(expression, seed=2)
    result = _by_hand(expression, values)
    for node in forms(expression):
        assert np.array_equal(_evaluate(node, values, {}), result), str(node)
    values["G"] = np.random.default_rng(3).integers(0, PRIME, result.shape, dtype=np.int64)
    for leaf in leaves(expression):
        wanted = _gradient_by_differences(expression, values, leaf, values["G"])
        for node in forms(gradient(expression, leaf)):
            assert np.array_equal(_evaluate(node, values, {}), wanted), f"d{leaf} = {node}"


def test_joint_plans_are_exact():
    """Every pair of plans of two products into one result, with one X in common and with two, and a root beside."""
    rng = np.random.default_rng(4)
    sizes = {**SIZES, "m": SIZES["n"]}
    every = {}
    for name in ("A0", "A1"):
        every |= _normalised(name, rng.integers(0, PRIME, (sizes["n"], sizes["n"]), dtype=np.int64), rng)
    every |= {name: rng.integers(0, PRIME, (sizes["n"], sizes["i"]), dtype=np.int64) for name in ("X0", "X1")}
    every |= {name: rng.integers(0, PRIME, (sizes["o"], sizes["i"]), dtype=np.int64) for name in ("W0", "W1", "W2")}
    upstream = rng.integers(0, PRIME, (sizes["n"], sizes["o"]), dtype=np.int64)
    single = [p for h in ((), candidates(PRODUCT)) for p in plans(Request(PRODUCT, ("X", "W"), h))]
    single += plans(Request(PRODUCT, ("X", "W"), (), SCALED, fuses=False))[::5]
    root = plans(Request(ROOT, ("X", "W")))
    for one, two, last, places in itertools.product(single, single, root, (("0", "0", "0"), ("0", "1", "1"))):
        plan = _combined(tuple(zip((one, two, last), places, strict=True)))
        factors = [(f"A{k}" if k < 2 else None, f"X{place}", f"W{k}") for k, place in enumerate(places)]
        terms = [
            Term((*([Sparse(a, "n", "m")] if a else []), Leaf(x, "m" if a else "n", "i"), Transpose(Leaf(w, "o", "i"))))
            for a, x, w in factors
        ]
        result = _by_hand(terms, every)
        names = [leaf for leaf, _ in plan.gradients]
        wanted = {leaf: _gradient_by_differences(terms, every, leaf, upstream) for leaf in names}
        _check(plan, names, every, upstream, result, wanted)


def test_a_wrong_plan_is_noticed():
    expression = gcn.EXPRESSION
    values = _values(expression)
    result = _by_hand(expression, values)
    upstream = np.ones_like(result)
    wanted = {leaf: _gradient_by_differences(expression, values, leaf, upstream) for leaf in ("X", "W")}
    right = plans(Request(expression, ("X", "W")))[0]
    with pytest.raises(AssertionError, match="dW"):
        _check(right, ("X", "W"), values, upstream, result, {**wanted, "W": 1 + wanted["W"]})
    with pytest.raises(AssertionError):
        _check(Plan(Scaled("c", right.forward), right.gradients), ("X", "W"), values, upstream, result, wanted)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_what_runs_is_exact_too(name):
    """The executor, on small integers in fp64, where every sum is exact; with scalings of rows and columns."""
    expression = EXPRESSIONS[name]
    small = {
        key: value % 3 - 1 if key not in NUMBERS else NUMBERS[key] for key, value in _values(expression, seed=5).items()
    }
    rng = np.random.default_rng(6)
    rows, cols = small["A"].shape if "A" in small else (SIZES["n"], SIZES["n"])
    small = {key: value for key, value in small.items() if key not in ("bare A", "S", "T")}
    scales = rng.integers(1, 4, rows), rng.integers(1, 4, cols)
    adj = _adjacency(small["A"], *scales) if "A" in small else None
    exact = {**small, "A": scales[0][:, None] * small["A"] * scales[1]} if adj is not None else small
    result = _by_hand(expression, exact)
    upstream = rng.integers(-2, 3, result.shape)
    names = tuple(leaves(expression))
    wanted = [_gradient_by_differences(expression, exact, leaf, upstream) for leaf in names]
    arguments = tuple(torch.tensor(small[leaf], dtype=torch.float64).requires_grad_() for leaf in names)
    sparse = {} if adj is None else {"A": adj}
    for hoisted, scaled in itertools.product(dict.fromkeys([(), candidates(expression)]), ((), SCALED)):
        for plan in plans(Request(expression, names, hoisted, scaled, fuses=not scaled)):
            kept = {}

            def keep(node, make, kept=kept):
                return kept[node] if node in kept else kept.setdefault(node, make())

            for _ in range(2):  # the second time from what was kept
                out = run(Call(plan, names, sparse, NUMBERS, keep), arguments)
                assert np.array_equal(_residues(out), result), plan.name
                grads = torch.autograd.grad(out, arguments, torch.tensor(upstream, dtype=torch.float64))
                for leaf, got, want in zip(names, grads, wanted, strict=True):
                    assert np.array_equal(_residues(got), want), f"d{leaf} of {plan.name}"


def _adjacency(matrix, row_scale, col_scale):
    """Entries are -1, 0 and 1: edges with weights."""
    target, source = np.nonzero(matrix)
    index = torch.tensor(np.stack([source, target]))
    weight = torch.tensor(matrix[target, source], dtype=torch.float64)
    graph = Graph.of(index, (matrix.shape[1], matrix.shape[0]))
    scales = [torch.tensor(scale, dtype=torch.float64) for scale in (row_scale, col_scale)]
    return Adjacency(graph, *scales, weight)


def _residues(tensor):
    """A tensor of whole numbers, each modulo the prime."""
    whole = tensor.detach().numpy().astype(np.int64)
    assert np.array_equal(whole, tensor.detach().numpy())
    return whole % PRIME
