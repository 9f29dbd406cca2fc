"""The laws, and all orders of evaluation that follow from them.

LAWS are the identities the enumerator uses; each is a line, tested in modular integer arithmetic, where there is no
rounding to hide behind (tests/compile/test_laws.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

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

# name -> (left side, right side). A: sparse, S T: diagonal, X Y Z: dense, W V: weights, c: a number; ' transposes.
LAWS = {
    "associativity": ("(A X) W", "A (X W)"),  # aggregate-first = update-first
    "powers are chains": ("A^2 X", "A (A X)"),  # A^2 is formed only where it has fewer edges (powers.py)
    "right product": ("Y' A", "(A' Y)'"),  # a sparse matrix is applied from the left only
    "transpose of a product": ("(X W)'", "W' X'"),
    "distributivity": ("A X + A Z", "A (X + Z)"),  # the step of Horner's scheme
    "horner": ("X + A Y + A (A Z)", "X + A (Y + A Z)"),
    "clenshaw": ("X + A Y + (A (A Z) + c Z)", "X + (A (Y + A Z) + c Z)"),  # the same step of a recurrence, c = -2
    "transpose of a sum": ("X' + Z'", "(X + Z)'"),
    "scaling commutes": ("(c X) W", "c (X W)"),
    "common right factor": ("A X W + c (Z W)", "(A X + c Z) W"),  # one product instead of two
    "common left factor": ("Y' A X + c (Y' Z)", "Y' (A X + c Z)"),
    "scaled rows": ("(S A T) X", "S (A (T X))"),  # normalised edges = rows scaled before and after (normalise.py)
    "scaling rows commutes": ("(S X) W", "S (X W)"),  # at the narrower side of a weight
    "transpose of scaled rows": ("Y' S", "(S Y)'"),
}

MOST_COMBINATIONS = 64  # beyond this, the terms of a sum all take the same orientation: mixed ones share less
Alike = tuple[Hashable, ...]


@functools.cache
def orders(factors: tuple[Factor, ...]) -> tuple[Node, ...]:
    """Every way to bracket a product of factors, without a product of two that are sparse or diagonal."""
    if len(factors) == 1:
        only = factors[0]
        return () if isinstance(only, (Sparse, Diagonal)) else (only,)
    found: dict[Node, None] = {}
    for cut in range(1, len(factors)):
        for left in _sides(factors[:cut]):
            for right in _sides(factors[cut:]):
                product = multiply(left, right)
                if product is not None:
                    found[product] = None
    return tuple(found)


def _sides(factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    return factors if len(factors) == 1 else orders(factors)


def multiply(left: Factor, right: Factor) -> Node | None:
    """The product in the form that runs: sparse and diagonal matrices from the left, powers as chains; None if both are
    such matrices: their product is a matter of how edges are normalised (normalise.py)."""
    if isinstance(left, (Sparse, Diagonal)) and isinstance(right, (Sparse, Diagonal)):
        return None
    if isinstance(right, (Sparse, Diagonal)):  # right product, transpose of scaled rows
        product = multiply(transpose(right), transpose(left))
        assert product is not None
        return Transpose(product)
    if isinstance(left, Diagonal):
        return MatMul(left, right)
    if isinstance(left, Sparse):  # powers are chains
        return _chain(left, right)
    if isinstance(left, Transpose) and isinstance(right, Transpose):  # transpose of a product: one node for both
        return Transpose(MatMul(right.of, left.of))
    return MatMul(left, right)


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
    found: dict[Node, None] = {}
    for terms in combined:
        by_horner = _scheme(terms)
        if by_horner is not None:
            found[by_horner] = None  # the plain sum of the same terms takes more aggregations: dominated
        else:
            found[terms[0] if len(terms) == 1 else Add(terms)] = None
    found.update(dict.fromkeys(_factored(expression)))
    return tuple(found)


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


def _factored(expression: Expression) -> Iterator[Node]:
    """Where every term of a sum has the same dense factor at one end: the sum of the rest times it."""
    if len(expression) < 2 or any(len(term.factors) < 2 for term in expression):
        return
    for end in (0, -1):
        factor = expression[0].factors[end]
        if isinstance(factor, (Sparse, Diagonal)) or any(term.factors[end] != factor for term in expression):
            continue
        rest = tuple(Term(t.factors[1:] if end == 0 else t.factors[:-1], t.scale) for t in expression)
        for inner in forms(rest):
            product = multiply(factor, inner) if end == 0 else multiply(inner, factor)
            if product is not None:
                yield product


def _of_term(term: Term) -> tuple[Node, ...]:
    inner = orders(term.factors)
    return tuple(Scaled(term.scale, n) for n in inner) if term.scale else inner


def _scheme(terms: tuple[Node, ...]) -> Node | None:
    """A sum of A^k Z_k as Horner's scheme, of C_k(A) Z_k as Clenshaw's: one chain of hops for all of them."""
    turned = [_untransposed(term) for term in terms]
    if None not in turned:  # transpose of a sum
        inner = _scheme(tuple(turned))  # type: ignore[arg-type]
        return None if inner is None else Transpose(inner)
    by_hops: dict[int, list[Node]] = {}
    matrices: set[Sparse] = set()
    steps_of = [_is_step(term) for term in terms]
    for term, is_step in zip(terms, steps_of, strict=True):
        hops, inner, used = _strip(term)
        if any(steps_of) and hops > 1 and not is_step:
            return None  # a power among the others
        matrices |= {used} if used is not None else set()
        by_hops.setdefault(hops, []).append(inner)
    if len(matrices) != 1 or len(terms) < 2:
        return None
    steps = [by_hops.get(k, []) for k in range(max(by_hops) + 1)]
    summed = tuple(None if not s else s[0] if len(s) == 1 else Add(tuple(s)) for s in steps)
    return (Clenshaw if any(steps_of) else Horner)(matrices.pop(), summed)


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
