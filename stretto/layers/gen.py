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
from stretto.layers.layer import Conv, Layer
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


def fast(conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What GENConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(conv, edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    graph = (edges.graph_between if edge_attr is None else edges.plain_graph)(conv, edge_index, x_src, x_dst, size)
    attr = None if edge_attr is None else edges.one_per_edge(graph, edge_attr, x_src)
    to_edge = _module(conv, "lin_edge")
    if attr is not None and (attr.dim() != 2 or (to_edge is None and attr.size(1) != conv.out_channels)):
        raise Decline("edge_attr does not fit the layer")
    x_src = _through(conv, "lin_src", x_src)
    out = _through(conv, "lin_aggr_out", _aggregated(conv, graph, x_src, attr))
    if _module(conv, "msg_norm") is not None:
        out = conv.msg_norm(x_src if x_dst is None else x_dst, out)
    if x_dst is not None:
        out = out + _through(conv, "lin_dst", x_dst)
    result: Tensor = conv.mlp(out)
    return result


def _module(conv: Conv, name: str) -> Any:
    """A module that the layer has or has not, as its options want it."""
    return getattr(conv, name, None)


def _through(conv: Conv, name: str, x: Tensor) -> Tensor:
    """Take x through a module of the layer, if there is one."""
    module = _module(conv, name)
    return x if module is None else module(x)


def _aggregated(conv: Conv, graph: Graph, x: Tensor, attr: Tensor | None) -> Tensor:
    """The aggregation of relu(x_j + e) + eps, in the best way there is. -> [n, o]."""
    if attr is not None and streaming.large(graph, conv.out_channels, x):
        out = _in_blocks(conv, graph, x, attr)
        if out is not None:
            note(conv, f"{conv.aggr} of relu(X_j + E), messages in blocks")
            return out
    attr = None if attr is None else _through(conv, "lin_edge", attr)
    if edges.is_stock(conv.aggr_module, SoftmaxAggregation):
        note(conv, "softmax of relu(X_j + E) per channel, one pass")
        softmax = conv.aggr_module
        detached = not softmax.learn and softmax.semi_grad
        return softmax_sum(graph, x, attr, softmax.t, act="relu", shift=conv.eps, detached=detached)
    if attr is None:
        return _from_nodes(conv, graph, x.relu() + conv.eps)
    note(conv, "messages reduced over the cached index", builds=True)
    return _from_edges(conv, graph, (edges.at_sources(graph, x) + attr).relu() + conv.eps)


def _in_blocks(conv: Conv, graph: Graph, x: Tensor, attr: Tensor) -> Tensor | None:
    """The aggregation of relu(x_j + e [W']) + eps, made in blocks of edges; None where it must see all edges."""
    lin = _module(conv, "lin_edge")
    if lin is not None and not streaming.row_by_row([lin]):
        return None
    aggr, eps = conv.aggr_module, conv.eps  # as it is now: backward asks again
    to_edge = [] if lin is None else edges.map_of(lin)

    def message(other: Tensor, edge: Tensor, *to_edge: Tensor) -> Tensor:
        result: Tensor = (other + (linear(edge, *to_edge) if to_edge else edge)).relu() + eps
        return result

    def reduced(function: Any, reduce: tuple[str, ...], row: Tensor | None = None, more: Any = ()) -> list[Tensor]:
        return streaming.reduced(
            graph, function, row, x, attr, reduce, width=x.size(1), parameters=more, shared=to_edge, steady=True
        )[0]

    several = _several(aggr)
    if conv.aggr in SIMPLE:
        return reduced(message, ("sum" if conv.aggr == "add" else conv.aggr,))[0]
    if several is not None:
        result: Tensor | None = aggr.combine(reduced(message, tuple(several)))
        return result
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
    result: Tensor = (out / torch.where(has_edges(graph, torch.bool), total, 1)).to(x.dtype)
    return result


def _power_mean(aggr: Any, mean: Any) -> Tensor:
    """PowerMeanAggregation; mean(power, learnt): the mean over neighbours of power(message)."""
    p = aggr.p.view(-1, aggr.channels) if isinstance(aggr.p, Tensor) else aggr.p
    if isinstance(p, (int, float)) and p == 1:
        plain: Tensor = mean(lambda value: value, [])
        return plain
    low, high = aggr.min_value, aggr.max_value
    found = mean(lambda value: value.clamp(min=low, max=high).pow(p), [p] if isinstance(p, Tensor) else [])
    result: Tensor = found.clamp(min=low, max=high).pow(1.0 / p)
    return result


def _several(aggr: Any) -> list[str] | None:
    """The names of a list of aggregations; None if one is not simple or there twice, or somebody watches."""
    if not edges.is_stock(aggr, MultiAggregation) or hooked(*aggr.modules()):
        return None
    names = [next((name for kind, name in SEVERAL.items() if edges.is_stock(m, kind)), "") for m in aggr.aggrs]
    return names if "" not in names and len(set(names)) == len(names) else None  # stock mixes up what it has twice


def _from_nodes(conv: Conv, graph: Graph, message: Tensor) -> Tensor:
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
        result: Tensor = aggr.combine([spmm(graph, message, reduce=name) for name in several])
        return result
    note(conv, "messages reduced over the cached index", builds=True)
    return _from_edges(conv, graph, edges.at_sources(graph, message))


def _from_edges(conv: Conv, graph: Graph, message: Tensor) -> Tensor:
    """The layer's own aggregation module over the cached index. message [E, o] -> [n, o]."""
    if conv.aggr in SIMPLE:
        return edges.reduce_edges(graph, message, conv.aggr)
    index = graph.derived("targets", lambda: graph.segment_index.long())
    result: Tensor = conv.aggr_module(message, index, dim_size=graph.num_rows, dim=-2)
    return result


LAYER = Layer(pyg.GENConv, fast, message=lambda c, i, o: c.out_channels)
