"""AGNNConv: softmax of beta * cosine over neighbours, in one pass over unit rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.layers import edges
from stretto.layers.base import record_of
from stretto.layers.declines import same_type
from stretto.ops.attention import cosine_attention


def fast(conv: Any, x: Tensor, edge_index: Any) -> Tensor:
    """What AGNNConv.forward computes."""
    x, _, _ = edges.ends(x)
    edges.check_aggr(conv, *edges.SUM)
    same_type(x, conv.beta)
    graph = edges.graph_between(conv, edge_index, x, x)
    if conv.add_self_loops:
        graph = edges.with_loops(conv, graph, x.size(0))
    record_of(conv).plan = "alpha X, one pass"
    out = cosine_attention(graph, x, conv.beta)
    assert isinstance(out, Tensor)
    return out
