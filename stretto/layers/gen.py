"""GENConv: softmax (or another) aggregation of relu(x_j + e) + eps. Without edge features messages are rows of nodes,
and nothing of edge x channel size is made; with them, large messages are made in blocks of edges."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.functional import linear
from torch_geometric.nn import aggr as stock
from torch_geometric.nn.aggr import MultiAggregation, PowerMeanAggregation, SoftmaxAggregation

from stretto.graph import Graph
from stretto.kernels import accumulate_type
from stretto.layers import edges
from stretto.layers.base import Decline, hooked, note
from stretto.layers.edges import streaming
from stretto.layers.layer import Layer
from stretto.ops import spmm
from stretto.ops.edge_softmax_sum import softmax_sum
from stretto.ops.rows import has_edges

SIMPLE = ("add", "sum", "mean", "max", "min")
SEVERAL = {  # what may stand in a list of aggregations, each reduced by itself
    stock.SumAggregation: "sum",
    stock.MeanAggregation: "mean",
    stock.MaxAggregation: "max",
    stock.MinAggregation: "min",
}


def fast(conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What GENConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(conv, edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    graph = (edges.graph_between if edge_attr is None else edges.plain_graph)(conv, edge_index, x_src, x_dst, size)
    attr = None if edge_attr is None else edges.one_per_edge(graph, edge_attr, x_src)
    if attr is not None and (attr.dim() != 2 or (not hasattr(conv, "lin_edge") and attr.size(1) != conv.out_channels)):
        raise Decline("edge_attr does not fit the layer")
    if hasattr(conv, "lin_src"):
        x_src = conv.lin_src(x_src)
    softmax = conv.aggr_module if edges.is_stock(conv.aggr_module, SoftmaxAggregation) else None
    large = attr is not None and streaming.large(graph, conv.out_channels, x_src)
    out = _in_blocks(conv, graph, x_src, attr) if large and attr is not None else None
    if out is not None:
        note(conv, f"{conv.aggr} of relu(X_j + E), messages in blocks")
    elif softmax is not None:
        note(conv, "softmax of relu(X_j + E) per channel, one pass")
        attr = conv.lin_edge(attr) if attr is not None and hasattr(conv, "lin_edge") else attr
        detached = not softmax.learn and softmax.semi_grad
        out = softmax_sum(graph, x_src, attr, softmax.t, act="relu", shift=conv.eps, detached=detached)
    elif attr is None:
        out = _from_nodes(conv, graph, x_src.relu() + conv.eps)
    else:
        note(conv, "messages reduced over the cached index", builds=True)
        attr = conv.lin_edge(attr) if hasattr(conv, "lin_edge") else attr
        out = _from_edges(conv, graph, (edges.at_sources(graph, x_src) + attr).relu() + conv.eps)
    if hasattr(conv, "lin_aggr_out"):
        out = conv.lin_aggr_out(out)
    if hasattr(conv, "msg_norm"):
        out = conv.msg_norm(x_src if x_dst is None else x_dst, out)
    if x_dst is not None:
        out = out + (conv.lin_dst(x_dst) if hasattr(conv, "lin_dst") else x_dst)
    return conv.mlp(out)


def _in_blocks(conv: Any, graph: Graph, x: Tensor, attr: Tensor) -> Tensor | None:
    """The aggregation of relu(x_j + e [W']) + eps, made in blocks of edges; None where it must see all edges."""
    lin = getattr(conv, "lin_edge", None)
    if lin is not None and not streaming.row_by_row([lin]):
        return None
    aggr, eps = conv.aggr_module, conv.eps  # as it is now: backward asks again
    to_edge = [] if lin is None else edges.map_of(lin)

    def message(other: Tensor, edge: Tensor, *to_edge: Tensor) -> Tensor:
        return (other + (linear(edge, *to_edge) if to_edge else edge)).relu() + eps

    def reduced(function: Any, reduce: tuple[str, ...], row: Tensor | None = None, more: Any = ()) -> list[Tensor]:
        return streaming.reduced(
            graph, function, row, x, attr, reduce, width=x.size(1), parameters=more, shared=to_edge, steady=True
        )[0]

    several = _several(aggr)
    if conv.aggr in SIMPLE:
        return reduced(message, ("sum" if conv.aggr == "add" else conv.aggr,))[0]
    if several is not None:
        return aggr.combine(reduced(message, tuple(several)))
    if edges.is_stock(aggr, PowerMeanAggregation):
        return _power_mean(
            aggr, lambda power, more: reduced(lambda *ends: power(message(*ends)), ("mean",), None, more)[0]
        )
    if edges.is_stock(aggr, SoftmaxAggregation):
        return _softmax(aggr, graph, x, message, reduced)
    return None


def _softmax(aggr: Any, graph: Graph, x: Tensor, message: Any, reduced: Any) -> Tensor:
    """SoftmaxAggregation in two passes over blocks: the largest score of each row and channel, then both sums."""
    heat = aggr.t.view(-1, aggr.channels) if isinstance(aggr.t, Tensor) else aggr.t
    learnt = [heat] if isinstance(heat, Tensor) else []
    acc, steady = accumulate_type(x.dtype), not aggr.learn and aggr.semi_grad
    with torch.no_grad():
        (most,) = reduced(lambda *ends: message(*ends).to(acc) * heat, ("max",))

    def weighed(top: Tensor, *ends: Tensor) -> Tensor:
        value = message(*ends).to(acc)
        weight = (value * heat - top).exp()
        weight = weight.detach() if steady else weight
        return torch.cat([weight, weight * value], dim=1)

    (sums,) = reduced(weighed, ("sum",), most, learnt)
    total, out = sums.chunk(2, dim=1)
    return (out / torch.where(has_edges(graph, torch.bool), total, 1)).to(x.dtype)


def _power_mean(aggr: Any, mean: Any) -> Tensor:
    """PowerMeanAggregation; mean(power, learnt): the mean over neighbours of power(message)."""
    p = aggr.p.view(-1, aggr.channels) if isinstance(aggr.p, Tensor) else aggr.p
    if isinstance(p, (int, float)) and p == 1:
        return mean(lambda value: value, [])
    low, high = aggr.min_value, aggr.max_value
    found = mean(lambda value: value.clamp(min=low, max=high).pow(p), [p] if isinstance(p, Tensor) else [])
    return found.clamp(min=low, max=high).pow(1.0 / p)


def _several(aggr: Any) -> list[str] | None:
    """The names of a list of aggregations; None if one is not simple or there twice, or somebody watches."""
    if not edges.is_stock(aggr, MultiAggregation) or hooked(*aggr.modules()):
        return None
    names = [next((name for kind, name in SEVERAL.items() if edges.is_stock(m, kind)), "") for m in aggr.aggrs]
    return names if "" not in names and len(set(names)) == len(names) else None  # stock mixes up what it has twice


def _from_nodes(conv: Any, graph: Graph, message: Tensor) -> Tensor:
    """The aggregation of messages that depend on their source alone. message [m, o] -> [n, o]."""
    aggr = conv.aggr_module
    if conv.aggr in SIMPLE:
        note(conv, f"{conv.aggr}(A, relu(X))")
        return spmm(graph, message, reduce=conv.aggr)
    if edges.is_stock(aggr, PowerMeanAggregation) and aggr.channels == 1:
        note(conv, "power mean(A, relu(X))")
        return _power_mean(aggr, lambda power, _: spmm(graph, power(message), reduce="mean"))
    several = _several(aggr)
    if several is not None:
        note(conv, f"{', '.join(several)}(A, relu(X))")
        return aggr.combine([spmm(graph, message, reduce=name) for name in several])
    note(conv, "messages reduced over the cached index", builds=True)
    return _from_edges(conv, graph, edges.at_sources(graph, message))


def _from_edges(conv: Any, graph: Graph, message: Tensor) -> Tensor:
    """The layer's own aggregation module over the cached index. message [E, o] -> [n, o]."""
    if conv.aggr in SIMPLE:
        return edges.reduce_edges(graph, message, conv.aggr)
    index = graph.derived("targets", lambda: graph.segment_index.long())
    return conv.aggr_module(message, index, dim_size=graph.num_rows, dim=-2)


LAYER = Layer(pyg.GENConv, fast, message=lambda c, i, o: c.out_channels)
