"""GCNConv: S (A + I) S X W + b, with S = diag(degree^-1/2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.compile import Adjacency, Leaf, Sparse, Term, Transpose, linear
from stretto.layers import adjacency
from stretto.layers.base import Decline, check_input, note_fixed, note_plan, record_of, weight_of
from stretto.layers.declines import same_type
from stretto.layers.features import aggregated, linear_of_nonzeros
from stretto.layers.sage import Summands
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
    if conv.aggr not in ("add", "sum"):
        raise Decline(f"aggr is {conv.aggr}")
    same_type(x, conv.bias)
    return Summands(x, weight_of(conv.lin, x), conv.bias, _adjacency(conv, x, edge_index, edge_weight), "sum")


def aggregate_linear(conv: Any, adj: Adjacency, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """adj x weight' + bias by the best plan; edge weights that learn take the differentiable op."""
    if adj.weight is not None and adj.weight.requires_grad:
        first = x.size(1) < weight.size(0)
        note_fixed(conv, "(A X) W', edges learn" if first else "A (X W'), edges learn")
        if first:
            out = spmm(adj.graph, x, adj.weight, row_scale=adj.row_scale, col_scale=adj.col_scale) @ weight.t()
        else:
            out = spmm(adj.graph, x @ weight.t(), adj.weight, row_scale=adj.row_scale, col_scale=adj.col_scale)
        return out if bias is None else out + bias
    h = linear_of_nonzeros(x, weight)
    if h is not None:
        record_of(conv).plan = "A (X W'), X by its nonzeros"
        out = aggregated(adj, h)
        return out if bias is None else plus(out, bias)
    note = note_plan(conv)
    out = linear(EXPRESSION, {"X": x, "W": weight}, {"A": adj}, bias=bias, note=note, stock="update-first")
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
