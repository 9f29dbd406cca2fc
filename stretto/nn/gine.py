"""GINEConv: nn((1 + eps) x_i + sum relu(x_j + e))."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.nn import edges
from stretto.nn.base import Decline, record_of
from stretto.ops import gather_rows


def fast(conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What GINEConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    reduce = edges.check_aggr(conv, "add", "sum", "mean", "max", "min")
    graph = edges.plain_graph(conv, edge_index, x_src, x_dst, size)
    attr = edges.one_per_edge(graph, edge_attr, x_src)
    if attr.dim() != 2:
        raise Decline("edge_attr is not a matrix")
    width = attr.size(1) if conv.lin is None else conv.lin.out_channels
    if width != x_src.size(1) or (x_dst is not None and x_dst.size(1) != width):
        raise Decline("x and edge_attr differ in width")
    record_of(conv).plan = "nn(sum relu(X_j + E) + c X), summed over the cached index"
    if conv.lin is not None:
        attr = conv.lin(attr)
    message = (gather_rows(x_src, edges.sources(graph)) + attr).relu()
    out = edges.reduce_edges(graph, message, reduce)
    return conv.nn(out if x_dst is None else out + (1 + conv.eps) * x_dst)
