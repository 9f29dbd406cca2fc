"""GINConv: nn((1 + eps) x_i + sum x_j). Where nn starts with a Linear, the sum may be taken after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn.models import MLP

from stretto.compile import Adjacency, Leaf, Sparse, Term, Transpose, linear
from stretto.kernels import denormals, on_host
from stretto.kernels.looks import settled
from stretto.layers import adjacency
from stretto.layers.base import LINEAR, Decline, check_input, hooked, note, note_plan, weight_of
from stretto.layers.declines import pair_of, same_type
from stretto.layers.layer import SIMPLE, Conv, Layer, Maps, Split, as_wide_as_x
from stretto.ops import relu_product, spmm
from stretto.ops.dense import dense
from stretto.ops.relu_dense import relu_dense
from stretto.recording import looked

A, X, W = Sparse("A", "n", "m"), Leaf("X", "m", "i"), Leaf("W", "o", "i")
OTHER = Leaf("R", "n", "i")
OWN_ROOT = (Term((A, X, Transpose(W))), Term((X, Transpose(W)), "c"))
OTHER_ROOT = (Term((A, X, Transpose(W))), Term((OTHER, Transpose(W)), "c"))
NO_ROOT = (Term((A, X, Transpose(W))),)
FEW_EDGES = 260_000  # on a device, below which stock's few launches cost less (docs/gpu.md)
Rest = Callable[..., Tensor]  # of the first Linear's result, and its bias if that is still to be added


def fast(conv: Conv, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """What GINConv.forward computes."""
    x_src, x_dst = pair_of(x)
    check_input(x_src, *(() if x_dst is None or x_dst is x_src else (x_dst,)))
    if x_dst is not None and x_dst.size(1) != x_src.size(1):
        raise Decline("x_src and x_dst differ in width")
    same_type(x_src, conv.eps)
    num_dst = adjacency.destinations(edge_index, size, x_dst, x_src)
    graph = adjacency.graph_of(conv, edge_index, x_src.size(0), num_dst, few=FEW_EDGES)
    values = adjacency.weights_in(graph, edge_index, x_src)
    learns = conv.eps.requires_grad or (values is not None and values.requires_grad)
    first, rest = first_linear(conv.nn)
    if first is None or learns or conv.aggr not in ("add", "sum", "mean"):
        note(conv, "nn(A X + c X)")
        root = None if x_dst is None else (1 + conv.eps) * x_dst
        return network(conv.nn, spmm(graph, x_src, values, reduce=conv.aggr, y=root))
    scale_type = torch.float64 if x_src.dtype == torch.float64 else torch.float32
    adj = Adjacency(graph, graph.mean_scale(scale_type) if conv.aggr == "mean" else None, weight=values)
    return _planned(conv, adj, x_src, x_dst, first, rest)


def _planned(conv: Conv, adj: Adjacency, x: Tensor, x_dst: Tensor | None, first: Any, rest: Rest) -> Tensor:
    """The network of what is added up, its first Linear before or after the sum, as the plan has it."""
    tensors = {"X": x, "W": weight_of(first, x, bias=True)}
    expression = NO_ROOT if x_dst is None else OWN_ROOT if x_dst is x else OTHER_ROOT
    if expression is OTHER_ROOT and x_dst is not None:
        tensors["R"] = x_dst
    late = first.bias if on_host(x) and _relu_follows(conv.nn) else None  # added where the ReLU is taken
    bias = None if late is not None else first.bias
    after = _after(conv.nn, first, adj.graph.num_rows, x)
    scalars = {"c": 1.0 + number(conv.eps)}
    out = linear(expression, tensors, {"A": adj}, bias=bias, scalars=scalars, note=note_plan(conv), after=after)
    if after:
        return out
    return rest(out) if late is None else rest(out, late)


def _after(nn: Any, first: Any, rows: int, like: Tensor) -> tuple[tuple[Tensor, Tensor | None], ...]:
    """Weight and bias of every Linear after the first where each follows a ReLU, to be run in one step with the rest of
    the layer on a device; nothing where it would not take them, or something else is among them."""
    if on_host(like) or nn is first:
        return ()
    if type(nn) is MLP:
        linears: list[Any] = list(nn.lins)[1:] if only_relu(nn) else []
    else:
        _, *modules = nn
        linears = modules[1::2]
        if len(modules) % 2 or not all(map(_is_relu_dense, modules[::2], linears)):
            return ()
    maps = tuple((linear.weight, linear.bias) for linear in linears)
    return maps if all(relu_product.follows(rows, like, *one) for one in maps) else ()


def number(scalar: Tensor) -> float:
    """The value of a tensor of one element; asked of a device once per change, since the host waits for the answer."""
    if on_host(scalar) and looked(scalar):
        return float(scalar.detach().numpy().item())  # without torch's eyes, where the step is being written down
    look = None if on_host(scalar) else settled(scalar)
    if look is None:
        return scalar.item()
    known = _numbers.get(scalar)
    if known is None or known[0] != look:
        known = _numbers[scalar] = (look, scalar.item())
    result: float = known[1]
    return result


_numbers: Any = WeakTensorKeyDictionary()


def forget() -> None:
    """Ask the device again."""
    _numbers.clear()


def first_linear(nn: Any) -> tuple[Any, Rest]:
    """The Linear that nn starts with, and a function that runs what follows it; (None, nn) if there is none."""
    if type(nn) in LINEAR and not hooked(nn):
        return nn, lambda x: x
    if type(nn) is torch.nn.Sequential and len(nn) and type(nn[0]) in LINEAR and not hooked(nn, nn[0]):
        return nn[0], lambda x, bias=None: _run(list(nn)[1:], x, bias)
    if type(nn) is MLP and type(nn.lins[0]) in LINEAR and not hooked(nn, nn.lins[0]):
        return nn.lins[0], lambda x, bias=None: rest_of_mlp(nn, x, bias)
    return None, nn


def network(nn: Any, x: Tensor) -> Tensor:
    """nn(x); on the CPU with its first bias, the ReLU and the next Linear in one step. x [n, i] -> [n, o]."""
    first, rest = first_linear(nn)
    fuses = first is not None and on_host(x) and x.dim() == 2 and _relu_follows(nn)
    if fuses and x.size(0) * first.weight.size(0) >= denormals.LEAST and not torch.is_autocast_enabled("cpu"):
        return rest(torch.nn.functional.linear(x, first.weight), first.bias)
    result: Tensor = nn(x)
    return result


def _relu_follows(nn: Any) -> bool:
    """Whether after its first Linear nn takes a ReLU, and then another Linear."""
    if type(nn) is MLP:
        return only_relu(nn) and len(nn.lins) > 1
    return type(nn) is torch.nn.Sequential and len(nn) > 2 and _is_relu_dense(nn[1], nn[2])


def _is_relu_dense(module: Any, after: Any) -> bool:
    return type(module) is torch.nn.ReLU and type(after) in LINEAR and not hooked(module, after)


def _run(modules: list[Any], x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The modules one after the other; a ReLU and the Linear after it in one step. bias: to be added to x first."""
    at = 0
    while at < len(modules):
        module, after = modules[at], [*modules, None][at + 1]
        if _is_relu_dense(module, after):
            x, bias, at = relu_dense(x, after.weight, after.bias, bias), None, at + 2
            continue
        assert bias is None
        plain = type(module) is torch.nn.Linear and not hooked(module)
        x = dense(x, module.weight, module.bias) if plain else module(x)
        at += 1
    return x


def rest_of_mlp(mlp: Any, x: Tensor, bias: Tensor | None = None, *, last: bool = True) -> Tensor:
    """What MLP.forward does after its first Linear. x [n, hidden] -> [n, out].

    bias: to be added to x first. last: whether with its last Linear, where that is plain.
    """
    if last and only_relu(mlp):
        for lin in mlp.lins[1:]:
            x, bias = relu_dense(x, lin.weight, lin.bias, bias), None
        return x
    assert bias is None
    for i, (lin, norm) in enumerate(zip(mlp.lins, mlp.norms, strict=False)):  # plain_last: one norm less
        if i > 0:
            x = lin(x)
        if mlp.act is not None and mlp.act_first:
            x = mlp.act(x)
        x = norm(x, None, None) if mlp.supports_norm_batch else norm(x)
        if mlp.act is not None and not mlp.act_first:
            x = mlp.act(x)
        x = torch.nn.functional.dropout(x, p=mlp.dropout[i], training=mlp.training)
    if mlp.plain_last and last:
        if len(mlp.lins) > 1:
            x = mlp.lins[-1](x)
        x = torch.nn.functional.dropout(x, p=mlp.dropout[-1], training=mlp.training)
    return x


def only_relu(mlp: Any) -> bool:
    """Whether between its Linears an MLP has a ReLU and nothing else, and nothing after the last."""
    idle = all(type(norm) is torch.nn.Identity for norm in mlp.norms) and not (mlp.training and any(mlp.dropout))
    parts = [*mlp.lins, *mlp.norms, *([mlp.act] if isinstance(mlp.act, torch.nn.Module) else [])]
    return (
        mlp.plain_last
        and idle
        and type(mlp.act) is torch.nn.ReLU
        and all(type(lin) in LINEAR for lin in mlp.lins)
        and not hooked(*parts)
    )


def _maps(conv: Conv) -> Maps | str:
    weights = []
    for module in conv.nn.modules():
        if isinstance(module, LINEAR):
            weights.append(module.weight)
        elif not isinstance(module, PASSING):
            return f"the network of GINConv has a {type(module).__name__}"
    return weights, weights


# Modules that make no difference larger than it is.
PASSING = (torch.nn.Sequential, torch.nn.ReLU, torch.nn.Tanh, torch.nn.Identity, torch.nn.Dropout)


LAYER = Layer(
    pyg.GINConv,
    fast,
    aggr=SIMPLE,
    message=as_wide_as_x,
    local=True,
    few_edges=FEW_EDGES,
    split=Split(
        lambda conv, gathered, own: conv.nn(gathered + (1 + conv.eps) * own),
        own_weight=lambda conv: abs(1.0 + number(conv.eps)),
        maps=_maps,
    ),
)
