"""widened: x W' + b where x is narrow and the result wide, on the CPU.

Here arithmetic is small and every pass over a wide array shows. Our own products add a bias, and sum its gradient, on
the way. For torch's the bias is one more column of W beside a column of ones in x: neither takes a pass there either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.kernels import on_host
from stretto.kernels.cpu_dense import product_in_blocks
from stretto.memory import pool
from stretto.ops import library
from stretto.ops.kernel import differentiable
from stretto.ops.product import product, product_and_sums
from stretto.ops.tall_product import by_our_kernel

LEAST_RATIO = 8  # columns of the result to one of x


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether widened is made for these. x [n, i], weight [o, i]."""
    if not on_host(x) or x.dim() != 2 or library.traced(x) or torch.is_autocast_enabled("cpu"):
        return False
    large = x.size(0) * weight.size(0) * x.element_size() >= pool.LEAST
    return large and weight.dtype == x.dtype and weight.size(0) >= LEAST_RATIO * weight.size(1)


def widened(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x W' + bias. x [n, i], weight [o, i], bias [o] -> [n, o]."""
    out: Tensor = _widened(None, x, weight, bias)
    return out


def _run(_: None, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if by_our_kernel(x, weight.t(), bias):
        return product(x, weight.t(), bias)
    return product(_with_ones(x), torch.cat([weight, bias.unsqueeze(1)], dim=1).t())


def _with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_ones(x.size(0), 1)], dim=1)


def _gradients(_: None, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    (x, weight), (grad,), (need_x, need_weight, need_bias) = saved, grads, needs
    if torch.is_grad_enabled():  # create_graph=True: gradients must be differentiable themselves
        dbias = grad.sum(0) if need_bias else None
        return grad @ weight if need_x else None, grad.t() @ x if need_weight else None, dbias
    dx = product(grad, weight) if need_x else None
    if not need_weight and not need_bias:
        return dx, None, None
    if by_our_kernel(grad.t(), x):
        dweight, sums = product_and_sums(grad, x)
        dbias = grad.sum(0) if sums is None and need_bias else sums
        return dx, dweight if need_weight else None, dbias if need_bias else None
    both = product_in_blocks(_with_ones(x).t(), grad)  # this way round torch's GEMM is faster
    return dx, both[:-1].t().contiguous() if need_weight else None, both[-1].clone() if need_bias else None


_widened = differentiable("Widened", _run, _gradients, saves=2)
