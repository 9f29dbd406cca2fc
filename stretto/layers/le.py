"""LEConv: sum of w (a_j - b_i) is one aggregation of a, less b times the node's total weight; no message is built."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.layers import adjacency, edges
from stretto.layers.base import record_of, weight_of
from stretto.ops import segment_reduce, spmm


def fast(conv: Any, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What LEConv.forward computes."""
    x_src, x_dst = edges.both_ends(x)
    edges.check_aggr(conv, *edges.SUM)
    first = weight_of(conv.lin1, x_src, bias=True)
    graph = edges.graph_between(conv, edge_index, x_src, x_dst)
    values = adjacency.values_of(edge_index)
    weight = adjacency.weighted(graph, edge_weight if values is None else values, x_src)
    total = graph.degree.to(x_src.dtype) if weight is None else segment_reduce(weight, graph)
    own = conv.lin3(x_dst) - total.unsqueeze(1) * conv.lin2(x_dst)
    if x_src.size(1) >= first.size(0):
        record_of(conv).plan = "A (X W1') + X W3' - D X W2'"
        return spmm(graph, conv.lin1(x_src), weight, y=own)
    record_of(conv).plan = "(A X) W1' + X W3' - D X W2'"
    out = spmm(graph, x_src, weight) @ first.t() + own
    return out if conv.lin1.bias is None else out + total.unsqueeze(1) * conv.lin1.bias
