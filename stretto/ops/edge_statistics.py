"""neighbour_statistics: several aggregations of the same neighbours (PNAConv), sharing what they have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.errors import expect
from stretto.graph import Graph
from stretto.ops.rows import gather_rows, sum_edges
from stretto.ops.segment import segment_reduce
from stretto.ops.spmm import spmm

STATISTICS = ("sum", "mean", "min", "max", "var", "std")


def neighbour_statistics(
    graph: Graph, x: Tensor, edge: Tensor | None = None, *, names: Sequence[str] = ("mean", "min", "max", "std")
) -> dict[str, Tensor]:
    """Statistics over the messages x_j (+ edge) that every node receives; nodes without edges give 0.

    graph [n, m], x [m, k], edge [E, k] in the order of edge_index -> {name: [n, k]}.
    var is that of the population; std is its root, 0 where var <= 1e-5, as PyG's StdAggregation has it. A term of the
    destination (PNAConv's x_i part) is to be added to sum, mean, min and max afterwards; var and std do not see it.
    Without edge terms nothing of size edges x channels is made. With them min and max read the messages from memory.
    """
    for name in names:
        expect(name in STATISTICS, f"neighbour_statistics: {name!r} in 'names', wanted some of {', '.join(STATISTICS)}")
    found: dict[str, Tensor] = {}
    wanted = set(names)
    messages: Tensor | None = None
    if edge is not None and wanted & {"min", "max", "var", "std"}:
        messages = gather_rows(x, graph.edge_index[0]) + edge

    def total(values: Tensor) -> Tensor:
        return spmm(graph, values, reduce="mean")

    if wanted & {"sum", "mean"}:
        average = total(x)
        if edge is not None:
            average = average + _scaled(graph, sum_edges(graph, edge))
        found["mean"] = average
        found["sum"] = average * graph.degree.to(average.dtype).unsqueeze(1)
    for name in wanted & {"min", "max"}:
        found[name] = spmm(graph, x, reduce=name) if messages is None else segment_reduce(messages, graph, reduce=name)
    if wanted & {"var", "std"}:
        if messages is not None:
            found["var"] = segment_reduce(messages, graph, reduce="var")
        else:
            # One centre for all rows: the variance does not change, and a large common mean costs no digits.
            centred = x - x.detach().mean(0) if x.size(0) else x
            first = total(centred)
            found["var"] = (total(centred * centred) - first * first).clamp(min=0)
        # The root's slope is infinite at 0: clamped first, as in PyG.
        root = found["var"].clamp(min=1e-5).sqrt()
        found["std"] = root.masked_fill(root <= 1e-5**0.5, 0.0)
    return {name: found[name] for name in names}


def _scaled(graph: Graph, total: Tensor) -> Tensor:
    return total * graph.mean_scale(torch.promote_types(total.dtype, torch.float32)).to(total.dtype).unsqueeze(1)
