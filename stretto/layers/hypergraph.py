"""HypergraphConv: nodes to hyperedges and back, two aggregations over one incidence graph and its transpose."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.graph import Graph
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, note, weight_of
from stretto.layers.declines import same_type
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_result, when
from stretto.ops import gather_rows, segment_reduce, spmm


def fast(
    conv: Conv,
    x: Tensor,
    hyperedge_index: Any,
    hyperedge_weight: Tensor | None = None,
    hyperedge_attr: Tensor | None = None,
    num_edges: int | None = None,
) -> Tensor:
    """What HypergraphConv.forward computes."""
    x, _, _ = edges.ends(x)
    if weight_of(conv.lin, x, bias=True).size(0) != conv.heads * conv.out_channels:
        raise Decline("the weight does not fit the layer")
    same_type(x, conv.bias)
    if not edges.is_plain(hyperedge_index):
        raise Decline("hyperedge_index is not [2, E]")
    if num_edges is None:
        num_edges = int(hyperedge_index[1].max()) + 1 if hyperedge_index.numel() else 0
    adjacency.sizes_agree(hyperedge_index, x.size(0), num_edges)
    graph = Graph.of(hyperedge_index, (x.size(0), num_edges))  # rows are hyperedges
    back = graph.T
    if hyperedge_weight is None:
        degree = back.degree.to(x.dtype)
    else:
        if hyperedge_weight.shape != (num_edges,):
            raise Decline("hyperedge_weight is not one number per hyperedge")
        per_entry = gather_rows(hyperedge_weight.to(x.dtype), graph.segment_index)
        degree = segment_reduce(per_entry, edges.sources(graph), x.size(0))
    share = torch.where(degree == 0, degree.new_zeros(()), 1.0 / degree)
    note(conv, "D H' (B H (X W')), one incidence graph")
    h = spmm(graph, conv.lin(x), reduce="mean")
    out = spmm(back, h, row_scale=share)
    return out if conv.bias is None else out + conv.bias


LAYER = Layer(
    pyg.HypergraphConv,
    fast,
    aggr=SUM,
    declines=(
        when(lambda c: c.flow != "source_to_target", "flow is target_to_source"),
        when(lambda c: c.use_attention, "use_attention=True"),
    ),
    message=as_wide_as_result,
)
