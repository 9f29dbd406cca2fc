"""TransformerConv: scaled dot products in one pass. Edge features enter folded: q . (W_e e) is (q W_e) . e, and the sum
of alpha W_e e is W_e times the sum of alpha e, so no edge x channel array is made."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.layers import edges
from stretto.layers.base import Decline, messages, note, weight_of
from stretto.layers.layer import SUM, Layer
from stretto.ops.attention import attention
from stretto.ops.attention_layer import attention_layer, takes
from stretto.ops.projections import plus, projections
from stretto.ops.rows import all_reached


def fast(
    conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: Any = None
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
    heads, width = conv.heads, conv.out_channels
    names = ("lin_query", "lin_key", "lin_value") + (("lin_skip",) if _plain_skip(conv, x_dst) else ())
    maps = [(getattr(conv, name).weight, getattr(conv, name).bias) for name in names]
    drop = conv.dropout if conv.training else 0.0
    parts = tuple(t for pair in maps for t in pair)
    if x_dst is x_src and not wanted and edge_weight is None and _one_step(conv, graph, x_src, parts):
        note(conv, "alpha (X W_v'), one step", avoided=messages(graph.num_edges, heads * width, x_src))
        return attention_layer(graph, "dot", heads, x_src, None, parts, scale=1 / math.sqrt(width), dropout=drop)
    if x_dst is x_src:
        query, key, value, *skip = projections(x_src, maps)
    else:
        query, *skip = projections(x_dst, [maps[0], *maps[3:]])
        key, value = projections(x_src, maps[1:3])
    query, key, value = (t.view(-1, heads, width) for t in (query, key, value))
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
        scale=1 / math.sqrt(width),
        dropout=drop,
        return_weights=wanted,
        dropped=False,
    )
    results = list(found) if isinstance(found, tuple) else [found]
    out = results[0]
    note(conv, "alpha (X W_v'), one pass", avoided=messages(graph.num_edges, heads * width, x_src))
    if edge_weight is not None:
        out = edges.only_reached(graph, out + torch.einsum("nhd,hcd->nhc", results[1], edge_weight))
    out = out.reshape(-1, heads * width) if conv.concat else out.mean(dim=1)
    if conv.root_weight:
        root = skip[0] if skip else conv.lin_skip(x_dst)
        if conv.lin_beta is not None:
            beta = conv.lin_beta(torch.cat([out, root, out - root], dim=-1)).sigmoid()
            out = beta * root + (1 - beta) * out
        else:
            out = plus(out, root)
    return (out, (edge_index, results[-1])) if wanted else out


def _one_step(conv: Any, graph: Any, x: Tensor, parameters: Any) -> bool:
    """Whether the whole layer, of one set of nodes, runs as one step."""
    if len(parameters) != 8 or conv.lin_beta is not None or not (conv.concat or conv.heads == 1):
        return False
    return takes(graph, x, conv.out_channels, *parameters)


def _plain_skip(conv: Any, x: Tensor) -> bool:
    """Whether the root term is a Linear that may join the other products."""
    try:
        return bool(conv.root_weight) and weight_of(conv.lin_skip, x, bias=True) is not None
    except Decline:
        return False


def _edge_weight(conv: Any, graph: Any, edge_index: Any, edge_attr: Any, x: Tensor) -> Tensor | None:
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
