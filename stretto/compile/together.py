"""Products that share a tall matrix, found in a plan and taken together: X W' and X V' as X [W; V]'.

A product with few columns takes as long as its tall operand takes to be read; two of them read it twice. The same holds
for gradients of weights, (A' G)' X and G' X, and for what they flow back to, (A' G) W + G V, once A' G and G lie side
by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.compile.expr import Diagonal, Leaf, MatMul, Node, Sparse, Transpose
from stretto.kernels import on_host


class Group(NamedTuple):
    """Products of one matrix, and of each the other matrix that it takes, transposed."""

    shared: Node
    products: tuple[MatMul, ...]
    others: tuple[Node, ...]


Groups = dict[Node, Group]

TALL = 1 << 14  # rows from which a product is bound by reading them
NARROW = 128  # columns up to which it is
SEVERAL = 3  # products of fewer rows take as long as their calls: so many are one call instead


def same_left(nodes: Iterable[Node], root: Node) -> Groups:
    """Products of one matrix with several weights, by each of them. Not the result itself, which must be its own."""
    result: dict[Node, dict[MatMul, Node]] = {}
    for node in nodes:
        if not isinstance(node, MatMul) or node == root or isinstance(node.left, (Sparse, Diagonal, Transpose)):
            continue
        if isinstance(node.right, Transpose) and isinstance(node.right.of, Leaf):
            result.setdefault(node.left, {})[node] = node.right.of
    return _of_several(result)


def same_right(gradients: Iterable[tuple[str, Node]]) -> Groups:
    """Gradients of weights that were multiplied with one matrix, by each of them."""
    result: dict[Node, dict[MatMul, Node]] = {}
    for _, node in gradients:
        if isinstance(node, MatMul) and isinstance(node.left, Transpose):
            result.setdefault(node.right, {})[node] = node.left.of
    return _of_several(result)


def _of_several(products: Mapping[Node, dict[MatMul, Node]]) -> Groups:
    groups = [Group(shared, tuple(some), tuple(some.values())) for shared, some in products.items() if len(some) > 1]
    return {node: group for group in groups for node in group.products}


def worth_it(tall: Tensor, thin: list[Tensor], widths: list[int]) -> bool:
    """Whether to take products with `tall` [n, i] together: with matrices `thin` that give it these widths."""
    if tall.size(0) >= TALL:
        pays = max(widths) <= min(NARROW, tall.size(1) // 2)  # else results lying side by side cost as much
    else:
        pays = len(thin) >= SEVERAL and max(widths) <= NARROW
    return (
        pays
        and on_host(tall)
        and tall.dtype in (torch.float32, torch.float64)
        and all(t.dtype == tall.dtype for t in thin)
        and not torch.is_autocast_enabled("cpu")
    )
