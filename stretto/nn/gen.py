"""GENConv: softmax (or another) aggregation of relu(x_j + e) + eps. Without edge features messages are rows of nodes,
and nothing of edge x channel size is made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation

from stretto.graph import Graph
from stretto.nn import edges
from stretto.nn.base import Decline, record_of
from stretto.ops import spmm
from stretto.ops.edge_softmax_sum import softmax_sum

SIMPLE = ("add", "sum", "mean", "max", "min")


def fast(conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What GENConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    graph = (edges.graph_between if edge_attr is None else edges.plain_graph)(conv, edge_index, x_src, x_dst, size)
    attr = None if edge_attr is None else edges.one_per_edge(graph, edge_attr, x_src)
    if attr is not None and (attr.dim() != 2 or (not hasattr(conv, "lin_edge") and attr.size(1) != conv.out_channels)):
        raise Decline("edge_attr does not fit the layer")
    if hasattr(conv, "lin_src"):
        x_src = conv.lin_src(x_src)
    softmax = conv.aggr_module if edges.is_stock(conv.aggr_module, SoftmaxAggregation) else None
    if softmax is not None:
        record_of(conv).plan = "softmax of relu(X_j + E) per channel, one pass"
        attr = conv.lin_edge(attr) if attr is not None and hasattr(conv, "lin_edge") else attr
        detached = not softmax.learn and softmax.semi_grad
        out = softmax_sum(graph, x_src, attr, softmax.t, act="relu", shift=conv.eps, detached=detached)
    elif attr is None:
        out = _from_nodes(conv, graph, x_src.relu() + conv.eps)
    else:
        record_of(conv).plan = "messages reduced over the cached index"
        attr = conv.lin_edge(attr) if hasattr(conv, "lin_edge") else attr
        out = _from_edges(conv, graph, (edges.at_sources(graph, x_src) + attr).relu() + conv.eps)
    if hasattr(conv, "lin_aggr_out"):
        out = conv.lin_aggr_out(out)
    if hasattr(conv, "msg_norm"):
        out = conv.msg_norm(x_src if x_dst is None else x_dst, out)
    if x_dst is not None:
        out = out + (conv.lin_dst(x_dst) if hasattr(conv, "lin_dst") else x_dst)
    return conv.mlp(out)


def _from_nodes(conv: Any, graph: Graph, message: Tensor) -> Tensor:
    """The aggregation of messages that depend on their source alone. message [m, o] -> [n, o]."""
    aggr = conv.aggr_module
    if conv.aggr in SIMPLE:
        record_of(conv).plan = f"{conv.aggr}(A, relu(X))"
        return spmm(graph, message, reduce=conv.aggr)
    if edges.is_stock(aggr, PowerMeanAggregation) and aggr.channels == 1:
        record_of(conv).plan = "power mean(A, relu(X))"
        if isinstance(aggr.p, (int, float)) and aggr.p == 1:
            return spmm(graph, message, reduce="mean")
        low, high = aggr.min_value, aggr.max_value
        mean = spmm(graph, message.clamp(min=low, max=high).pow(aggr.p), reduce="mean")
        return mean.clamp(min=low, max=high).pow(1.0 / aggr.p)
    return _from_edges(conv, graph, edges.at_sources(graph, message))


def _from_edges(conv: Any, graph: Graph, message: Tensor) -> Tensor:
    """The layer's own aggregation module over the cached index. message [E, o] -> [n, o]."""
    if conv.aggr in SIMPLE:
        return edges.reduce_edges(graph, message, conv.aggr)
    index = graph.derived("targets", lambda: graph.segment_index.long())
    return conv.aggr_module(message, index, dim_size=graph.num_rows, dim=-2)
