"""sddmm: one number per edge and head from the rows at its two ends, by dot product or sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels import reference
from stretto.ops.checks import check_values
from stretto.ops.cost import Cost, gathered, row_bytes, row_values
from stretto.ops.kernel import Kernel, Sample


def sddmm(graph: Graph, a: Tensor, b: Tensor, *, op: str = "dot") -> Tensor:
    """Per edge (i, j): a[i] . b[j] over the last dimension ("dot"), or a[i] + b[j] ("add").

    graph [n, m]. dot: a [n, f] or [n, h, f], b [m, ...] -> [E] or [E, h]. add: a [n] or [n, h], b [m, ...] -> [E, ...].
    In the order of edge_index.
    """
    _check(graph, a, b, op)
    if a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wide), b.to(wide)
    full = 3 if op == "dot" else 2
    if a.dim() < full:
        return sddmm(graph, a.unsqueeze(1), b.unsqueeze(1), op=op).squeeze(1)
    return KERNEL(graph, a, b, op)


def run(graph: Graph, a: Tensor, b: Tensor, op: str) -> Tensor:
    """No autograd. dot: a [n, h, f] -> [E, h]; add: a [n, h] -> [E, h]."""
    backend = kernels.backend(a.device)
    kernel = backend.sddmm if op == "dot" else backend.sddmm_add
    return kernel(graph.edge_csr, a, b).to(a.dtype)


def saves(tensors: Sequence[Any], result: Tensor, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of a dot product each for the gradient of the other; a sum's gradients read neither."""
    a, b = tensors
    wanted = a.dim() == 3
    return a if wanted and needs[1] else None, b if wanted and needs[0] else None


def gradient(
    graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], op: str
) -> tuple[Tensor | None, ...]:
    """Sums over the edges of both ends: of the other end's rows, weighted; of the gradients alone for "add"."""
    from stretto.ops.rows import sum_edges
    from stretto.ops.spmm import spmm

    (grad,), (a, b), (need_a, need_b) = grads, saved, needs
    if op == "add":
        return sum_edges(graph, grad) if need_a else None, sum_edges(graph.T, grad) if need_b else None
    return spmm(graph, b, grad) if need_a else None, spmm(graph.T, a, grad) if need_b else None


def _check(graph: Graph, a: Tensor, b: Tensor, op: str) -> None:
    expect(op in ("dot", "add"), f"sddmm: 'op' is {op!r}, wanted 'dot' or 'add'")
    most = 3 if op == "dot" else 2
    for name, t, size in (("a", a, graph.num_rows), ("b", b, graph.num_cols)):
        check_values("sddmm", name, t, graph.device)
        if not most - 1 <= t.dim() <= most or t.size(0) != size:
            side = "rows" if name == "a" else "columns"
            fail(
                f"sddmm: '{name}' has shape {list(t.shape)}, wanted {most - 1} or {most} dimensions and {size} rows, "
                f"as many as the graph's {side}"
            )
    if a.shape[1:] != b.shape[1:]:
        fail(f"sddmm: 'a' and 'b' have rows of shape {list(a.shape[1:])} and {list(b.shape[1:])}, wanted the same")


def reference_sddmm(graph: Graph, a: Tensor, b: Tensor, *, op: str = "dot") -> Tensor:
    """The same in plain PyTorch."""
    if a.dim() < (3 if op == "dot" else 2):
        return reference_sddmm(graph, a.unsqueeze(1), b.unsqueeze(1), op=op).squeeze(1)
    kernel = reference.sddmm if op == "dot" else reference.sddmm_add
    return kernel(graph.edge_csr, a, b).to(a.dtype)


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Both forms, with and without heads."""
    n, m = graph.num_rows, graph.num_cols

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    yield Sample((graph, values(n, 7), values(m, 7)), {})
    yield Sample((graph, values(n, 3, 20), values(m, 3, 20)), {})
    yield Sample((graph, values(n), values(m)), {"op": "add"})
    yield Sample((graph, values(n, 4), values(m, 4)), {"op": "add"})


def flops(graph: Graph, a: Tensor, b: Tensor, *, op: str = "dot") -> int:
    """Two operations per pair of values (dot), one (add)."""
    return graph.num_edges * row_values(a) * (2 if op == "dot" else 1)


def bytes_moved(graph: Graph, a: Tensor, b: Tensor, *, op: str = "dot") -> int:
    """Columns, a once, one row of b per edge, the result."""
    out = a.dtype.itemsize * (a.shape[1] if len(a.shape) == (3 if op == "dot" else 2) else 1)
    return 8 * (graph.num_rows + 1) + graph.num_edges * (4 + row_bytes(b) + out) + a.nbytes


def _cost(graph: Any, a: Any, b: Any, op: str = "dot") -> Cost:
    ordered = bytes_moved(graph, a, b, op=op) - graph.num_edges * row_bytes(b)
    return gathered("sddmm", flops(graph, a, b, op=op), ordered, graph.num_edges, b)


KERNEL = Kernel(
    "sddmm",
    "Tensor a, Tensor b, str op",
    run=run,
    shapes=lambda graph, a, b, op: a.new_empty(graph.num_edges, a.shape[1]),
    gradient=gradient,
    saves=saves,
    function=sddmm,
    reference=reference_sddmm,
    samples=samples,
    flops=flops,
    bytes=bytes_moved,
    costs={"sddmm": _cost, "sddmm_add": lambda graph, a, b: _cost(graph, a, b, "add")},
)
