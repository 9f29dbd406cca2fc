"""What a layer's constructor alone decides: options with which no call of it can run fast. For accelerate(strict=True).

The fast functions decide by themselves, call by call; these tables say the same before any call, and a test holds both
to the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch_geometric.nn as pyg
from torch_geometric.nn.models.schnet import CFConv

from stretto.layers import nn_conv, pna
from stretto.layers.base import Decline
from stretto.layers.edges import SUM
from stretto.layers.gin import first_linear
from stretto.layers.hops import MOST_HOPS

SIMPLE = (*SUM, "mean", "max", "min")

# layer -> aggregations that have a fast path
AGGREGATIONS: dict[type, tuple[str, ...]] = {
    pyg.GCNConv: SUM,
    pyg.SAGEConv: SIMPLE,
    pyg.GraphConv: SIMPLE,
    pyg.GINConv: SIMPLE,
    pyg.SGConv: SUM,
    pyg.SSGConv: SUM,
    pyg.TAGConv: SUM,
    pyg.LGConv: SUM,
    pyg.APPNP: SUM,
    pyg.ChebConv: SUM,
    pyg.GCN2Conv: SUM,
    pyg.ARMAConv: SUM,
    pyg.LEConv: SUM,
    pyg.ClusterGCNConv: SUM,
    pyg.MFConv: SUM,
    pyg.GATConv: SUM,
    pyg.GATv2Conv: SUM,
    pyg.TransformerConv: SUM,
    pyg.AGNNConv: SUM,
    pyg.SuperGATConv: SUM,
    pyg.HANConv: SUM,
    pyg.HGTConv: SUM,
    pyg.HypergraphConv: SUM,
    CFConv: SUM,
    pyg.RGCNConv: SIMPLE,
    pyg.FastRGCNConv: (*SUM, "mean"),
    pyg.FiLMConv: SIMPLE,
    pyg.ResGatedGraphConv: SIMPLE,
    pyg.GINEConv: SIMPLE,
    pyg.EdgeConv: SIMPLE,
    pyg.CGConv: SIMPLE,
    pyg.NNConv: (*SUM, "mean"),  # others in blocks, where they are large: that spares memory, not time
    pyg.GMMConv: (*SUM, "mean"),
}

Option = tuple[Callable[[Any], bool], str]
HOPS: tuple[Option, ...] = (
    (lambda c: c.K < 1, "K is 0"),
    (lambda c: c.K > MOST_HOPS, f"K is above {MOST_HOPS}"),
)

# layer -> (whether it is so, the reason), in the order in which the fast function looks
OPTIONS: dict[type, tuple[Option, ...]] = {
    pyg.SGConv: (
        (lambda c: c.cached, "cached=True keeps A^K X of the first call for ever"),
        *HOPS,
    ),
    pyg.SSGConv: (
        (lambda c: c.cached, "cached=True keeps the sum of the first call for ever"),
        (lambda c: c.K < 1, "K is 0"),
    ),
    pyg.TAGConv: HOPS,
    pyg.APPNP: ((lambda c: c.dropout > 0 and c.training, "dropout on edge weights is on"),),
    pyg.ARMAConv: ((lambda c: c.num_layers < 1, "num_layers is 0"),),
    pyg.ClusterGCNConv: (
        (lambda c: not c.add_self_loops, "add_self_loops=False: stock reads the diagonal of the user's own loops"),
        (lambda c: c.flow != "source_to_target", "flow target_to_source: stock divides by the other end's degree"),
    ),
    pyg.HANConv: ((lambda c: c.flow != "source_to_target", "flow target_to_source between types of nodes"),),
    pyg.HGTConv: ((lambda c: c.flow != "source_to_target", "flow target_to_source between types of nodes"),),
    pyg.HypergraphConv: ((lambda c: c.use_attention, "use_attention=True, or hyperedge_index is not [2, E]"),),
    pyg.GMMConv: ((lambda c: c.separate_gaussians, "separate_gaussians=True"),),
    pyg.EdgeConv: ((lambda c: first_linear(c.nn)[0] is None, "nn does not start with a Linear"),),
}

# layer -> a part of its fast function that needs no input, and declines
PARTS: dict[type, Callable[[Any], Any]] = {
    pyg.PNAConv: pna._aggregations,
    pyg.NNConv: lambda conv: nn_conv._ending_in_linear(conv.nn),
}


def why_declined(conv: Any, kind: type) -> str | None:
    """Why no call of a layer of the stock class `kind` can run fast, or None where that depends on its input."""
    if kind in AGGREGATIONS and conv.aggr not in AGGREGATIONS[kind]:
        return f"aggr is {conv.aggr}"
    for holds, reason in OPTIONS.get(kind, ()):
        if holds(conv):
            return reason
    try:
        PARTS.get(kind, lambda _: None)(conv)
    except Decline as decline:
        return decline.reason
    return None
