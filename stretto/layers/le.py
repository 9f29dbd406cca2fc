"""LEConv: sum of w (a_j - b_i) is one aggregation of a, less b times the node's total weight; no message is built."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from stretto.layers import adjacency, edges
from stretto.layers.base import note, weight_of
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_result
from stretto.ops import segment_reduce, spmm


def fast(conv: Conv, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What LEConv.forward computes."""
    x_src, x_dst = edges.both_ends(x)
    first = weight_of(conv.lin1, x_src, bias=True)
    graph = edges.graph_between(conv, edge_index, x_src, x_dst)
    values = adjacency.values_of(edge_index)
    weight = adjacency.weighted(graph, edge_weight if values is None else values, x_src)
    total = graph.degree.to(x_src.dtype) if weight is None else segment_reduce(weight, graph)
    own = conv.lin3(x_dst) - total.unsqueeze(1) * conv.lin2(x_dst)
    if x_src.size(1) >= first.size(0):
        note(conv, "A (X W1') + X W3' - D X W2'")
        return spmm(graph, conv.lin1(x_src), weight, y=own)
    note(conv, "(A X) W1' + X W3' - D X W2'")
    out = spmm(graph, x_src, weight) @ first.t() + own
    result: Tensor = out if conv.lin1.bias is None else out + total.unsqueeze(1) * conv.lin1.bias
    return result


LAYER = Layer(pyg.LEConv, fast, aggr=SUM, message=as_wide_as_result, copies=True)
