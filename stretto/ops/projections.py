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
from stretto.ops.dense import add_bias, dense, linear_grads, row_sum
from stretto.ops.kernel import differentiable
from stretto.ops.product import product, two_products

Map = tuple[Tensor, Tensor | None]  # weight [o, i], bias [o]


def projections(x: Tensor, maps: Sequence[Map]) -> tuple[Tensor, ...]:
    """Return x W' + b for every (W, b). x [n, i] -> [n, o] each."""
    weights, biases = [weight for weight, _ in maps], [bias for _, bias in maps]
    if not _pooled(x, *weights, *biases):
        return tuple(dense(x, weight, bias) for weight, bias in maps)
    results: tuple[Tensor, ...] = _projections(len(maps), x, *weights, *biases)
    return results


def plus(x: Tensor, y: Tensor) -> Tensor:
    """Add y [n, k] or [k] to x [n, k], in a kept buffer on the CPU."""
    if not _pooled(x, y):
        return add_bias(x, y) if y.dim() == 1 else x + y
    out: Tensor = _plus(None, x, y, y.dim() == 1)
    return out


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


def _sum(_: None, x: Tensor, y: Tensor, bias: bool) -> Tensor:
    return torch.add(x.detach(), y.detach(), out=_empty(x, *x.shape))


def _run(count: int, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    x, plain = x.detach(), [None if t is None else t.detach() for t in parameters]
    return tuple(product(x, w.t(), bias) for w, bias in zip(plain[:count], plain[count:], strict=True) if w is not None)


def _gradients(count: int, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    x, *weights = saved
    known = [(grad, weight) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    dx = _dx(known, x) if needs[0] and known else None
    wanted = zip(grads, needs[1 : count + 1], needs[count + 1 :], strict=True)
    pairs = [(None, None) if grad is None else linear_grads(grad, x, *need) for grad, *need in wanted]
    return dx, *(weight for weight, _ in pairs), *(bias for _, bias in pairs)


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


def _plus_gradients(_: None, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], bias: bool) -> Any:
    (grad,) = grads
    dy = None if not needs[1] else row_sum(grad) if bias else grad
    return grad if needs[0] else None, dy


_projections = differentiable(
    "Projections",
    _run,
    _gradients,
    saves=lambda tensors, results, needs: tensors[: 1 + len(results)],
    shown=None,
)
_plus = differentiable(
    "Plus",
    _sum,
    _plus_gradients,
    tensors=2,
    saves=0,
)
