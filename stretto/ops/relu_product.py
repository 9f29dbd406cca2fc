"""relu_product: relu(z) W' + b on a device, as one step: relu(z) is no array, forward or backward.

For tall fp32 matrices, on the tensor cores (kernels/triton/product.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.kernels.reference_dense import relu_dense_grad
from stretto.ops import library
from stretto.ops.batched import one_by_one
from stretto.ops.dense import column_sum
from stretto.ops.product import LEAST_ROWS, MOST_INNER, _ours

PLAIN = (Tensor, torch.nn.Parameter)


def takes(z: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether relu_product is made for these."""
    return kernels.has_own_memory(z.device) and z.dim() == 2 and not library.traced(z) and _ours(z, weight.t(), bias)


def follows(rows: int, like: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels of relu_product take an array [rows, i] that is yet to be made, on the device of `like`."""
    if like.dtype != torch.float32 or rows < LEAST_ROWS or library.traced(like) or type(weight) not in PLAIN:
        return False
    if torch.get_float32_matmul_precision() != "highest" or kernels.autocasts(like):
        return False
    if weight.dtype != like.dtype or weight.device != like.device or weight.size(0) % 4 or weight.size(1) % 4:
        return False
    if weight.size(1) > MOST_INNER or kernels.backend(like.device).transposed_product is None:
        return False
    return bias is None or (bias.dtype == like.dtype and bias.device == like.device and bias.is_contiguous())


def relu_product(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z [n, i], weight [o, i], bias [o] -> [n, o], where `takes` agrees."""
    if library.recorded(z, weight, bias):
        return _ReluProduct.apply(z, weight, bias)
    return kernels.backend(z.device).product(z, weight.t(), bias, relu=True)


class _ReluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Any) -> Tensor:
        ctx.save_for_backward(z, weight)
        return kernels.backend(z.device).product(z, weight.t(), bias, relu=True)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        z, weight = ctx.saved_tensors
        (grad,) = grads
        need_z, need_weight, need_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: gradients must be differentiable themselves
            of_z, _, of_weight, of_bias = relu_dense_grad(z, None, weight, grad)
            return of_z if need_z else None, of_weight if need_weight else None, of_bias if need_bias else None
        grad = grad.contiguous()
        backend = kernels.backend(z.device)
        dz = backend.product(grad, weight, gate=z) if need_z else None
        if not need_weight:
            return dz, None, column_sum(grad) if need_bias else None
        return dz, *backend.transposed_product(grad, z, relu=True, sums=need_bias)
