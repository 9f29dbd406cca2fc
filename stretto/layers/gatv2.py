"""GATv2Conv: the score is not linear in the features, so nothing folds; one pass makes scores, softmax and sum."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.functional import leaky_relu, linear

from stretto.graph import Graph
from stretto.layers import edges, gat
from stretto.layers.base import Decline, messages, note, weight_of
from stretto.layers.declines import same_type
from stretto.layers.edges import streaming
from stretto.layers.layer import SUM, Conv, Layer
from stretto.ops.attention import attention
from stretto.ops.edge_mlp import edge_mlp
from stretto.ops.projections import plus, projections


def fast(
    conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: Any = None
) -> Any:
    """What GATv2Conv.forward computes."""
    x_src, x_dst = edges.both_ends(x)
    weight_of(conv.lin_l, x_src, bias=True)
    weight_of(conv.lin_r, x_dst, bias=True)
    same_type(x_src, conv.att, conv.bias)
    plain = edges.graph_between(conv, edge_index, x_src, x_dst)
    if conv.lin_edge is None and edge_attr is not None:
        raise Decline("edge_attr without edge_dim")
    edge_attr = gat.edge_features(conv, plain, edge_index, edge_attr, x_src)
    gat.check_weights_wanted(edge_index, return_attention_weights)
    graph, edge_attr = gat.looped(conv, plain, edge_attr)
    parts = (conv.lin_r.weight, conv.lin_r.bias, conv.lin_l.weight, conv.lin_l.bias, conv.att)
    wanted, avoided = bool(return_attention_weights), messages(graph.num_edges, conv.heads * conv.out_channels, x_src)
    one = x_dst is x_src and not conv.share_weights
    if one and gat.whole(conv, graph, x_src, edge_attr, wanted, parts, parts[2:4]):
        note(conv, "alpha (X W'), one step", avoided=avoided)
        return gat.one_step(conv, graph, "gatv2", x_src, parts)
    x_l, x_r = _projected(conv, x_src, x_dst)
    scores = _scores(conv, graph, x_r, x_l, edge_attr)
    out, alpha = _attended(conv, graph, x_r, x_l, edge_attr, scores, wanted)
    how = "one pass" if scores is None else "scores in blocks of edges"
    note(conv, f"alpha (X W'), {how}", avoided=avoided)
    out = gat.heads_joined(conv, out)
    if conv.res is not None:
        out = out + conv.res(x_dst)
    if conv.bias is not None and not conv.concat:
        out = plus(out, conv.bias)
    return (out, (gat.edges_of(conv, graph, edge_index), alpha)) if wanted else out


def _projected(conv: Conv, x_src: Tensor, x_dst: Tensor) -> tuple[Tensor, Tensor]:
    """What the ends that send and receive give. -> [m, h, c], [n, h, c]."""
    to_left, to_right = (conv.lin_l.weight, conv.lin_l.bias), (conv.lin_r.weight, conv.lin_r.bias)
    if x_dst is x_src and conv.share_weights:
        x_l = x_r = projections(x_src, [to_left])[0]
    elif x_dst is x_src:
        x_l, x_r = projections(x_src, [to_left, to_right])
    else:
        x_l, x_r = projections(x_src, [to_left])[0], projections(x_dst, [to_right])[0]
    shape = (-1, conv.heads, conv.out_channels)
    return x_l.view(shape), x_r.view(shape)


def _attended(
    conv: Conv, graph: Graph, x_r: Tensor, x_l: Tensor, edge_attr: Tensor | None, scores: Tensor | None, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of values by attention, and its weights. scores [E, h]: where they are made already."""
    if scores is None:
        edge = None if edge_attr is None else conv.lin_edge(edge_attr).view(-1, conv.heads, conv.out_channels)
        terms: Any = (None, x_r, x_l, edge)
        form, att = "gatv2", conv.att.view(conv.heads, conv.out_channels)
    else:
        terms, form, att = (x_l, None, None, scores), "given", None
    result = attention(
        graph,
        *terms,
        form=form,
        att=att,
        negative_slope=conv.negative_slope,
        dropout=conv.dropout if conv.training else 0.0,
        return_weights=wanted,
        dropped=True,
        bias=conv.bias if conv.concat else None,
    )
    return (result[0], result[1]) if isinstance(result, tuple) else (result, None)


def _scores(conv: Conv, graph: Graph, x_r: Tensor, x_l: Tensor, edge_attr: Tensor | None) -> Tensor | None:
    """Scores att . leaky_relu(x_i + x_j + e W') [E, h] in blocks of edges, where e W' would be too large; else None."""
    heads, width = conv.heads, conv.out_channels
    if edge_attr is None or not streaming.large(graph, heads * width, x_l) or not streaming.row_by_row([conv.lin_edge]):
        return None
    att, slope = conv.att.view(heads, width), conv.negative_slope  # as it is now: backward asks again

    def score(own: Tensor, other: Tensor, edge: Tensor, att: Tensor, *to_edge: Tensor) -> Tensor:
        terms = own + other + linear(edge, *to_edge).view(-1, heads, width)
        return (leaky_relu(terms, slope) * att).sum(dim=-1)

    learnt = [att, *edges.map_of(conv.lin_edge)]
    block = streaming.block_of(graph, x_l)
    made: Tensor = edge_mlp(graph, score, x_r, x_l, edge_attr, shared=learnt, reduce="each", block=block)
    return made


LAYER = Layer(pyg.GATv2Conv, fast, aggr=SUM, local=True)
