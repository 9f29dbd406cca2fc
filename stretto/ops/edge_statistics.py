"""statistics: several aggregations of the same neighbours (PNAConv) in one reading of them.

Messages are x_j + own_i; nothing of size edges x channels is made, and nothing but x and own is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import expect
from stretto.graph import Graph
from stretto.kernels import backend, reference_statistics
from stretto.kernels.reference_statistics import LEAST_VAR, STATISTICS
from stretto.ops.checks import check_shape
from stretto.ops.cost import Cost, gathered, row_bytes, row_values
from stretto.ops.extremum import extremum
from stretto.ops.kernel import Kernel, Sample, through
from stretto.ops.rows import gather_rows, only_reached, sum_edges
from stretto.ops.segment import segment_reduce
from stretto.ops.spmm import spmm


def statistics(graph: Graph, x: Tensor, own: Tensor | None = None, *, names: Sequence[str]) -> Tensor:
    """Statistics over the messages x_j + own_i that every node receives; nodes without edges give 0.

    graph [n, m], x [m, k], own [n, k] -> [n, s, k], in the order of names: sum, mean, min, max, var, std.
    var is that of the population, in which own has no part; std is its root, 0 where var <= 1e-5, as PyG's
    StdAggregation has it.
    """
    names = tuple(names)
    _check(graph, x, own, names)
    if own is not None and own.dtype != x.dtype:
        wide = torch.promote_types(own.dtype, x.dtype)
        own, x = own.to(wide), x.to(wide)
    if not backend(x.device).native:
        return _in_turn(graph, x, own, names)
    return KERNEL(graph, x, own, names)


def run(graph: Graph, x: Tensor, own: Tensor | None, names: tuple[str, ...]) -> Tensor:
    """No autograd."""
    return backend(x.device).statistics(graph.csr, x, own, names)


def gradient(
    graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], names: tuple[str, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """No autograd: gradients of x and own."""
    x, own = saved
    made: tuple[Tensor | None, Tensor | None] = backend(x.device).statistics_grad(
        graph.csr, graph.T.csr, x, own, names, grads[0], tuple(needs)
    )
    return made


def _plain(graph: Graph, x: Tensor, own: Tensor | None, names: tuple[str, ...]) -> Tensor:
    return reference_statistics.statistics(graph.csr, x, own, names)


def _in_turn(graph: Graph, x: Tensor, own: Tensor | None, names: tuple[str, ...]) -> Tensor:
    """The same from products with the graph, for devices without a kernel for it."""
    wanted, result = set(names), dict[str, Tensor]()
    if wanted & {"sum", "mean"}:
        mean = spmm(graph, x, reduce="mean")
        if own is not None:
            mean = only_reached(graph, mean + own)
        result["mean"] = mean
        result["sum"] = mean * graph.degree.to(x.dtype).unsqueeze(1)
    for name in wanted & {"min", "max"}:
        result[name] = extremum(graph, x, None, name, own)
    if wanted & {"var", "std"}:
        # One centre for all rows: the variance does not change, and a large common mean costs no digits. What is not
        # finite must not reach other rows by way of it.
        centre = x.detach().mean(0) if x.size(0) else x.new_zeros(x.size(1))
        centred = x - torch.where(centre.isfinite(), centre, 0.0)
        first = spmm(graph, centred, reduce="mean")
        result["var"] = (spmm(graph, centred * centred, reduce="mean") - first * first).clamp(min=0)
        result["std"] = _root(result["var"])
    return torch.stack([result[name] for name in names], dim=1)


def _root(var: Tensor) -> Tensor:
    """The deviation; the root's slope is infinite at 0: clamped first, as in PyG."""
    root = var.clamp(min=LEAST_VAR).sqrt()
    return root.masked_fill(root <= LEAST_VAR**0.5, 0.0)


def neighbour_statistics(
    graph: Graph, x: Tensor, edge: Tensor | None = None, *, names: Sequence[str] = ("mean", "min", "max", "std")
) -> dict[str, Tensor]:
    """Statistics over the messages x_j (+ edge) that every node receives; nodes without edges give 0.

    graph [n, m], x [m, k], edge [E, k] in the order of edge_index -> {name: [n, k]}. Without edge terms one call of
    statistics(); with them messages are made, and read from memory.
    """
    if edge is None:
        return dict(zip(names, statistics(graph, x, names=names).unbind(1), strict=True))
    _check(graph, x, None, tuple(names))
    wanted, result = set(names), dict[str, Tensor]()
    messages = gather_rows(x, graph.edge_index[0]) + edge if wanted & {"min", "max", "var", "std"} else edge
    if wanted & {"sum", "mean"}:
        scale = graph.mean_scale(torch.promote_types(edge.dtype, torch.float32)).to(edge.dtype).unsqueeze(1)
        result["mean"] = spmm(graph, x, reduce="mean") + sum_edges(graph, edge) * scale
        result["sum"] = result["mean"] * graph.degree.to(edge.dtype).unsqueeze(1)
    for name in wanted & {"min", "max"}:
        result[name] = segment_reduce(messages, graph, reduce=name)
    if wanted & {"var", "std"}:
        result["var"] = segment_reduce(messages, graph, reduce="var")
        result["std"] = _root(result["var"])
    return {name: result[name] for name in names}


def _check(graph: Graph, x: Tensor, own: Tensor | None, names: tuple[str, ...]) -> None:
    for name in names:
        expect(name in STATISTICS, f"statistics: {name!r} in 'names', wanted some of {', '.join(STATISTICS)}")
    expect(len(names) > 0 and len(set(names)) == len(names), f"statistics: 'names' is {names}, wanted each once")
    check_shape("statistics", "x", x, graph.device, graph.num_cols, "k")
    if own is not None:
        check_shape("statistics", "own", own, graph.device, graph.num_rows, x.size(1))


def reference(graph: Graph, x: Tensor, own: Tensor | None = None, *, names: Sequence[str]) -> Tensor:
    """The same in plain PyTorch."""
    return reference_statistics.statistics(graph.csr, x, own, tuple(names))


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """All statistics, PNAConv's, and each by itself."""

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    n, m = graph.num_rows, graph.num_cols
    yield Sample((graph, values(m, 5), values(n, 5)), {"names": ("mean", "min", "max", "std")})
    yield Sample((graph, values(m, 17)), {"names": ("max", "sum", "var", "min")})
    for name in STATISTICS:
        yield Sample((graph, values(m, 3), values(n, 3)), {"names": (name,)})


def flops(graph: Graph, x: Tensor, own: Tensor | None = None, *, names: Sequence[str]) -> int:
    """A subtraction, two sums, a square and four comparisons per channel and edge."""
    return graph.num_edges * row_values(x) * 8


def bytes_moved(graph: Graph, x: Tensor, own: Tensor | None = None, *, names: Sequence[str]) -> int:
    """One row per edge, own and the results once."""
    row = row_bytes(x)
    return 8 * (graph.num_rows + 1) + graph.num_edges * (4 + row) + graph.num_rows * row * (len(names) + 1)


def _cost(graph: Any, x: Any, own: Any, names: Sequence[str], *rest: Any, ways: int = 1) -> Cost:
    ordered = bytes_moved(graph, x, own, names=names) - graph.num_edges * row_bytes(x)
    return gathered("spmm", flops(graph, x, own, names=names), ordered, graph.num_edges, x, ways=ways)


KERNEL = Kernel(
    "statistics",
    "Tensor x, Tensor? own, str[] names",
    run=run,
    shapes=lambda graph, x, own, names: x.new_empty(graph.num_rows, len(names), x.shape[1]),
    gradient=gradient,
    again=through(_plain),
    function=statistics,
    reference=reference,
    samples=samples,
    flops=flops,
    bytes=bytes_moved,
    costs={"statistics": _cost, "statistics_grad": lambda graph, _, *arguments: _cost(graph, *arguments, ways=2)},
)
