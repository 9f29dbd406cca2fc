"""gather_rows and scatter_rows: rows out by an index, rows in by an index. Each is the other's gradient; both are
deterministic, since the sum follows the sorted index instead of racing for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import IndexRangeError, fail
from stretto.graph import Graph
from stretto.graph.formats import plain
from stretto.kernels import build, reference
from stretto.kernels.schema import CPU
from stretto.ops import library
from stretto.ops.checks import check_index, check_values
from stretto.ops.cost import Cost, row_bytes, row_values
from stretto.ops.kernel import Kernel, Sample, differentiable

FEW_BYTES = 4 << 20  # of gathered rows


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]. x [m, ...], index [E] int32 or int64 -> [E, ...]."""
    index = plain(index)
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        fail(f"gather_rows: 'x' is {x.layout if isinstance(x, Tensor) else type(x).__name__}, wanted a dense tensor")
    check_index("gather_rows", "index", index, x.device)
    if torch.compiler.is_compiling():
        return GATHER(None, x, index, x.size(0))
    if not _by_torch(x, index):
        _check_range(x, index)
    try:
        return GATHER(None, x, index, x.size(0) if x.dim() else 0)
    except (IndexError, RuntimeError):  # torch looks for itself, at less cost, but does not say which
        _check_range(x, index)
        raise


def scatter_rows(src: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """out[r] = sum of src[e] with index[e] == r. src [E, ...], index [E] -> [num_rows, ...]."""
    index = plain(index)
    check_values("scatter_rows", "src", src, index.device if isinstance(index, Tensor) else CPU)
    check_index("scatter_rows", "index", index, src.device)
    if not src.dim() or index.shape != src.shape[:1]:
        fail(f"scatter_rows: 'index' has shape {list(index.shape)}, wanted {list(src.shape[:1])}, one per row of 'src'")
    return SCATTER(None, src, index, num_rows)


def has_edges(graph: Graph, dtype: torch.dtype) -> Tensor:
    """1 for nodes that receive messages, 0 for the others. [n, 1]; kept."""
    return graph.derived(("has edges", dtype), lambda: (graph.degree > 0).to(dtype).unsqueeze(1))


def all_reached(graph: Graph) -> bool:
    """Whether every node is known to receive messages; kept. A device is not asked: the host would have to wait."""
    return kernels.on_host(graph.csr.rowptr) and graph.derived("all reached", lambda: bool((graph.degree > 0).all()))


def only_reached(graph: Graph, value: Tensor) -> Tensor:
    """The value, and 0 for nodes without edges, whatever it is there; free where there are none."""
    if all_reached(graph):
        return value
    return torch.where(has_edges(graph, torch.bool).view(-1, *([1] * (value.dim() - 1))), value, 0.0)


def sum_edges(graph: Graph, src: Tensor) -> Tensor:
    """Sum of every destination's messages, src [E, ...] in the order of edge_index -> [n, ...]."""
    return sum_segments(graph.segments, graph.segment_index, src)


def sum_segments(segments: Graph, index: Tensor, src: Tensor, scale: Tensor | None = None) -> Tensor:
    """Sum of every segment's rows, times its scale. segments [n, E], index [E], src [E, ...], scale [n] -> [n, ...]."""
    if library.traced(src):
        sizes = segments.num_rows, segments.num_cols, segments.num_edges
        flat = src.reshape(src.shape[0], -1)
        out: Tensor = torch.ops.stretto.spmm(segments.handle, *sizes, flat, None, scale, None, None, 1.0)
        return out.reshape(sizes[0], *src.shape[1:])
    total: Tensor = _sum_rows(segments, src, scale, index)
    return total


def run_gather(x: Tensor, index: Tensor) -> Tensor:
    """No autograd; index is in range."""
    if _by_torch(x, index):
        return x.index_select(0, index)
    return kernels.backend(x.device).gather_rows(x, index)


def _by_torch(x: Tensor, index: Tensor) -> bool:
    """Whether torch, which is called at less cost, gathers these rows: it checks that the index is in range itself."""
    few = x.numel() * x.element_size() * index.numel() < FEW_BYTES * max(x.size(0), 1) if x.dim() else False
    return few and kernels.backend(x.device).native


def run_sum(segments: Graph, src: Tensor, scale: Tensor | None = None, index: Tensor | None = None) -> Tensor:
    """No autograd. segments [n, E], src [E, ...], scale [n] of the sums -> [n, ...]."""
    flat = src.reshape(src.size(0), -1) if src.numel() else src.reshape(src.size(0), row_values(src))
    out = kernels.backend(src.device).spmm(segments.csr, flat, row_scale=scale)[0]
    return out.reshape(segments.num_rows, *src.shape[1:])


def _sum_gradient(segments: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Any) -> tuple[Any, ...]:
    """Every row gets its segment's gradient, scaled."""
    (grad,), (scale, index) = grads, saved
    if scale is not None:
        grad = (grad * scale.reshape(-1, *([1] * (grad.dim() - 1)))).to(grad.dtype)
    if grad.requires_grad and torch.is_grad_enabled():
        return gather_rows(grad, index), None, None
    return run_gather(grad, index), None, None


_sum_rows = differentiable("SumRows", run_sum, _sum_gradient, saves=lambda tensors, result, needs: tensors[1:])


def _check_range(x: Tensor, index: Tensor) -> None:
    if not kernels.on_host(index) or type(index) is not Tensor:
        return  # a device checks its own indices; a look here would wait for it
    least, most = build.minmax(index)
    num_rows = x.size(0) if x.dim() else 0
    if least < 0 or most >= num_rows:
        wrong = least if least < 0 else most
        raise IndexRangeError(f"gather_rows: index {wrong} is out of range, wanted 0 <= index < {num_rows}")


def reference_gather(x: Tensor, index: Tensor) -> Tensor:
    """gather_rows in plain PyTorch."""
    return reference.gather_rows(x, index)


def reference_scatter(src: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """scatter_rows in plain PyTorch."""
    acc = kernels.accumulate_type(src.dtype)
    out = torch.zeros(num_rows, *src.shape[1:], dtype=acc, device=src.device)
    return out.index_add_(0, index.long(), src.to(acc)).to(src.dtype)


def gather_samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """One and more dimensions, both index types."""
    for index in (graph.edge_index[0], graph.edge_index[0].int()):
        yield Sample((torch.randn(graph.num_cols, 5).to(dtype), index), {})
    yield Sample((torch.randn(graph.num_cols, 2, 3).to(dtype), graph.edge_index[0]), {})
    yield Sample((torch.randn(graph.num_cols).to(dtype), graph.edge_index[0]), {})


def scatter_samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """One and more dimensions."""
    for shape in ((5,), (2, 3), ()):
        src = torch.randn(graph.num_edges, *shape, dtype=torch.float64).to(dtype)
        yield Sample((src, graph.edge_index[1], graph.num_rows), {})


def _gather_cost(x: Any, index: Any) -> Cost:
    row = row_bytes(x)
    random = index.numel * row
    return Cost("gather", 0, index.numel * (index.itemsize + row), random, row, x.nbytes)


GATHER = Kernel(
    "gather_rows",
    "Tensor x, Tensor index, SymInt num_rows",
    on_graph=False,
    run=lambda _, x, index, num_rows: run_gather(x, index),
    shapes=lambda _, x, index, num_rows: x.new_empty(index.shape[0], *x.shape[1:]),
    gradient=lambda _, saved, grads, needs, num_rows: (scatter_rows(grads[0], saved[0], num_rows), None),
    saves=lambda tensors, result, needs: (tensors[1],),  # torch then notices an index that was edited in between
    function=gather_rows,
    reference=reference_gather,
    samples=gather_samples,
    flops=lambda x, index: 0,
    bytes=lambda x, index: index.numel() * (index.element_size() + 2 * row_bytes(x)),
    costs={"gather_rows": _gather_cost},
)
SCATTER = Kernel(
    "scatter_rows",
    "Tensor src, Tensor index, SymInt num_rows",
    on_graph=False,
    run=lambda _, src, index, num_rows: run_sum(Graph.of_segments(index, num_rows), src),
    shapes=lambda _, src, index, num_rows: src.new_empty(num_rows, *src.shape[1:]),
    gradient=lambda _, saved, grads, needs, num_rows: (gather_rows(grads[0], saved[0]), None),
    saves=lambda tensors, result, needs: (tensors[1],),
    function=scatter_rows,
    reference=reference_scatter,
    samples=scatter_samples,
    flops=lambda src, index, num_rows: src.numel(),
    bytes=lambda src, index, num_rows: src.nbytes + 4 * index.numel() + num_rows * (8 + row_bytes(src)),
)
