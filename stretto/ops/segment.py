"""segment_reduce: combine arbitrary messages by the segment each belongs to, without atomics.

The index is sorted once (Graph.of_segments remembers it); every reduction then walks segments in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import fail
from stretto.graph import Graph
from stretto.graph.formats import plain
from stretto.graph.traced import TracedGraph
from stretto.kernels import Reduce, reference
from stretto.kernels.schema import CPU
from stretto.ops import extremum, library, rows, softmax
from stretto.ops.checks import check_index, check_values
from stretto.ops.cost import Cost, row_values
from stretto.ops.kernel import Kernel, Sample, through


def segment_reduce(
    src: Tensor, index: Tensor | Graph, num_segments: int | None = None, *, reduce: str | Reduce = "sum"
) -> Tensor:
    """Combine src[e] over the segment index[e].

    src [E, ...], index [E], sorted or not (or a Graph: its destinations) -> [num_segments, ...]; softmax -> [E, ...].
    sum, mean, max, min (0 for an empty segment), mul (1), var and std (of the population), median (the lower one),
    softmax.
    """
    reduce = Reduce.of(reduce, "segment_reduce")
    where: Any = index
    whole: Any = index if isinstance(index, (Graph, TracedGraph)) else None
    if whole is None:
        where = plain(index)
        check_index("segment_reduce", "index", where, src.device if isinstance(src, Tensor) else CPU)
    check_values("segment_reduce", "src", src, where.device)
    size = where.numel() if whole is None else whole.num_edges
    if not src.dim() or src.size(0) != size:
        fail(f"segment_reduce: 'src' has shape {list(src.shape)}, wanted {size} rows, one per entry of 'index'")
    if isinstance(whole, Graph) and torch.compiler.is_compiling():
        whole = TracedGraph.standing_for(whole)
    graph = Graph.of_segments(where, num_segments) if whole is None else whole.segments
    where = where if whole is None else whole.segment_index
    flat = src.reshape(size, row_values(src))
    out = _REDUCTIONS[reduce](graph, where, flat)
    return out if src.dim() == 2 else out.reshape(out.size(0), *src.shape[1:])  # no view where none is needed


def _mean(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    return rows.sum_segments(graph, index, src, library.mean_scale(graph, kernels.accumulate_type(src.dtype)))


def _max(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    return extremum.extremum(graph, src, None, "max")


def _min(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    return extremum.extremum(graph, src, None, "min")


def _var(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    # Two passes: the mean of squares minus the square of the mean loses all digits when the mean is large.
    wide = src.to(kernels.accumulate_type(src.dtype))
    centred = wide - rows.gather_rows(_mean(graph, index, wide), index)
    return _mean(graph, index, centred * centred).to(src.dtype)


def _std(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    var = _var(graph, index, src)
    flat = var <= 0  # a constant segment: deviation 0, and gradient 0 instead of the root's infinity
    return torch.where(flat, torch.zeros_like(var), torch.where(flat, torch.ones_like(var), var).sqrt())


def _softmax(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    return softmax.edge_softmax(graph, src)


def _median(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    # Sorted by value, then stably by segment: the lower median of segment s stands at its start plus (size - 1) // 2.
    order = src.detach().argsort(dim=0, stable=True)
    place = index.long()[order].argsort(dim=0, stable=True)
    entries = order.gather(0, place)
    counts = torch.zeros(graph.num_rows, dtype=torch.long, device=src.device).index_add_(
        0, index.long(), torch.ones_like(index, dtype=torch.long)
    )
    middle = (counts.cumsum(0) - counts + (counts - 1).clamp(min=0) // 2).clamp(max=max(src.size(0) - 1, 0))
    if src.size(0) == 0:
        return src.new_zeros(graph.num_rows, src.size(1))
    chosen = entries.index_select(0, middle)
    return torch.where((counts > 0).unsqueeze(1), src.gather(0, chosen), src.new_zeros(()))


def _mul(graph: Graph, index: Tensor, src: Tensor) -> Tensor:
    return PRODUCT(graph, src)


def run_mul(graph: Graph, src: Tensor) -> Tensor:
    """No autograd. graph [n, E], src [E, k] -> [n, k]."""
    out: Tensor = kernels.backend(src.device).spmm(graph.csr, src, reduce="mul")[0]
    return out


def mul_gradient(graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor]:
    """Of each factor the product of the others; no autograd. -> [E, k]."""
    return (kernels.backend(saved[0].device).mul_grad(graph.edge_csr, saved[0], grads[0]),)


def _plain_mul(graph: Graph, src: Tensor) -> Tensor:
    index = graph.segment_index.long().unsqueeze(1).expand_as(src)
    return src.new_ones(graph.num_rows, src.size(1)).scatter_reduce(0, index, src, "prod")


_REDUCTIONS: dict[Reduce, Callable[[Graph, Tensor, Tensor], Tensor]] = {
    Reduce.SUM: rows.sum_segments,
    Reduce.MEAN: _mean,
    Reduce.MAX: _max,
    Reduce.MIN: _min,
    Reduce.MUL: _mul,
    Reduce.VAR: _var,
    Reduce.STD: _std,
    Reduce.SOFTMAX: _softmax,
    Reduce.MEDIAN: _median,
}


def reference_segment(
    src: Tensor, index: Tensor | Graph, num_segments: int | None = None, *, reduce: str = "sum"
) -> Tensor:
    """segment_reduce in plain PyTorch, one segment after the other."""
    graph = index.segments if isinstance(index, Graph) else Graph.of_segments(index, num_segments)
    csr = graph.edge_csr
    flat = src.reshape(src.size(0), row_values(src)).to(kernels.accumulate_type(src.dtype))
    if reduce in ("max", "min", "mul", "sum"):
        out = reference.spmm(csr, flat, reduce=reduce)[0]
    elif reduce == "softmax":
        out = reference.edge_softmax(csr, flat)
    else:
        how: Callable[[Tensor], Tensor] = {
            "mean": lambda v: v.mean(0),
            "var": lambda v: v.var(0, correction=0),
            "std": lambda v: (
                torch.where(v.var(0, correction=0) > 0, v.var(0, correction=0), 1).sqrt() * (v.var(0, correction=0) > 0)
            ),
            "median": lambda v: v.median(0).values,
        }[reduce]
        pieces = flat[csr.columns()].split(csr.rowptr.diff().tolist())
        empty = flat.new_zeros(flat.size(1))
        out = torch.stack([how(p) if len(p) else empty for p in pieces]) if pieces else flat.new_zeros(0, flat.size(1))
    return out.to(src.dtype).reshape(out.size(0), *src.shape[1:])


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Every reduction on unsorted messages; the graph itself as index; more dimensions."""
    for reduce in Reduce:
        src = torch.randn(graph.num_edges, 5, dtype=torch.float64).to(dtype)
        yield Sample((src, graph.edge_index[1], graph.num_rows), {"reduce": reduce.value})
    src = torch.randn(graph.num_edges, 2, 3, dtype=torch.float64).to(dtype)
    yield Sample((src, graph), {"reduce": "mean"})
    yield Sample((src[:, 0, 0], graph), {"reduce": "max"})


def _mul_gradient_cost(graph: Any, src: Any, grad: Any) -> Cost:
    return Cost("softmax", 3 * src.numel, graph.nbytes + 2 * src.nbytes + grad.nbytes, depth=None)


PRODUCT = Kernel(
    "segment_mul",
    "Tensor src",
    run=run_mul,
    shapes=lambda graph, src: src.new_empty(graph.num_rows, src.shape[1]),
    gradient=mul_gradient,
    again=through(_plain_mul),
    costs={"mul_grad": _mul_gradient_cost},
)
KERNEL = Kernel(
    "segment_reduce",
    function=segment_reduce,
    reference=reference_segment,
    samples=samples,
    flops=lambda src, *rest, **options: src.numel(),
    bytes=lambda src, index, num_segments=None, **options: src.nbytes + 4 * src.size(0),
)
