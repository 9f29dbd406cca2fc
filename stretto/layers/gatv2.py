"""GATv2Conv: the score is not linear in the features, so nothing folds; one pass makes scores, softmax and sum."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import leaky_relu, linear

from stretto.graph import Graph
from stretto.layers import edges, gat, streaming
from stretto.layers.base import Decline, note_attention, weight_of
from stretto.layers.declines import same_type
from stretto.ops.attention import attention
from stretto.ops.attention_layer import attention_layer
from stretto.ops.edge_mlp import edge_mlp
from stretto.ops.projections import plus, projections


def fast(
    conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: Any = None
) -> Any:
    """What GATv2Conv.forward computes."""
    x_src, x_dst, own = edges.ends(x)
    if x_dst is None:
        raise Decline("x has no destination part")
    edges.check_aggr(conv, *edges.SUM)
    weight_of(conv.lin_l, x_src, bias=True)
    weight_of(conv.lin_r, x_dst, bias=True)
    same_type(x_src, conv.att, conv.bias)
    given = edges.graph_between(conv, edge_index, x_src, x_dst)
    if conv.lin_edge is None and edge_attr is not None:
        raise Decline("edge_attr without edge_dim")
    edge_attr = gat.edge_features(conv, given, edge_index, edge_attr, x_src)
    gat.check_weights_wanted(edge_index, return_attention_weights)
    graph, edge_attr = gat.looped(conv, given, edge_attr)
    heads, width = conv.heads, conv.out_channels
    drop = conv.dropout if conv.training else 0.0
    parts = (conv.lin_r.weight, conv.lin_r.bias, conv.lin_l.weight, conv.lin_l.bias, conv.att)
    wanted, values = bool(return_attention_weights), parts[2:4]
    if own and not conv.share_weights and gat.whole(conv, graph, x_src, edge_attr, wanted, parts, values):
        note_attention(conv, "alpha (X W'), one step", graph.num_edges, heads * width, x_src)
        return attention_layer(graph, "gatv2", heads, x_src, conv.bias, parts, slope=conv.negative_slope, dropout=drop)
    to_left, to_right = (conv.lin_l.weight, conv.lin_l.bias), (conv.lin_r.weight, conv.lin_r.bias)
    if own and conv.share_weights:
        x_l = x_r = projections(x_src, [to_left])[0]
    elif own:
        x_l, x_r = projections(x_src, [to_left, to_right])
    else:
        x_l, x_r = projections(x_src, [to_left])[0], projections(x_dst, [to_right])[0]
    x_l, x_r = x_l.view(-1, heads, width), x_r.view(-1, heads, width)
    scores = _scores(conv, graph, x_r, x_l, edge_attr)
    if scores is None:
        edge = None if edge_attr is None else conv.lin_edge(edge_attr).view(-1, heads, width)
        terms: Any = (None, x_r, x_l, edge)
        form, att = "gatv2", conv.att.view(heads, width)
    else:
        terms, form, att = (x_l, None, None, scores), "given", None
    found = attention(
        graph,
        *terms,
        form=form,
        att=att,
        negative_slope=conv.negative_slope,
        dropout=drop,
        return_weights=wanted,
        dropped=True,
        bias=conv.bias if conv.concat else None,
    )
    out, alpha = found if isinstance(found, tuple) else (found, None)
    plan = "alpha (X W'), one pass" if scores is None else "alpha (X W'), scores in blocks of edges"
    note_attention(conv, plan, graph.num_edges, heads * width, x_src)
    if out.dim() == 3:
        out = out.reshape(-1, heads * width) if conv.concat else out.mean(dim=1)
    if conv.res is not None:
        out = out + conv.res(x_dst)
    if conv.bias is not None and not conv.concat:
        out = plus(out, conv.bias)
    return (out, (gat.edges_of(conv, graph, edge_index), alpha)) if wanted else out


def _scores(conv: Any, graph: Graph, x_r: Tensor, x_l: Tensor, edge_attr: Tensor | None) -> Tensor | None:
    """att . leaky_relu(x_i + x_j + e W'), where e W' is too large to be made: in blocks of edges. -> [E, h] or None."""
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
