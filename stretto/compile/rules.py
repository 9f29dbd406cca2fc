"""The laws, and all orders of evaluation that follow from them.

LAWS, at the end, are the identities and what the enumerator does by them; each is a line, tested in modular integer
arithmetic, where there is no rounding to hide behind (tests/compile/test_laws.py), as is every plan (test_exact.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.compile import normalise
from stretto.compile.expr import (
    Add,
    Clenshaw,
    Diagonal,
    Expression,
    Factor,
    Horner,
    MatMul,
    Node,
    Scaled,
    Sparse,
    Step,
    Term,
    Transpose,
    shape,
    transpose,
)


@dataclass(frozen=True)
class Law:
    """Both sides, as they read, and what the planner does by it: from nodes that have the left side's form it makes
    those of the right side, else None; an enumeration makes both."""

    left: str
    right: str
    apply: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.left} = {self.right}"


MOST_COMBINATIONS = 64  # beyond this, the terms of a sum all take the same orientation: mixed ones share less
Alike = tuple[Hashable, ...]


@functools.cache
def orders(factors: tuple[Factor, ...]) -> tuple[Node, ...]:
    """Every way to bracket a product of factors, without a product of two that are sparse or diagonal."""
    if len(factors) == 1:
        only = factors[0]
        return () if isinstance(only, (Sparse, Diagonal)) else (only,)
    result: dict[Node, None] = {}
    for cut in range(1, len(factors)):
        for left in _sides(factors[:cut]):
            for right in _sides(factors[cut:]):
                product = multiply(left, right)
                if product is not None:
                    result[product] = None
    return tuple(result)


def _sides(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    return factors if len(factors) == 1 else orders(factors)


def multiply(left: Factor, right: Factor) -> Node | None:
    """The product in the form that runs: sparse and diagonal matrices from the left, powers as chains; None if both are
    such matrices: their product is a matter of how edges are normalised (normalise.py)."""
    if isinstance(left, (Sparse, Diagonal)) and isinstance(right, (Sparse, Diagonal)):
        return None
    for law in PRODUCTS:
        product: Node | None = law.apply(left, right)
        if product is not None:
            return product
    assert not isinstance(right, (Sparse, Diagonal))
    return MatMul(left, right)


def _from_the_left(left: Factor, right: Factor) -> Node | None:
    if not isinstance(right, (Sparse, Diagonal)):
        return None
    product = multiply(transpose(right), transpose(left))
    assert product is not None
    return Transpose(product)


def _one_transpose(left: Factor, right: Factor) -> Node | None:
    """One node for both transposes."""
    if isinstance(left, Transpose) and isinstance(right, Transpose):
        return Transpose(MatMul(right.of, left.of))
    return None


def _as_chain(left: Factor, right: Node) -> Node | None:
    return _chain(left, right) if isinstance(left, Sparse) else None


@functools.cache
def _chain(sparse: Sparse, right: Node) -> Node:
    """A^k right, one hop after what A^(k-1) makes, which every longer power has in common; or C_k(A) right."""
    single = _of_power(sparse, 1, False)
    if sparse.power == 1:
        return MatMul(single, right)
    before = _chain(_of_power(sparse, sparse.power - 1, sparse.chebyshev), right)
    if not sparse.chebyshev:
        return MatMul(single, before)
    if sparse.power == 2:
        return Step(single, before, right, True)
    return Step(single, before, _chain(_of_power(sparse, sparse.power - 2, True), right))


@functools.cache
def _of_power(sparse: Sparse, power: int, chebyshev: bool) -> Sparse:
    return replace(sparse, power=power, chebyshev=chebyshev)


@functools.cache
def forms(expression: Expression) -> tuple[Node, ...]:
    """Every order of evaluation of a sum of products that is not dominated whatever the input."""
    choices = [_of_term(term) for term in expression]
    combined = combinations(choices, [alike((term,)) for term in expression])
    if len(combined) > MOST_COMBINATIONS:  # all first, all last
        combined = [tuple(c[0] for c in choices), tuple(c[-1] for c in choices)]
    result = dict.fromkeys(map(_sum, combined))
    for law in FACTORS:
        result.update(dict.fromkeys(law.apply(expression)))
    return tuple(result)


def _sum(terms: tuple[Node, ...]) -> Node:
    """A sum by the first scheme for it: written plainly, it takes more aggregations."""
    for law in SUMS:
        scheme: Node | None = law.apply(terms)
        if scheme is not None:
            return scheme
    return terms[0] if len(terms) == 1 else Add(terms)


def alike(expression: Expression) -> Alike:
    """What expressions that differ in powers of A and in their weights alone have in common: A X W1', A^2 X W2'."""
    return tuple((_unpowered(term.factors[:-1]), _sizes(term.factors[-1])) for term in expression)


def _unpowered(factors: Sequence[Factor]) -> Alike:
    return tuple(_of_power(f, 1, f.chebyshev) if isinstance(f, Sparse) else f for f in factors)


def _sizes(factor: Factor) -> Hashable:
    return type(factor), shape(factor)


def combinations(choices: Sequence[tuple[Node, ...]], kinds: Sequence[Hashable]) -> list[tuple[Node, ...]]:
    """One choice for each place, all that can be best: places of one kind (`alike`) take the same orientation.

    The longest of them takes its A, A^2, ... A^k on one side of the weight or on the other; there the hops of the
    others are among its own, or are steps of the same Horner scheme, and cost nothing. Elsewhere they cost more.
    """
    first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
    places = [first[kind] for kind in kinds]
    leads = list(dict.fromkeys(places))
    if any(len(choice) != len(choices[lead]) for choice, lead in zip(choices, places, strict=True)):
        return list(itertools.product(*choices))
    at = [leads.index(lead) for lead in places]
    each = itertools.product(*(range(len(choices[lead])) for lead in leads))
    return [tuple(choice[picked[k]] for choice, k in zip(choices, at, strict=True)) for picked in each]


def _factored(expression: Expression, end: int) -> Iterator[Node]:
    """Where every term of a sum has the same dense factor at that end: the sum of the rest times it."""
    if len(expression) < 2 or any(len(term.factors) < 2 for term in expression):
        return
    factor = expression[0].factors[end]
    if isinstance(factor, (Sparse, Diagonal)) or any(term.factors[end] != factor for term in expression):
        return
    rest = tuple(Term(t.factors[1:] if end == 0 else t.factors[:-1], t.scale) for t in expression)
    for inner in forms(rest):
        product = multiply(factor, inner) if end == 0 else multiply(inner, factor)
        if product is not None:
            yield product


def _of_term(term: Term) -> tuple[Node, ...]:
    inner = orders(term.factors)
    return tuple(Scaled(term.scale, n) for n in inner) if term.scale else inner


def _transposed_sum(terms: tuple[Node, ...]) -> Node | None:
    """The transpose of another scheme."""
    turned = [inner for inner in map(_untransposed, terms) if inner is not None]
    scheme = _sum(tuple(turned)) if len(turned) == len(terms) else None
    return Transpose(scheme) if isinstance(scheme, (Horner, Clenshaw, Transpose)) else None


def _horner(terms: tuple[Node, ...]) -> Node | None:
    """A sum of A^k Z_k, one chain of hops for all of them."""
    return None if any(map(_is_step, terms)) else _scheme(Horner, [_strip(term) for term in terms])


def _clenshaw(terms: tuple[Node, ...]) -> Node | None:
    """The same for a recurrence, C_k(A) Z_k."""
    stripped = [_strip(term) for term in terms]
    among = any(hops > 1 and not _is_step(term) for term, (hops, _, _) in zip(terms, stripped, strict=True))
    return None if among or not any(map(_is_step, terms)) else _scheme(Clenshaw, stripped)  # among: a power is


def _scheme(kind: type[Horner | Clenshaw], stripped: Sequence[tuple[int, Node, Sparse | None]]) -> Node | None:
    """The scheme for terms of so many hops each, if they are all of one matrix."""
    matrices = {matrix for _, _, matrix in stripped if matrix is not None}
    if len(matrices) != 1 or len(stripped) < 2:
        return None
    by_hops: dict[int, list[Node]] = {}
    for hops, inner, _ in stripped:
        by_hops.setdefault(hops, []).append(inner)
    steps = [by_hops.get(k, []) for k in range(max(by_hops) + 1)]
    return kind(matrices.pop(), tuple(None if not s else s[0] if len(s) == 1 else Add(tuple(s)) for s in steps))


def _untransposed(term: Node) -> Node | None:
    """The transpose of a term that is one itself, but for its scale; else None."""
    inner = term.of if isinstance(term, Scaled) else term
    if not isinstance(inner, Transpose):
        return None
    return Scaled(term.by, inner.of) if isinstance(term, Scaled) else inner.of


def _is_step(term: Node) -> bool:
    return isinstance(term.of if isinstance(term, Scaled) else term, Step)


def _strip(term: Node) -> tuple[int, Node, Sparse | None]:
    """How many hops stand before the rest of a term: A (A Z) -> 2, Z; C_2(A) Z -> 2, Z."""
    scale = term.by if isinstance(term, Scaled) else None
    inner = term.of if isinstance(term, Scaled) else term
    hops, sparse = 0, None
    if isinstance(inner, Step):
        while isinstance(inner, Step):
            sparse, inner, hops = inner.sparse, inner.now, hops + 1
        assert isinstance(inner, MatMul)
        return hops + 1, Scaled(scale, inner.right) if scale else inner.right, sparse
    while isinstance(inner, MatMul) and isinstance(inner.left, Sparse):
        sparse, inner, hops = inner.left, inner.right, hops + 1
    return hops, Scaled(scale, inner) if scale else inner, sparse


# A: sparse, S T: diagonal, X Y Z: dense, W V: weights, c: a number; ' transposes.
LAWS = {
    "associativity": Law("(A X) W", "A (X W)", orders),  # aggregate-first = update-first
    "right product": Law("Y' A", "(A' Y)'", _from_the_left),  # a sparse matrix is applied from the left only
    "transpose of scaled rows": Law("Y' S", "(S Y)'", _from_the_left),
    "powers are chains": Law("A^2 X", "A (A X)", _as_chain),  # A^2 is formed only where it has fewer edges (powers.py)
    "transpose of a product": Law("(X W)'", "W' X'", _one_transpose),
    "scaling commutes": Law("(c X) W", "c (X W)", _of_term),
    "transpose of a sum": Law("X' + Z'", "(X + Z)'", _transposed_sum),
    "horner": Law("X + A Y + A (A Z)", "X + A (Y + A Z)", _horner),
    "clenshaw": Law("X + A Y + (A (A Z) + c Z)", "X + (A (Y + A Z) + c Z)", _clenshaw),  # c = -2
    "common right factor": Law("A X W + c (Z W)", "(A X + c Z) W", functools.partial(_factored, end=-1)),
    "common left factor": Law("Y' A X + c (Y' Z)", "Y' (A X + c Z)", functools.partial(_factored, end=0)),
    "scaled rows": Law("(S A T) X", "S (A (T X))", normalise.lowered),  # normalised edges: rows scaled before and after
    "scaling rows commutes": Law("(S X) W", "S (X W)", normalise.moved),  # at the narrower side of a weight
}
PRODUCTS = [LAWS[name] for name in ("right product", "powers are chains", "transpose of a product")]
SUMS = [LAWS[name] for name in ("transpose of a sum", "horner", "clenshaw")]
FACTORS = [LAWS[name] for name in ("common left factor", "common right factor")]
