"""TransformerConv: scaled dot products in one pass. Edge features enter folded: q . (W_e e) is (q W_e) . e, and the sum
of alpha W_e e is W_e times the sum of alpha e, so no edge x channel array is made."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.graph import Graph
from stretto.layers import edges
from stretto.layers.base import Decline, messages, note, weight_of
from stretto.layers.layer import SUM, Conv, Layer
from stretto.ops.attention import attention
from stretto.ops.attention_layer import attention_layer, takes
from stretto.ops.projections import plus, projections
from stretto.ops.rows import all_reached


def fast(
    conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: Any = None
) -> Any:
    """What TransformerConv.forward computes."""
    x_src, x_dst = edges.both_ends(x)
    for linear, end in ((conv.lin_query, x_dst), (conv.lin_key, x_src), (conv.lin_value, x_src)):
        weight_of(linear, end, bias=True)
    graph = edges.graph_between(conv, edge_index, x_src, x_dst)
    wanted = isinstance(return_attention_weights, bool)
    if wanted and not edges.is_plain(edge_index):
        raise Decline("return_attention_weights with a sparse matrix")
    edge_weight = _edge_weight(conv, graph, edge_index, edge_attr, x_src)
    linears = [conv.lin_query, conv.lin_key, conv.lin_value, *([conv.lin_skip] if _plain_skip(conv, x_dst) else [])]
    maps = [(linear.weight, linear.bias) for linear in linears]
    parts = tuple(t for pair in maps for t in pair)
    avoided = messages(graph.num_edges, conv.heads * conv.out_channels, x_src)
    if x_dst is x_src and not wanted and edge_weight is None and _one_step(conv, graph, x_src, parts):
        note(conv, "alpha (X W_v'), one step", avoided=avoided)
        options = {"scale": 1 / math.sqrt(conv.out_channels), "dropout": conv.dropout if conv.training else 0.0}
        return attention_layer(graph, "dot", conv.heads, x_src, None, parts, **options)
    query, key, value, *skip = _projected(x_src, x_dst, maps)
    out, alpha = _attended(conv, graph, query, key, value, edge_attr, edge_weight, wanted)
    note(conv, "alpha (X W_v'), one pass", avoided=avoided)
    out = out.flatten(1) if conv.concat else out.mean(dim=1)
    if conv.root_weight:
        out = _rooted(conv, out, skip[0] if skip else conv.lin_skip(x_dst))
    return (out, (edge_index, alpha)) if wanted else out


def _projected(x_src: Tensor, x_dst: Tensor, maps: Any) -> list[Tensor]:
    """Query, key, value, and the root term where it is among the maps."""
    if x_dst is x_src:
        return list(projections(x_src, maps))
    query, *skip = projections(x_dst, [maps[0], *maps[3:]])
    return [query, *projections(x_src, maps[1:3]), *skip]


def _attended(
    conv: Conv,
    graph: Graph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    wanted: bool,
) -> tuple[Tensor, Tensor | None]:
    """The sum of values, and of edge features, by attention; and its weights where they are wanted."""
    query, key, value = (t.view(-1, conv.heads, conv.out_channels) for t in (query, key, value))
    folded = None
    if edge_weight is not None:
        known = all_reached(graph) or edges.seems_finite(query)
        folded = query if known else edges.only_read(graph, query, target=True)
        folded = torch.einsum("nhc,hcd->nhd", folded, edge_weight)
    found: Any = attention(
        graph,
        value,
        query,
        key,
        form="dot",
        attr=None if edge_weight is None else edge_attr,
        query=folded,
        scale=1 / math.sqrt(conv.out_channels),
        dropout=conv.dropout if conv.training else 0.0,
        return_weights=wanted,
        dropped=False,
    )
    out, *others = found if isinstance(found, tuple) else (found,)
    if edge_weight is not None:
        out = edges.only_reached(graph, out + torch.einsum("nhd,hcd->nhc", others[0], edge_weight))
    return out, others[-1] if wanted else None


def _rooted(conv: Conv, out: Tensor, root: Tensor) -> Tensor:
    """The result with the root term, gated where the layer gates it."""
    if conv.lin_beta is None:
        return plus(out, root)
    beta = conv.lin_beta(torch.cat([out, root, out - root], dim=-1)).sigmoid()
    gated: Tensor = beta * root + (1 - beta) * out
    return gated


def _one_step(conv: Conv, graph: Any, x: Tensor, parameters: Any) -> bool:
    """Whether the whole layer, of one set of nodes, runs as one step."""
    if len(parameters) != 8 or conv.lin_beta is not None or not (conv.concat or conv.heads == 1):
        return False
    return takes(graph, x, conv.out_channels, *parameters)


def _plain_skip(conv: Conv, x: Tensor) -> bool:
    """Whether the root term is a Linear that may join the other products."""
    try:
        return bool(conv.root_weight) and weight_of(conv.lin_skip, x, bias=True) is not None
    except Decline:
        return False


def _edge_weight(conv: Conv, graph: Any, edge_index: Any, edge_attr: Any, x: Tensor) -> Tensor | None:
    """The weight of the edge features [h, c, d], None if the layer has none, or Decline."""
    if conv.lin_edge is None:
        if edge_attr is not None:
            raise Decline("edge_attr without edge_dim")
        return None
    if not edges.is_plain(edge_index) or edge_attr is None:
        raise Decline("edge_dim without edge_attr, or with a sparse matrix")
    found = edges.one_per_edge(graph, edge_attr, x)
    if found.dim() != 2 or conv.lin_edge.bias is not None:
        raise Decline("edge_attr is not a matrix, or its Linear has a bias")
    edges.no_infinity(found)
    return weight_of(conv.lin_edge, found).view(conv.heads, conv.out_channels, -1)


LAYER = Layer(pyg.TransformerConv, fast, aggr=SUM)
