"""How a sparse leaf is normalised. A stands for S A T, with S and T diagonal (1 / sqrt of degrees, 1 / degree):

fused        the kernel scales what it gathers and what it writes: nothing else is read or written;
precomputed  edges hold r_i a_ij c_j, made once per graph: norm(A) X reads a value per edge, as a weighted sum does;
dynamic      rows are scaled before and after, S (A (T X)): no value per edge, two passes over rows. A scaling may also
             stand on the other side of a weight, S ((A (T X)) W') = (S (A (T X))) W', whichever side is narrower.

An order of evaluation is found without regard to this (rules.py), then each of its products takes one of these forms.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from stretto.compile.expr import (
    Add,
    Clenshaw,
    Diagonal,
    Factor,
    Horner,
    Leaf,
    MatMul,
    Node,
    Scaled,
    Sparse,
    Step,
    Transpose,
)

FUSED, PRECOMPUTED, DYNAMIC = "fused", "precomputed", "dynamic"
MEANING = {
    FUSED: "fused: the kernel scales what it reads and writes",
    PRECOMPUTED: "precomputed: norm(A), whose edges hold it",
    DYNAMIC: "dynamic: S and T scale rows after and before",
}
Scales = tuple[tuple[str, bool, bool], ...]  # name of a sparse leaf, whether it has row scales, and column scales


def lowered(roots: tuple[Node, ...], how: str, scales: Scales, hoisted: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    """The roots of a plan with every normalised matrix applied in one of the three ways, for each place of scalings.

    What is hoisted stays as it is: it is computed once.
    """
    if how == FUSED:
        yield roots
        return
    one = tuple(_rewritten(root, how, scales, hoisted) for root in roots)
    if how == PRECOMPUTED:
        yield one
        return
    forward, gradients = one[:1], one[1:]
    found: dict[tuple[Node, ...], None] = {}
    for first, rest in itertools.product((False, True), repeat=2):
        moved = tuple(map(_moved, forward)) if first else forward
        found[moved + (tuple(map(_moved, gradients)) if rest else gradients)] = None
    yield from found


@functools.lru_cache(maxsize=1 << 14)
def _rewritten(node: Node, how: str, scales: Scales, hoisted: tuple[Node, ...]) -> Node:
    if node in hoisted or isinstance(node, Leaf):
        return node
    sides = {name: (row, col) for name, row, col in scales}

    def again(inner: Node) -> Node:
        return _rewritten(inner, how, scales, hoisted)

    if isinstance(node, Transpose):
        return _turned(again(node.of))
    if isinstance(node, Scaled):
        return Scaled(node.by, again(node.of))
    if isinstance(node, Add):
        return _plus(tuple(map(again, node.terms)))
    if isinstance(node, Horner):
        terms = tuple(None if term is None else again(term) for term in node.terms)
        if how == DYNAMIC and node.sparse.name in sides:
            return _steps(node.sparse, terms, sides[node.sparse.name])
        return Horner(_with_edges(node.sparse, sides), terms)
    if isinstance(node, Step):  # it subtracts where it sums: its edges hold the normalisation, either way
        return Step(_with_edges(node.sparse, sides), again(node.now), again(node.before), node.twice)
    if isinstance(node, Clenshaw):
        terms = tuple(None if term is None else again(term) for term in node.terms)
        return Clenshaw(_with_edges(node.sparse, sides), terms)
    right = again(node.right)
    if isinstance(node.left, Sparse):
        if how == DYNAMIC and node.left.name in sides:
            return _around(node.left, right, sides[node.left.name])
        return _times(_with_edges(node.left, sides), right)
    return _times(node.left if isinstance(node.left, Diagonal) else again(node.left), right)


# One object for equal nodes, as in rules.py: dynamic scalings write Horner's scheme out hop by hop.
@functools.cache
def _times(left: Factor, right: Node) -> MatMul:
    return MatMul(left, right)


@functools.cache
def _plus(terms: tuple[Node, ...]) -> Add:
    return Add(terms)


@functools.cache
def _turned(node: Node) -> Transpose:
    return Transpose(node)


def _with_edges(sparse: Sparse, sides: dict[str, tuple[bool, bool]]) -> Sparse:
    return replace(sparse, form="edges") if sparse.name in sides else sparse


def _around(sparse: Sparse, right: Node, sides: tuple[bool, bool]) -> Node:
    """S (A (T right)), or of the transpose T (A' (S right)), with the scalings there are."""
    names = ("S" + sparse.name[1:] if sides[0] else "", "T" + sparse.name[1:] if sides[1] else "")
    after, before = reversed(names) if sparse.transposed else names
    inner = _times(Diagonal(before, sparse.cols), right) if before else right
    product = _times(replace(sparse, form="bare"), inner)
    return _times(Diagonal(after, sparse.rows), product) if after else product


def _steps(sparse: Sparse, terms: tuple[Node | None, ...], sides: tuple[bool, bool]) -> Node:
    """Horner's scheme, step by step."""
    total = terms[-1]
    assert total is not None
    for term in reversed(terms[:-1]):
        total = _around(sparse, total, sides)
        total = total if term is None else _plus((term, total))
    return total


def _moved(node: Node) -> Node:
    """A node with its outermost scalings on the other side of the weight beside them; itself where there is none."""
    if not isinstance(node, MatMul):
        return node
    left, right = node.left, node.right
    if isinstance(left, MatMul) and isinstance(left.left, Diagonal):  # (S Y) W' -> S (Y W')
        return _times(left.left, _times(left.right, right))
    if isinstance(left, Transpose) and isinstance(right, MatMul) and isinstance(right.left, Diagonal):
        return _times(_turned(_times(right.left, left.of)), right.right)  # G' (S Y) -> (S G)' Y
    if isinstance(left, Diagonal):
        return _times(left, _moved(right))
    inner = right.right if isinstance(right, MatMul) and isinstance(right.left, Diagonal) else None
    if isinstance(left, Sparse) and isinstance(inner, MatMul) and not isinstance(inner.left, (Sparse, Diagonal)):
        assert isinstance(right, MatMul)  # A (T (X W')) -> A ((T X) W')
        return _times(left, _times(_times(right.left, inner.left), inner.right))
    return node
