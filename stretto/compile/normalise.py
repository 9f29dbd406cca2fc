"""How a sparse leaf is normalised.

A stands for S A T, with S and T diagonal (1 / sqrt of degrees, 1 / degree):

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
    Diagonal,
    Factor,
    Horner,
    MatMul,
    Node,
    Sparse,
    Transpose,
    mapped,
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
    one = tuple(map(_rewriter(how, scales, hoisted), roots))
    if how == PRECOMPUTED:
        yield one
        return
    forward, gradients = one[:1], one[1:]
    result: dict[tuple[Node, ...], None] = {}
    for first, rest in itertools.product((False, True), repeat=2):
        one = tuple(map(moved, forward)) if first else forward
        result[one + (tuple(map(moved, gradients)) if rest else gradients)] = None
    yield from result


class _Rewriter:
    """Writes every normalised matrix of a node in one way."""

    def __init__(self, how: str, scales: Scales, hoisted: tuple[Node, ...]) -> None:
        self.dynamic = how == DYNAMIC
        self.sides = {name: (row, col) for name, row, col in scales}
        self.known: dict[Node, Node] = {node: node for node in hoisted}

    def __call__(self, node: Node) -> Node:
        result = self.known.get(node)
        if result is None:
            result = self.known[node] = self._made(node)
        return result

    def _made(self, node: Node) -> Node:
        if self.dynamic and isinstance(node, Horner) and node.sparse.name in self.sides:
            return self._steps(node.sparse, tuple(None if term is None else self(term) for term in node.terms))
        sparse = node.left if isinstance(node, MatMul) else None
        if self.dynamic and isinstance(node, MatMul) and isinstance(sparse, Sparse) and sparse.name in self.sides:
            return self._around(sparse, self(node.right))
        # A Step subtracts where it sums: its edges hold the normalisation, either way.
        made: Node = mapped(node, self._part)
        return made

    def _part(self, part: Factor) -> Factor:
        if isinstance(part, Sparse):
            return self._with_edges(part)
        return part if isinstance(part, Diagonal) else self(part)

    def _with_edges(self, sparse: Sparse) -> Sparse:
        return _in_form(sparse, "edges") if sparse.name in self.sides else sparse

    def _around(self, sparse: Sparse, right: Node) -> Node:
        """S (A (T right)), or of the transpose T (A' (S right)), with the scalings there are."""
        row, col = self.sides[sparse.name]
        names = ("S" + sparse.name[1:] if row else "", "T" + sparse.name[1:] if col else "")
        after, before = reversed(names) if sparse.transposed else names
        inner = MatMul(Diagonal(before, sparse.cols), right) if before else right
        product = MatMul(_in_form(sparse, "bare"), inner)
        return MatMul(Diagonal(after, sparse.rows), product) if after else product

    def _steps(self, sparse: Sparse, terms: tuple[Node | None, ...]) -> Node:
        """Horner's scheme, step by step."""
        total = terms[-1]
        assert total is not None
        for term in reversed(terms[:-1]):
            total = self._around(sparse, total)
            total = total if term is None else Add((term, total))
        return total


@functools.lru_cache(maxsize=256)
def _rewriter(how: str, scales: Scales, hoisted: tuple[Node, ...]) -> _Rewriter:
    """One for all plans of a request, which have most of their nodes in common."""
    return _Rewriter(how, scales, hoisted)


@functools.cache
def _in_form(sparse: Sparse, form: str) -> Sparse:
    return replace(sparse, form=form)


def moved(node: Node) -> Node:
    """A node with its outermost scalings on the other side of the weight beside them; itself where there is none."""
    if not isinstance(node, MatMul):
        return node
    left, right = node.left, node.right
    if isinstance(left, MatMul) and isinstance(left.left, Diagonal):  # (S Y) W' -> S (Y W')
        return MatMul(left.left, MatMul(left.right, right))
    if isinstance(left, Transpose) and isinstance(right, MatMul) and isinstance(right.left, Diagonal):
        return MatMul(Transpose(MatMul(right.left, left.of)), right.right)  # G' (S Y) -> (S G)' Y
    if isinstance(left, Diagonal):
        return MatMul(left, moved(right))
    inner = right.right if isinstance(right, MatMul) and isinstance(right.left, Diagonal) else None
    if isinstance(left, Sparse) and isinstance(inner, MatMul) and not isinstance(inner.left, (Sparse, Diagonal)):
        assert isinstance(right, MatMul)  # A (T (X W')) -> A ((T X) W')
        return MatMul(left, MatMul(MatMul(right.left, inner.left), inner.right))
    return node
