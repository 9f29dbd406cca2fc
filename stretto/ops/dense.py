"""dense: x W' + b as torch's linear has it; on a device, the sum over all rows that b's gradient is runs in our kernel.

torch takes several times as long for that sum as memory asks. On a CPU the gradient of a narrow W is a sum over all
rows that torch's GEMM would take one row after the other: it is taken in blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto import kernels
from stretto.kernels.cpu_dense import MANY, SKINNY
from stretto.ops import library, taped
from stretto.ops.batched import one_by_one
from stretto.ops.product import product, product_and_sums
from stretto.ops.tall_product import narrow_product

LARGE = 1 << 22  # values below which torch's one launch costs less than our two


def column_sum(x: Tensor) -> Tensor:
    """Sum over the rows; no autograd. x [n, k] -> [k]"""
    run = kernels.backend(x.device).column_sum if x.numel() >= LARGE else None
    if run is None or x.dtype not in kernels.DTYPES or type(x) is not Tensor:
        return taped.column_sum(x)
    return run(x)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, i], weight [o, i], bias [o] -> [n, o]"""
    own = bias is not None and kernels.backend(x.device).column_sum is not None and x.dim() == 2
    if not (own or _skinny(x, weight)) or library.traced(x) or kernels.autocasts(x):
        return F.linear(x, weight, bias)
    if (
        x.dtype != weight.dtype
        or (bias is not None and weight.dtype != bias.dtype)
        or not library.recorded(x, weight, bias)
    ):
        return F.linear(x, weight, bias)
    return _Dense.apply(x, weight, bias, False)


def dense_of_sums(x: Tensor, weight: Tensor) -> Tensor:
    """dense for an x that sums have moved to: a row has many terms, which may cancel, and gets few columns. What stock
    adds up edge by edge is added up here one term after the other, if it is left to torch's GEMM.

    x [n, i], weight [o, i] -> [n, o]
    """
    own = kernels.on_host(x) and x.dim() == 2 and x.dtype == weight.dtype and weight.size(0) < SKINNY
    if not own or library.traced(x) or kernels.autocasts(x):
        return dense(x, weight)
    return _Dense.apply(x, weight, None, True) if library.recorded(x, weight) else narrow_product(x, weight.t())


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """x [n, k] + bias [k]"""
    own = kernels.backend(x.device).column_sum is not None and x.dim() == 2 and x.dtype == bias.dtype
    if not own or library.traced(x) or not library.recorded(x, bias):
        return x + bias
    return _AddBias.apply(x, bias)


def plus_dense(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """total + x W'. total [n, o], x [n, i], weight [o, i] -> [n, o]"""
    plain = library.traced(x) or not library.recorded(x, weight) or kernels.autocasts(x)
    if plain or not _skinny(x, weight) or not total.dtype == x.dtype == weight.dtype:
        return torch.addmm(total, x, weight.t())
    return _PlusDense.apply(total, x, weight)


def _skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's GEMM would lose digits in the gradient of W, and W learns on a CPU."""
    if not kernels.on_host(x) or x.dim() != 2 or not weight.requires_grad:
        return False
    return x.size(0) > MANY and min(weight.shape) < SKINNY


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of_sums: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        return narrow_product(x, weight.t()) if of_sums else product(x, weight.t(), bias)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx = None
        if need_x:
            dx = grad @ weight if torch.is_grad_enabled() else product(grad, weight)
        return dx, *linear_grads(grad, x, need_weight, need_bias), None


class _PlusDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(total, x, weight.t())

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        need_total, need_x, need_weight = ctx.needs_input_grad
        dx = grad @ weight if need_x else None
        return grad if need_total else None, dx, weight_grad(grad, x) if need_weight else None


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        need_x, need_bias = ctx.needs_input_grad
        return grads[0] if need_x else None, row_sum(grads[0]) if need_bias else None


def linear_grads(grad: Tensor, x: Tensor, need_weight: bool, need_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of W and b in x W' + b; differentiable where wanted. grad [n, o], x [n, i] -> [o, i], [o]"""
    if not (need_weight and need_bias) or torch.is_grad_enabled():
        return weight_grad(grad, x) if need_weight else None, row_sum(grad) if need_bias else None
    weight, bias = product_and_sums(grad, x)
    return weight, column_sum(grad) if bias is None else bias


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of W in x W': differentiable where that is wanted. grad [n, o], x [n, i] -> [o, i]"""
    return grad.t() @ x if torch.is_grad_enabled() else product(grad.t(), x)


def row_sum(grad: Tensor) -> Tensor:
    """The gradient of a bias: differentiable where that is wanted. grad [n, k] -> [k]"""
    return grad.sum(0) if torch.is_grad_enabled() else column_sum(grad)
