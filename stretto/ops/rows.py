"""gather_rows and scatter_rows: rows out by an index, rows in by an index. Each is the other's gradient; both are
deterministic, since the sum follows the sorted index instead of racing for it."""

from __future__ import annotations

from collections.abc import Iterator
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
from stretto.ops.batched import one_by_one
from stretto.ops.checks import check_index, check_values
from stretto.ops.op import Op, Sample

FEW_BYTES = 4 << 20  # of gathered rows


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]. x [m, ...], index [E] int32 or int64 -> [E, ...]."""
    index = plain(index)
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        fail(f"gather_rows: 'x' is {x.layout if isinstance(x, Tensor) else type(x).__name__}, wanted a dense tensor")
    check_index("gather_rows", "index", index, x.device)
    if torch.compiler.is_compiling():
        return torch.ops.stretto.gather_rows(x, index)
    if not _by_torch(x, index):
        _check_range(x, index)
    try:
        if library.traced(x):
            return torch.ops.stretto.gather_rows(x, index)
        return _GatherRows.apply(x, index) if library.recorded(x) else run_gather(x, index)
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
    if library.traced(src):
        return torch.ops.stretto.scatter_rows(src, index, num_rows)
    graph = Graph.of_segments(index, num_rows)
    if library.recorded(src):
        return _SumEdges.apply(graph, index, src)
    return run_sum(graph, src)


def has_edges(graph: Graph, dtype: torch.dtype) -> Tensor:
    """1 for nodes that receive messages, 0 for the others. [n, 1]; kept."""
    return graph.derived(("has edges", dtype), lambda: (graph.degree > 0).to(dtype).unsqueeze(1))


def all_reached(graph: Graph) -> bool:
    """Whether every node is known to receive messages; kept. A device is not asked: the host would have to wait."""
    return kernels.on_host(graph.csr.rowptr) and graph.derived("all reached", lambda: bool((graph.degree > 0).all()))


def only_reached(graph: Graph, value: Tensor) -> Tensor:
    """value, and 0 for nodes without edges, whatever it is there; free where there are none. [n, ...]"""
    if all_reached(graph):
        return value
    return torch.where(has_edges(graph, torch.bool).view(-1, *([1] * (value.dim() - 1))), value, 0.0)


def sum_edges(graph: Graph, src: Tensor) -> Tensor:
    """Sum of every destination's messages, src [E, ...] in the order of edge_index -> [n, ...]."""
    if library.recorded(src):
        return _SumEdges.apply(graph.segments, graph.segment_index, src)
    return run_sum(graph.segments, src)


def run_gather(x: Tensor, index: Tensor) -> Tensor:
    """No autograd; index is in range."""
    if _by_torch(x, index):
        return x.index_select(0, index)
    return kernels.backend(x.device).gather_rows(x, index)


def _by_torch(x: Tensor, index: Tensor) -> bool:
    """Whether torch, which is called at less cost, gathers these rows: it checks that the index is in range itself."""
    few = x.numel() * x.element_size() * index.numel() < FEW_BYTES * max(x.size(0), 1) if x.dim() else False
    return few and kernels.backend(x.device).native


def run_sum(segments: Graph, src: Tensor, scale: Tensor | None = None) -> Tensor:
    """No autograd. segments [n, E], src [E, ...], scale [n] of the sums -> [n, ...]."""
    flat = src.reshape(src.size(0), -1) if src.numel() else src.reshape(src.size(0), _row_size(src))
    out = kernels.backend(src.device).spmm(segments.csr, flat, row_scale=scale)[0]
    return out.reshape(segments.num_rows, *src.shape[1:])


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.num_rows = x.size(0)
        ctx.save_for_backward(index)  # torch then notices an index that was edited in between
        return run_gather(x, index)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        return scatter_rows(grads[0], ctx.saved_tensors[0], ctx.num_rows), None


class _SumEdges(torch.autograd.Function):
    """out[r] = scale[r] * sum of src[e] with index[e] == r."""

    @staticmethod
    def forward(ctx: Any, segments: Graph, index: Tensor, src: Tensor, scale: Any = None) -> Tensor:
        ctx.save_for_backward(index, scale)
        return run_sum(segments, src, scale)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, (index, scale) = grads[0], ctx.saved_tensors
        if scale is not None:
            grad = (grad * scale.reshape(-1, *([1] * (grad.dim() - 1)))).to(grad.dtype)
        if grad.requires_grad and torch.is_grad_enabled():
            return None, None, _GatherRows.apply(grad, index), None
        return None, None, run_gather(grad, index), None


def _row_size(src: Tensor) -> int:
    size = 1
    for s in src.shape[1:]:
        size *= s
    return size


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


def _gather_bytes(x: Tensor, index: Tensor) -> int:
    return index.numel() * (index.element_size() + 2 * _row_size(x) * x.element_size())


def _scatter_bytes(src: Tensor, index: Tensor, num_rows: int) -> int:
    return src.numel() * src.element_size() + 4 * index.numel() + num_rows * (8 + _row_size(src) * src.element_size())


GATHER = Op("gather_rows", gather_rows, reference_gather, gather_samples, lambda x, index: 0, _gather_bytes)
SCATTER = Op(
    "scatter_rows",
    scatter_rows,
    reference_scatter,
    scatter_samples,
    lambda src, index, num_rows: src.numel(),
    _scatter_bytes,
)
