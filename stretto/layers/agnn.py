"""AGNNConv: softmax of beta * cosine over neighbours, in one pass over unit rows."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from stretto.layers import edges
from stretto.layers.base import note
from stretto.layers.declines import same_type
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_x
from stretto.ops.attention import cosine_attention


def fast(conv: Conv, x: Tensor, edge_index: Any) -> Tensor:
    """What AGNNConv.forward computes."""
    x, _, _ = edges.ends(x)
    same_type(x, conv.beta)
    graph = edges.graph_between(conv, edge_index, x, x)
    if conv.add_self_loops:
        graph = edges.with_loops(conv, graph, x.size(0))
    note(conv, "alpha X, one pass")
    out = cosine_attention(graph, x, conv.beta)
    assert isinstance(out, Tensor)
    return out


LAYER = Layer(pyg.AGNNConv, fast, aggr=SUM, message=as_wide_as_x)
