"""GCNConv: S (A + I) S X W + b, with S = diag(degree^-1/2)."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Adjacency, Leaf, Sparse, Term, Transpose, linear
from stretto.layers import adjacency
from stretto.layers.base import Decline, check_input, note, note_plan, weight_of
from stretto.layers.declines import same_type
from stretto.layers.features import aggregated, linear_of_nonzeros
from stretto.layers.layer import SUM, Layer, Split, Summands, as_wide_as_result
from stretto.ops import spmm
from stretto.ops.projections import plus

A, X, W = Sparse("A", "n", "m"), Leaf("X", "m", "i"), Leaf("W", "o", "i")
EXPRESSION = (Term((A, X, Transpose(W))),)


def fast(conv: Any, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What GCNConv.forward computes."""
    of = of_gcn(conv, x, edge_index, edge_weight)
    return aggregate_linear(conv, of.adj, x, of.weight, of.bias)


def of_gcn(conv: Any, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Summands:
    """What a GCNConv adds up."""
    check_input(x)
    same_type(x, conv.bias)
    return Summands(x, weight_of(conv.lin, x), conv.bias, _adjacency(conv, x, edge_index, edge_weight), "sum")


def aggregate_linear(conv: Any, adj: Adjacency, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """adj x weight' + bias by the best plan; edge weights that learn take the differentiable op."""
    if adj.weight is not None and adj.weight.requires_grad:
        first = x.size(1) < weight.size(0)
        note(conv, "(A X) W', edges learn" if first else "A (X W'), edges learn")
        if first:
            out = spmm(adj.graph, x, adj.weight, row_scale=adj.row_scale, col_scale=adj.col_scale) @ weight.t()
        else:
            out = spmm(adj.graph, x @ weight.t(), adj.weight, row_scale=adj.row_scale, col_scale=adj.col_scale)
        return out if bias is None else out + bias
    h = linear_of_nonzeros(x, weight)
    if h is not None:
        note(conv, "A (X W'), X by its nonzeros")
        out = aggregated(adj, h)
        return out if bias is None else plus(out, bias)
    out = linear(EXPRESSION, {"X": x, "W": weight}, {"A": adj}, bias=bias, note=note_plan(conv), stock="update-first")
    return out.to(x.dtype)  # under autocast stock's fp32 norm and bias bring the result back to the input's type


def _adjacency(conv: Any, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> Adjacency:
    if not conv.normalize:
        graph = adjacency.graph_of(conv, edge_index, x.size(0), x.size(0))
        values = adjacency.values_of(edge_index)
        return Adjacency(graph, weight=adjacency.weighted(graph, edge_weight if values is None else values, x))
    if conv.cached or conv._cached_edge_index is not None:  # the first graph is the graph for ever, as stock keeps it
        if conv._cached_adj_t is not None or not isinstance(edge_index, Tensor):
            raise Decline("cached=True with a SparseTensor")
        if conv._cached_edge_index is None:
            options = {"improved": conv.improved, "add_self_loops": conv.add_self_loops}
            plain = adjacency._plain(edge_index)
            conv._cached_edge_index = adjacency.gcn_norm(
                plain, edge_weight, x.size(0), flow=conv.flow, dtype=x.dtype, **options
            )
        kept, weight = conv._cached_edge_index
        graph = adjacency.graph_of(conv, kept, x.size(0), x.size(0))
        return Adjacency(graph, weight=weight if weight is not None else adjacency.values_of(kept))
    return adjacency.gcn(conv, x, edge_index, edge_weight, improved=conv.improved, add_self_loops=conv.add_self_loops)


def _made(conv: Any, gathered: Tensor, own: Tensor) -> Tensor:
    """The layer of a sum over a part's edges and loops. -> [rows, o]"""
    out: Tensor = conv.lin(gathered)
    return out if conv.bias is None else out + conv.bias


LAYER = Layer(
    pyg.GCNConv,
    fast,
    aggr=SUM,
    message=as_wide_as_result,
    copies=True,
    summands=of_gcn,
    split=Split(_made, normalised=True),
)
