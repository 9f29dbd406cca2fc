"""GCNConv: S (A + I) S X W + b, with S = diag(degree^-1/2)."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Adjacency, Leaf, Sparse, Term, Transpose, linear
from stretto.layers import adjacency
from stretto.layers.base import check_input, note, note_plan, weight_of
from stretto.layers.declines import same_type
from stretto.layers.features import aggregated, linear_of_nonzeros
from stretto.layers.layer import SUM, Conv, Layer, Split, Summands, as_wide_as_result
from stretto.ops import spmm
from stretto.ops.projections import plus

A, X, W = Sparse("A", "n", "m"), Leaf("X", "m", "i"), Leaf("W", "o", "i")
EXPRESSION = (Term((A, X, Transpose(W))),)


def fast(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What GCNConv.forward computes."""
    of = of_gcn(conv, x, edge_index, edge_weight)
    return aggregate_linear(conv, of.adj, x, of.weight, of.bias)


def of_gcn(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Summands:
    """What a GCNConv adds up."""
    check_input(x)
    same_type(x, conv.bias)
    adj = adjacency.gcn_of(conv, x, edge_index, edge_weight, improved=conv.improved)
    return Summands(x, weight_of(conv.lin, x), conv.bias, adj, "sum")


def aggregate_linear(conv: Conv, adj: Adjacency, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute adj x weight' + bias by the best plan; edge weights that learn take the differentiable op."""
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


def _made(conv: Conv, gathered: Tensor, own: Tensor) -> Tensor:
    """The layer of a sum over a part's edges and loops. -> [rows, o]."""
    out: Tensor = conv.lin(gathered)
    return out if conv.bias is None else out + conv.bias


LAYER = Layer(
    pyg.GCNConv,
    fast,
    aggr=SUM,
    message=as_wide_as_result,
    copies=True,
    summands=of_gcn,
    split=Split(_made, normalised=True, maps=lambda c: ([c.lin.weight], [c.lin.weight])),
)
