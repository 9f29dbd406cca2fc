"""GATEConv, the first layer of AttentiveFP: GAT whose source gives a_l . leaky_relu(W1 [x_j, e]) to the score.

W1 acts on x_j once a node and on e once an edge; what is left on an edge is made in blocks once edges are many, so one
number an edge is all that is kept. W2 acts on nodes, before the weighted sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models.attentive_fp import GATEConv

from stretto.layers import edges
from stretto.layers.base import Decline, messages, note, weight_of
from stretto.layers.declines import same_type
from stretto.layers.edges import streaming
from stretto.layers.layer import SUM, Conv, Layer
from stretto.ops.attention import attention
from stretto.ops.dense import dense, plus_dense
from stretto.ops.projections import projections

SLOPE = 0.01  # of both leaky_relu, torch's default


def fast(conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor) -> Tensor:
    """What GATEConv.forward computes."""
    x_src, x_dst = edges.both_ends(x)
    same_type(x_src, conv.att_l, conv.att_r, conv.bias)
    graph = edges.plain_graph(conv, edge_index, x_src, x_dst)
    attr = edges.one_per_edge(graph, edge_attr, x_src)
    if attr.dim() != 2 or x_dst.size(1) != conv.att_r.size(1):
        raise Decline("x or edge_attr does not fit the layer")
    of_nodes, of_edges = edges.split_weight(conv.lin1, x_src, x_src.size(1), attr.size(1))
    if not (edges.seems_finite(x_src) and (x_dst is x_src or edges.seems_finite(x_dst))):
        x_src, x_dst = edges.only_read(graph, x_src, target=False), edges.only_read(graph, x_dst, target=True)
    hidden, v = projections(x_src, [(of_nodes, conv.lin1.bias), (weight_of(conv.lin2, x_src), conv.lin2.bias)])
    att = conv.att_l

    def source_score(of_source: Tensor, e: Tensor) -> Tensor:
        return dense(torch.nn.functional.leaky_relu(plus_dense(of_source, e, of_edges), SLOPE), att)

    (score,), how = streaming.reduced(
        graph,
        source_score,
        None,
        hidden,
        attr,
        ("each",),
        width=3 * hidden.size(1),  # gathered, summed, after leaky_relu: autograd would keep them
        parameters=(of_edges, att),
        steady=True,
    )
    sent = messages(graph.num_edges, v.size(1), x_src)
    note(conv, f"alpha (X W2'), scores of edges {how}", avoided=sent, builds=how.builds)
    out = attention(
        graph,
        v.unsqueeze(1),
        dense(x_dst, conv.att_r),
        x_src.new_zeros(graph.num_cols, 1),
        score,
        form="gat",
        negative_slope=SLOPE,
        dropout=conv.dropout if conv.training else 0.0,
        bias=conv.bias,
    )
    assert isinstance(out, Tensor)
    return out


LAYER = Layer(GATEConv, fast, aggr=SUM)
