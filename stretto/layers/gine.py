"""GINEConv: nn((1 + eps) x_i + sum relu(x_j + e))."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.functional import linear

from stretto.graph import Graph
from stretto.layers import edges
from stretto.layers.base import Decline, note, weight_of
from stretto.layers.declines import same_type
from stretto.layers.edges import streaming
from stretto.layers.edges.chains import chain_of
from stretto.layers.edges.pairs import features_of
from stretto.layers.gin import network, number
from stretto.layers.layer import SIMPLE, Conv, Layer, as_wide_as_x
from stretto.ops.edge_layer import Chain, Form, edge_layer, takes, width_after
from stretto.ops.edge_messages import edge_messages
from stretto.ops.edge_packed import linear_of_data, rooted_messages


def fast(conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What GINEConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(conv, edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    reduce = edges.reduction(conv)
    same_type(x_src, conv.eps)
    graph = edges.plain_graph(conv, edge_index, x_src, x_dst, size)
    attr = edges.one_per_edge(graph, edge_attr, x_src)
    if attr.dim() != 2:
        raise Decline("edge_attr is not a matrix")
    width = attr.size(1) if conv.lin is None else weight_of(conv.lin, attr, bias=True).size(0)
    if width != x_src.size(1) or (x_dst is not None and x_dst.size(1) != width):
        raise Decline("x and edge_attr differ in width")
    if reduce not in ("sum", "mean") or (conv.lin is not None and streaming.large(graph, width, x_src)):
        return _rooted(conv, _from_edges(conv, graph, x_src, attr, reduce), x_dst)
    note(conv, "nn(sum relu(X_j + E) + c X), messages made and summed in one pass")
    if reduce == "sum" and x_dst is x_src and not conv.eps.requires_grad:
        return _square(conv, graph, x_src, attr)
    attr = attr if conv.lin is None else conv.lin(attr)
    return _rooted(conv, edge_messages(graph, None, x_src, attr, act="relu", reduce=reduce), x_dst)


def _rooted(conv: Conv, out: Tensor, x_dst: Tensor | None) -> Tensor:
    """The network, of what messages come to and a node's own row."""
    return network(conv.nn, out if x_dst is None else out + (1 + conv.eps) * x_dst)


def _from_edges(conv: Conv, graph: Graph, x: Tensor, attr: Tensor, reduce: str) -> Tensor:
    """What messages come to that are made on edges. -> [n, k]."""
    (out,), how = streaming.reduced(
        graph,
        lambda other, edge, *to_edge: (other + (linear(edge, *to_edge) if to_edge else edge)).relu(),
        None,
        x,
        attr,
        (reduce,),
        width=x.size(1),
        parameters=(),
        shared=() if conv.lin is None else edges.map_of(conv.lin),
        steady=conv.lin is None or streaming.row_by_row([conv.lin]),
    )
    edge = "E" if conv.lin is None else "E W'"
    note(conv, f"nn({reduce} relu(X_j + {edge}) + c X), messages {how}", builds=how.builds)
    return out


def _square(conv: Conv, graph: Graph, x: Tensor, attr: Tensor) -> Tensor:
    """The layer where one set of nodes sends and receives, with the root in the sum of messages."""
    scale = 1.0 + number(conv.eps)
    made = _at_once(conv, graph, x, attr, scale)
    if made is not None:
        return made
    features = None if conv.lin is None else features_of(graph, attr)
    if features is None:
        attr = attr if conv.lin is None else conv.lin(attr)
        return network(conv.nn, rooted_messages(graph, x, attr, scale, act="relu"))
    attr = linear_of_data(features.data, conv.lin.weight, conv.lin.bias)
    return network(conv.nn, rooted_messages(graph, x, attr, scale, features.pairs, act="relu"))


def _at_once(conv: Conv, graph: Graph, x: Tensor, attr: Tensor, scale: float) -> Tensor | None:
    """The whole layer as one step, where it is small and its networks are Linears and ReLUs; else None."""
    edge = Chain() if conv.lin is None else chain_of(conv.lin)
    after = chain_of(conv.nn)
    if edge is None or after is None or not takes(graph, x, attr, edge, after):
        return None
    if width_after(edge, attr.size(1)) != x.size(1) or width_after(after, x.size(1)) is None:
        return None
    found = None if conv.lin is None else features_of(graph, attr)
    pairs, rows = (None, attr) if found is None else (found.pairs, found.attr)
    return edge_layer(graph, x, rows, Chain(), edge, after, Form("relu", scale, pairs))


LAYER = Layer(pyg.GINEConv, fast, aggr=SIMPLE, message=as_wide_as_x, local=True)
