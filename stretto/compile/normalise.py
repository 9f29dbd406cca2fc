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
    one = tuple(map(_rewriter(how, scales, hoisted), roots))
    if how == PRECOMPUTED:
        yield one
        return
    forward, gradients = one[:1], one[1:]
    found: dict[tuple[Node, ...], None] = {}
    for first, rest in itertools.product((False, True), repeat=2):
        one = tuple(map(moved, forward)) if first else forward
        found[one + (tuple(map(moved, gradients)) if rest else gradients)] = None
    yield from found


class _Rewriter:
    """Writes every normalised matrix of a node in one way."""

    def __init__(self, how: str, scales: Scales, hoisted: tuple[Node, ...]) -> None:
        self.dynamic = how == DYNAMIC
        self.sides = {name: (row, col) for name, row, col in scales}
        self.known: dict[Node, Node] = {node: node for node in hoisted}

    def __call__(self, node: Node) -> Node:
        found = self.known.get(node)
        if found is None:
            found = self.known[node] = self._made(node)
        return found

    def _made(self, node: Node) -> Node:
        if isinstance(node, Leaf):
            return node
        if isinstance(node, Transpose):
            return Transpose(self(node.of))
        if isinstance(node, Scaled):
            return Scaled(node.by, self(node.of))
        if isinstance(node, Add):
            return Add(tuple(map(self, node.terms)))
        if isinstance(node, (Horner, Clenshaw)):
            terms = tuple(None if term is None else self(term) for term in node.terms)
            if isinstance(node, Horner) and self.dynamic and node.sparse.name in self.sides:
                return self._steps(node.sparse, terms)
            return type(node)(self._with_edges(node.sparse), terms)
        if isinstance(node, Step):  # it subtracts where it sums: its edges hold the normalisation, either way
            return Step(self._with_edges(node.sparse), self(node.now), self(node.before), node.twice)
        right = self(node.right)
        if isinstance(node.left, Sparse):
            if self.dynamic and node.left.name in self.sides:
                return self._around(node.left, right)
            return MatMul(self._with_edges(node.left), right)
        return MatMul(node.left if isinstance(node.left, Diagonal) else self(node.left), right)

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
