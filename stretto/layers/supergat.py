"""SuperGATConv: one number per edge and head from a sampled product, then softmax and sum in one pass.

The self-supervised part of training (sampling edges and non-edges) is stock's own code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.layers import edges
from stretto.layers.base import note, weight_of
from stretto.layers.declines import same_type
from stretto.layers.layer import SUM, Conv, Layer
from stretto.ops import sddmm
from stretto.ops.attention import attention


def fast(
    conv: Conv, x: Tensor, edge_index: Any, neg_edge_index: Tensor | None = None, batch: Tensor | None = None
) -> Tensor:
    """What SuperGATConv.forward computes."""
    x, _, _ = edges.ends(x)
    weight_of(conv.lin, x, bias=True)
    same_type(x, conv.bias, *((conv.att_l, conv.att_r) if conv.attention_type == "MX" else ()))
    graph = edges.plain_graph(conv, edge_index, x, x)
    if conv.add_self_loops:
        graph = edges.with_loops(conv, graph, x.size(0))
    heads, width = conv.heads, conv.out_channels
    h = conv.lin(x).view(-1, heads, width)
    note(conv, "alpha (X W'), scores by a sampled product")
    score = sddmm(graph, h, h)
    if conv.attention_type == "MX":
        right, left = (h * conv.att_l).sum(-1), (h * conv.att_r).sum(-1)
        score = sddmm(graph, left, right, op="add") * score.sigmoid()
    else:
        score = score / math.sqrt(width)
    score = torch.nn.functional.leaky_relu(score, conv.negative_slope)
    out = attention(graph, h, edge=score, form="given", dropout=conv.dropout if conv.training else 0.0)
    assert isinstance(out, Tensor)
    if conv.training:
        pairs = graph.edge_index.flip(0) if conv.flow == "target_to_source" else graph.edge_index
        _supervise(conv, h, pairs if conv.add_self_loops else edge_index, neg_edge_index, batch)
    out = out.reshape(-1, heads * width) if conv.concat else out.mean(dim=1)
    return out if conv.bias is None else out + conv.bias


def _supervise(conv: Conv, h: Tensor, edge_index: Tensor, negative: Tensor | None, batch: Tensor | None) -> None:
    """Logits of edges and of non-edges, kept on the layer for get_attention_loss()."""
    positive = conv.positive_sampling(edge_index)
    logits = _logits(conv, h, positive)
    if negative is None:
        negative = conv.negative_sampling(edge_index, h.size(0), batch)
    conv.att_x = torch.cat([logits, _logits(conv, h, negative)], dim=0)
    conv.att_y = conv.att_x.new_zeros(conv.att_x.size(0))
    conv.att_y[: positive.size(1)] = 1.0


def _logits(conv: Conv, h: Tensor, pairs: Tensor) -> Tensor:
    result: Tensor = conv.get_attention(
        edge_index_i=pairs[1], x_i=h[pairs[1]], x_j=h[pairs[0]], num_nodes=h.size(0), return_logits=True
    )
    return result


LAYER = Layer(pyg.SuperGATConv, fast, aggr=SUM, message=lambda c, i, o: c.heads * c.out_channels)
