"""projections: several linear maps of one x, as one step of autograd.

The gradient of x is accumulated by the GEMMs that make it: no array the size of x is made once per map and then added
up. On the CPU results lie in kept buffers. Small ones: one `dense` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.memory import pool
from stretto.ops import library
from stretto.ops.batched import one_by_one
from stretto.ops.dense import add_bias, dense, linear_grads, row_sum
from stretto.ops.product import product, two_products

Map = tuple[Tensor, Tensor | None]  # weight [o, i], bias [o]


def projections(x: Tensor, maps: Sequence[Map]) -> tuple[Tensor, ...]:
    """x W' + b for every (W, b). x [n, i] -> [n, o] each."""
    weights, biases = [weight for weight, _ in maps], [bias for _, bias in maps]
    if not _pooled(x, *weights, *biases):
        return tuple(dense(x, weight, bias) for weight, bias in maps)
    if not library.recorded(x, *weights, *biases):
        return _forward(x, weights, biases)
    return _Projections.apply(x, len(maps), *weights, *biases)


def plus(x: Tensor, y: Tensor) -> Tensor:
    """x [n, k] + y [n, k] or [k], in a kept buffer on the CPU."""
    if not _pooled(x, y):
        return add_bias(x, y) if y.dim() == 1 else x + y
    return _Plus.apply(x, y) if library.recorded(x, y) else _sum(x, y)


def _pooled(x: Tensor, *others: Tensor | None) -> bool:
    """Whether to fill buffers of our own: large plain matrices of one type."""
    if (
        not (kernels.on_host(x) or kernels.has_own_memory(x.device))
        or x.dim() != 2
        or x.numel() * x.element_size() < pool.LEAST
        or library.traced(x)
    ):
        return False
    return not kernels.autocasts(x) and all(t is None or t.dtype == x.dtype for t in others)


def _empty(x: Tensor, *shape: int) -> Tensor:
    return pool.empty(shape, x.dtype) if kernels.on_host(x) else x.new_empty(shape)


def _forward(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(product(x, weight.t(), bias) for weight, bias in zip(weights, biases, strict=True))


def _sum(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y, out=_empty(x, *x.shape))


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Any) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.set_materialize_grads(False)
        ctx.count = count
        ctx.save_for_backward(x, *weights)
        return _forward(x.detach(), [w.detach() for w in weights], [None if b is None else b.detach() for b in biases])

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        need_x, _, *needs = ctx.needs_input_grad
        known = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
        dx = _dx(known, x) if need_x and known else None
        wanted = zip(grads, needs[: ctx.count], needs[ctx.count :], strict=True)
        pairs = [(None, None) if grad is None else linear_grads(grad, x, *need) for grad, *need in wanted]
        return dx, None, *(weight for weight, _ in pairs), *(bias for _, bias in pairs)


def _dx(known: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # create_graph=True: gradients must be differentiable themselves
        total = known[0][0] @ known[0][1]
        for grad, weight in known[1:]:
            total = total + grad @ weight
        return total
    if len(known) == 1:
        return product(*known[0])
    dx = two_products(*known[0], *known[1])
    for grad, weight in known[2:]:
        dx = product(grad, weight, add=dx)
    return dx


class _Plus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.bias = y.dim() == 1
        return _sum(x.detach(), y.detach())

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        need_x, need_y = ctx.needs_input_grad
        dy = None if not need_y else row_sum(grad) if ctx.bias else grad
        return grad if need_x else None, dy
