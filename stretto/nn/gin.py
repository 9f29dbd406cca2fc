"""GINConv: nn((1 + eps) x_i + sum x_j). Where nn starts with a Linear, the sum may be taken after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.compile import Adjacency, Leaf, Sparse, Term, Transpose, linear
from stretto.nn import adjacency
from stretto.nn.base import Decline, check_input, note_plan, record_of, weight_of
from stretto.nn.sage import destinations
from stretto.ops import spmm

A, X, W = Sparse("A", "n", "m"), Leaf("X", "m", "i"), Leaf("W", "o", "i")
OTHER = Leaf("R", "n", "i")
OWN_ROOT = (Term((A, X, Transpose(W))), Term((X, Transpose(W)), "c"))
OTHER_ROOT = (Term((A, X, Transpose(W))), Term((OTHER, Transpose(W)), "c"))
NO_ROOT = (Term((A, X, Transpose(W))),)


def fast(conv: Any, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """What GINConv.forward computes."""
    x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
    own = x_dst is x_src
    check_input(x_src, *(() if x_dst is None or own else (x_dst,)))
    if conv.aggr not in ("add", "sum", "mean", "max", "min"):
        raise Decline(f"aggr is {conv.aggr}")
    graph = adjacency.graph_of(conv, edge_index, x_src.size(0), destinations(edge_index, size, x_dst, x_src))
    first, rest = first_linear(conv.nn)
    linear_sum = conv.aggr in ("add", "sum", "mean") and not conv.eps.requires_grad
    if first is None or not linear_sum:
        record_of(conv).plan = "nn(A X + c X)"
        root = None if x_dst is None else (1 + conv.eps) * x_dst
        return conv.nn(spmm(graph, x_src, reduce=conv.aggr, y=root))
    weight = weight_of(first, x_src)
    scale_type = torch.float64 if x_src.dtype == torch.float64 else torch.float32
    adj = Adjacency(graph, graph.mean_scale(scale_type) if conv.aggr == "mean" else None)
    scalars = {"c": 1.0 + conv.eps.item()}
    tensors = {"X": x_src, "W": weight}
    expression = NO_ROOT if x_dst is None else OWN_ROOT if own else OTHER_ROOT
    if expression is OTHER_ROOT:
        tensors["R"] = x_dst
    out = linear(expression, tensors, {"A": adj}, bias=first.bias, scalars=scalars, note=note_plan(conv))
    for module in rest:
        out = module(out)
    return out


def first_linear(nn: Any) -> tuple[Any, list[Any]]:
    """The Linear a Sequential starts with, and what follows it; (None, []) if it does not."""
    if type(nn) is torch.nn.Linear:
        return nn, []
    if type(nn) is torch.nn.Sequential and len(nn) and type(nn[0]) is torch.nn.Linear:
        if not (nn._forward_hooks or nn._forward_pre_hooks or nn._backward_hooks):
            return nn[0], list(nn)[1:]
    return None, []
