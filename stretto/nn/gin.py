"""GINConv: nn((1 + eps) x_i + sum x_j). Where nn starts with a Linear, the sum may be taken after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.models import MLP

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
Rest = Callable[[Tensor], Tensor]


def fast(conv: Any, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """What GINConv.forward computes."""
    x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
    own = x_dst is x_src
    check_input(x_src, *(() if x_dst is None or own else (x_dst,)))
    if conv.aggr not in ("add", "sum", "mean", "max", "min"):
        raise Decline(f"aggr is {conv.aggr}")
    if x_dst is not None and x_dst.size(1) != x_src.size(1):
        raise Decline("x_src and x_dst differ in width")
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
    scalars = {"c": 1.0 + number(conv.eps)}
    tensors = {"X": x_src, "W": weight}
    expression = NO_ROOT if x_dst is None else OWN_ROOT if own else OTHER_ROOT
    if expression is OTHER_ROOT:
        tensors["R"] = x_dst
    return rest(linear(expression, tensors, {"A": adj}, bias=first.bias, scalars=scalars, note=note_plan(conv)))


def number(scalar: Tensor) -> float:
    """The value of a tensor of one element; asked of a device once per change, since the host waits for the answer."""
    if scalar.device.type == "cpu" or scalar.is_inference():
        return scalar.item()
    mark = (scalar.data_ptr(), scalar._version)
    kept = _numbers.get(scalar)
    if kept is None or kept[0] != mark:
        kept = _numbers[scalar] = (mark, scalar.item())
    return kept[1]


_numbers: Any = WeakTensorKeyDictionary()


def first_linear(nn: Any) -> tuple[Any, Rest]:
    """The Linear that nn starts with, and a function that runs what follows it; (None, nn) if there is none."""
    if type(nn) in LINEAR and not hooked(nn):
        return nn, lambda x: x
    if type(nn) is torch.nn.Sequential and len(nn) and type(nn[0]) in LINEAR and not hooked(nn, nn[0]):
        return nn[0], lambda x: _run(list(nn)[1:], x)
    if type(nn) is MLP and type(nn.lins[0]) in LINEAR and not hooked(nn, nn.lins[0]):
        return nn.lins[0], lambda x: rest_of_mlp(nn, x)
    return None, nn


LINEAR = (torch.nn.Linear, Linear)


def hooked(*modules: Any) -> bool:
    """Whether someone watches a module's calls."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)


def _run(modules: list[Any], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def rest_of_mlp(mlp: Any, x: Tensor) -> Tensor:
    """What MLP.forward does after its first Linear. x [n, hidden] -> [n, out]."""
    for i, (lin, norm) in enumerate(zip(mlp.lins, mlp.norms, strict=False)):  # plain_last: one norm less
        if i > 0:
            x = lin(x)
        if mlp.act is not None and mlp.act_first:
            x = mlp.act(x)
        x = norm(x, None, None) if mlp.supports_norm_batch else norm(x)
        if mlp.act is not None and not mlp.act_first:
            x = mlp.act(x)
        x = torch.nn.functional.dropout(x, p=mlp.dropout[i], training=mlp.training)
    if mlp.plain_last:
        if len(mlp.lins) > 1:
            x = mlp.lins[-1](x)
        x = torch.nn.functional.dropout(x, p=mlp.dropout[-1], training=mlp.training)
    return x
