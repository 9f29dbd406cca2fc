"""ClusterGCNConv: the mean over neighbours and self, the own row counted (1 + lambda) times, and a root term."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Adjacency, linear
from stretto.layers import edges
from stretto.layers.base import Decline, note_plan, weight_of
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_x, when
from stretto.layers.sage import WITH_OWN_ROOT


def fast(conv: Conv, x: Tensor, edge_index: Any) -> Tensor:
    """What ClusterGCNConv.forward computes."""
    x, _, _ = edges.ends(x)
    kind = torch.get_default_dtype()  # in which stock counts degrees, whatever the type of x
    if kind != torch.float32 and (kind, x.dtype) != (torch.float64, torch.float64):
        raise Decline(f"stock counts degrees in the default type, which is {kind}, and the input is {x.dtype}")
    weight, root_weight = weight_of(conv.lin_out, x, bias=True), weight_of(conv.lin_root, x, bias=True)
    graph = edges.plain_graph(conv, edge_index, x, x).with_self_loops
    share = graph.mean_scale(kind)

    def weights() -> Tensor:
        source, target = graph.edge_index
        weight = share[target]
        weight[source == target] += conv.diag_lambda * share
        return weight.to(x.dtype)

    if conv.diag_lambda == 0:
        adj = Adjacency(graph, share)
    else:
        adj = Adjacency(graph, weight=graph.derived(("cluster", conv.diag_lambda, x.dtype, kind), weights))
    tensors = {"X": x, "W": weight, "V": root_weight}
    out = linear(WITH_OWN_ROOT, tensors, {"A": adj}, bias=conv.lin_out.bias, note=note_plan(conv))
    if conv.lin_root.bias is not None:
        result: Tensor = out + conv.lin_root.bias
        return result
    return out


LAYER = Layer(
    pyg.ClusterGCNConv,
    fast,
    aggr=SUM,
    declines=(
        when(lambda c: not c.add_self_loops, "add_self_loops=False: stock reads the diagonal of the user's own loops"),
        when(
            lambda c: c.flow != "source_to_target",
            "flow target_to_source: stock divides by the other end's degree",
        ),
    ),
    message=as_wide_as_x,
    copies=True,
)
