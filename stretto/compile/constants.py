"""Which values of a layer stay the same from step to step: products of the adjacency with a constant X, and sums of
them where every term has the same weight, as in (A X + c X) W'. They are kept (hoist.py), not computed again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from stretto import kernels, settings
from stretto.compile.adjacency import Adjacency
from stretto.compile.cost import closure
from stretto.compile.expr import (
    Clenshaw,
    Expression,
    Horner,
    Leaf,
    MatMul,
    Node,
    Scaled,
    Sizes,
    Sparse,
    Step,
    Term,
    Transpose,
    shape,
)
from stretto.compile.hoist import HOIST, Beside
from stretto.compile.rules import forms, multiply
from stretto.graph.derived import lasting


def constant_nodes(
    expression: Expression,
    tensors: dict[str, Tensor],
    sparse: dict[str, Adjacency],
    scalars: dict[str, float],
    sizes: Sizes,
) -> tuple[Node, ...]:
    """Nodes made of constant leaves alone that are, or may be, kept across steps."""
    result = []
    constant: dict[Hashable, bool] = {}
    need = 0
    for node in candidates(expression):
        leaf = _leaf(node).name
        x = tensors[leaf]
        matrices = [sparse[s.name] for s in _matrices(node)]
        if any(adj.weight is not None for adj in matrices):
            continue
        beside, together = _beside(*matrices), (leaf, _numbers_of(matrices))
        if together not in constant:
            constant[together] = HOIST.asked_again(x, ("met", together[1]), beside)
        if constant[together]:
            result.append(node)
            if not HOIST.knows(x, _key(node, matrices, scalars), beside):
                rows, cols = shape(node)
                need += sizes[rows] * sizes[cols] * x.element_size()
    return tuple(result) if result and (need == 0 or HOIST.affords(need)) else ()


def keeper(
    tensors: dict[str, Tensor], sparse: dict[str, Adjacency], scalars: dict[str, float]
) -> Callable[[Node, Callable[[], Tensor]], Tensor]:
    """What keeps a plan's constant nodes across steps."""

    def keep(node: Node, make: Callable[[], Tensor]) -> Tensor:
        matrices = [sparse[s.name] for s in _matrices(node)]
        return HOIST.keep(tensors[_leaf(node).name], _key(node, matrices, scalars), make, _beside(*matrices))

    return keep


def constant(x: Tensor, adj: Adjacency, what: Hashable, columns: int, make: Callable[[], Tensor]) -> Tensor | None:
    """make() [n, columns], a function of x and adj alone, kept across steps under the name `what`; not to be edited.

    None while x and adj were not met before as they are now, where either is trained, and where the budget is spent.
    """
    if settings.get("STRETTO_PLAN") == "stock" or kernels.autocasts(x):
        return None
    key, beside = (what, _numbers_of([adj])), _beside(adj)
    if not HOIST.asked_again(x, key, beside):
        return None
    if not HOIST.knows(x, key, beside) and not HOIST.affords(adj.graph.num_rows * columns * x.element_size()):
        return None

    def made() -> Tensor:
        with lasting(), torch.no_grad():
            return make()

    return HOIST.keep(x, key, made, beside)


def _beside(*matrices: Adjacency) -> Beside:
    """What a product of these matrices depends on besides x. Where there are several, none has a weight."""
    parts = [part for a in matrices for part in (a.graph, a.row_scale, a.col_scale, a.weight) if part is not None]
    return Beside(parts, matrices[0].weight if len(matrices) == 1 else None)


def _numbers_of(matrices: Iterable[Adjacency]) -> Hashable:
    return tuple([(a.graph.number, id(a.row_scale), id(a.col_scale), id(a.weight)) for a in matrices])


@functools.cache
def candidates(expression: Expression) -> tuple[Node, ...]:
    """What is worth keeping when its one leaf is constant: everything but a common weight, else A X and its powers."""
    whole = _without_weight(expression)
    if whole is not None:
        return (whole,)
    result: dict[Node, None] = {}
    for term in expression:
        for left, right in itertools.pairwise(term.factors):
            if isinstance(left, Sparse) and isinstance(right, Leaf):
                for power in range(1, left.power + 1):
                    node = multiply(replace(left, power=power), right)
                    assert node is not None
                    result[node] = None
    return tuple(result)


def _without_weight(expression: Expression) -> Node | None:
    """The sum that a weight common to all terms is multiplied with, if there are several and all read the same leaf."""
    last = expression[0].factors[-1]
    if len(expression) < 2 or any(len(t.factors) < 2 or t.factors[-1] != last for t in expression):
        return None
    rest = tuple(Term(term.factors[:-1], term.scale) for term in expression)
    read = {factor for term in rest for factor in term.factors if not isinstance(factor, Sparse)}
    if len(read) != 1 or not isinstance(next(iter(read)), Leaf) or not isinstance(last, (Leaf, Transpose)):
        return None
    return forms(rest)[0]


@functools.cache
def _leaf(node: Node) -> Leaf:
    return next(inner for inner in closure(node) if isinstance(inner, Leaf))


@functools.cache
def _matrices(node: Node) -> tuple[Sparse, ...]:
    result: dict[Sparse, None] = {}
    for inner in closure(node):
        if isinstance(inner, MatMul) and isinstance(inner.left, Sparse):
            result[inner.left] = None
        elif isinstance(inner, (Horner, Step, Clenshaw)):
            result[inner.sparse] = None
    return tuple(result)


@functools.cache
def _numbers(node: Node) -> tuple[str, ...]:
    return tuple(inner.by for inner in closure(node) if isinstance(inner, Scaled))


def _key(node: Node, matrices: list[Adjacency], scalars: dict[str, float]) -> Hashable:
    """What a kept value depends on, besides the leaf it is kept with."""
    return node, _numbers_of(matrices), tuple([scalars[name] for name in _numbers(node)])
