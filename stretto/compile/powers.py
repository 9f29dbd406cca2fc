"""A chain of hops, A (A X), or the power itself, [A^2] X: one hop over the edges that A^2 has.

A power multiplied out holds a value per edge and mostly has far more of them than the chain reads. Where it has fewer
(cliques, paths, graphs of a few nodes each), it is a plan like the others. How many it has is estimated from some of
its rows, once per graph and from its third use on: a mini-batch is not looked at.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from stretto.compile.expr import Expression, MatMul, Node, Sparse, Transpose
from stretto.graph import Graph
from stretto.kernels import has_own_memory

FORMED = "formed"  # Sparse.form
USES = 3  # of a graph, before it is looked at
LEAST_ROWS = 4  # of the power that are counted
ROWS = 64  # that are, where they are short
MOST_STEPS = 1 << 16  # walks that are followed for that: a few milliseconds
MOST_WORK = 128  # walks of two hops, for every edge, beyond which multiplying out would take long


@functools.cache
def chain_of(expression: Expression) -> Sparse | None:
    """The power of the adjacency that is all an expression sums over, if it is one: SGConv's."""
    if len(expression) != 1:
        return None
    result = [f for f in expression[0].factors if isinstance(f, Sparse)]
    return result[0] if len(result) == 1 and result[0].power > 1 and not result[0].chebyshev else None


@functools.cache
def formed(node: Node, hops: int) -> Node:
    """A product with every chain of so many hops as one hop of their power."""
    if isinstance(node, Transpose):
        return Transpose(formed(node.of, hops))
    if not isinstance(node, MatMul):
        return node
    if not isinstance(node.left, Sparse):
        left = node.left if not isinstance(node.left, (MatMul, Transpose)) else formed(node.left, hops)
        return MatMul(left, formed(node.right, hops))
    inner: Node = node
    for _ in range(hops):
        if not isinstance(inner, MatMul) or inner.left != node.left:
            return MatMul(node.left, formed(node.right, hops))
        inner = inner.right
    return MatMul(replace(node.left, power=hops, form=FORMED), formed(inner, hops))


def fewer_edges(graph: Graph, hops: int) -> int:
    """About how many edges A^hops has, where that is fewer than a chain of hops reads; else 0, as at the first uses."""
    if has_own_memory(graph.device) or graph.num_rows != graph.num_cols or not graph.num_edges:
        return 0  # a device would have to be waited for
    uses = graph._derived["uses of a power"] = graph._derived.get("uses of a power", 0) + 1
    if uses < USES:
        return 0
    count: int = graph.derived(("edges of a power", hops), lambda: _estimated(graph, hops))
    return count if count < hops * graph.num_edges else 0


def _estimated(graph: Graph, hops: int) -> int:
    """Edges of A^hops, from some of its rows; as many as the chain reads where that or the power would take long."""
    csr, n = graph.csr, graph.num_rows
    degrees, none = csr.rowptr.diff(), hops * graph.num_edges
    walks = float(degrees.double().square().sum())  # of two hops, where every edge has its reverse; else about
    if csr.col is None or walks > MOST_WORK * graph.num_edges:
        return none
    count, most, result = LEAST_ROWS, 0, none
    while count <= ROWS and 4 * most <= MOST_STEPS:  # so many rows take about four times the walks of the last
        rows = torch.arange(0, n, max(1, n // count), device=csr.device)
        reached, most = _walked(rows, csr.rowptr, csr.col, degrees, hops)
        result = reached * n // rows.numel() if most <= MOST_STEPS else result
        count *= 4
    return result


def _walked(rows: Tensor, starts: Tensor, columns: Tensor, degrees: Tensor, hops: int) -> tuple[int, int]:
    """How many pairs (row, node so many hops away) there are, and how many walks were followed for one of the hops;
    more than MOST_STEPS: it was given up."""
    n, most = degrees.numel(), 0
    pairs = torch.arange(rows.numel(), device=rows.device) * n + rows  # number of the row, node
    for _ in range(hops):
        node, steps = pairs % n, degrees[pairs % n]
        most = max(most, int(steps.sum()))
        if most > MOST_STEPS:
            break
        first = (starts[node] - (steps.cumsum(0) - steps)).repeat_interleave(steps)
        after = columns[first + torch.arange(first.numel(), device=first.device)].long()
        before, pairs = pairs, ((pairs // n).repeat_interleave(steps) * n + after).unique()
        if torch.equal(before, pairs):  # everything is reached: further hops lead nowhere else
            break
    return pairs.numel(), most


def multiplied(graph: Graph, values: Tensor, hops: int) -> tuple[Graph, Tensor]:
    """A^hops of the matrix with these values [E] in the order of rows, as a graph and a value per edge of it."""
    index = torch.stack([graph.csr.rows().long(), graph.csr.columns().long()])
    size = (graph.num_rows, graph.num_cols)
    one = torch.sparse_coo_tensor(index, values, size, check_invariants=False).coalesce()
    power = one
    for _ in range(hops - 1):
        power = torch.sparse.mm(power, one).coalesce()
    rows, columns = power.indices()
    pointers = torch.zeros(graph.num_rows + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(torch.bincount(rows, minlength=graph.num_rows), 0, out=pointers[1:])
    kind = torch.int32 if graph.csr.col is None else graph.csr.col.dtype
    return Graph.of_pointers(pointers, columns.to(kind), graph.num_cols, known=True), power.values()
