"""relu_dense: relu(z) W' + b, the two steps that make up most of an MLP, in blocks of rows.

A block stays in the processor's cache from one step to the next, forward and backward: relu(z) is never an array of its
own, and the gradient is masked where it is made. For large matrices on the CPU; elsewhere the steps one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.kernels import pool
from stretto.kernels.denormals import DenormalsAreZero, matter
from stretto.ops import library
from stretto.ops.batched import one_by_one
from stretto.ops.dense import dense

BLOCK = 1 << 20  # bytes of z and of the result in a block
LEAST_ROWS = 1024  # below, a GEMM spends its time on packing W


def relu_dense(z: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """z [n, i], weight [o, i], bias [o] -> [n, o]"""
    if not _in_blocks(z, weight, bias):
        return dense(F.relu(z), weight, bias)
    if library.recorded(z, weight, bias):
        return _ReluDense.apply(z, weight, bias)
    return _forward(z, weight, bias)


def _in_blocks(z: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if z.dim() != 2 or not matter(z) or not z.is_contiguous() or z.numel() * z.element_size() < 2 * BLOCK:
        return False
    if library.traced(z) or torch.is_autocast_enabled("cpu"):
        return False
    return weight.dtype == z.dtype and (bias is None or bias.dtype == z.dtype)


def _blocks(z: Tensor, width: int) -> Iterator[slice]:
    rows = max(BLOCK // (z.element_size() * (z.size(1) + width)), LEAST_ROWS)
    return (slice(first, first + rows) for first in range(0, z.size(0), rows))


def _forward(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = pool.empty((z.size(0), weight.size(0)), z.dtype)
    transposed = weight.t()
    with DenormalsAreZero():
        for rows in _blocks(z, weight.size(0)):
            if bias is None:
                torch.mm(z[rows].relu(), transposed, out=out[rows])
            else:
                torch.addmm(bias, z[rows].relu(), transposed, out=out[rows])
    return out


class _ReluDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(z, weight)
        return _forward(z.detach(), weight.detach(), None if bias is None else bias.detach())

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        z, weight = ctx.saved_tensors
        (grad,) = grads
        need_z, need_weight, need_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: gradients must be differentiable themselves
            return (
                torch.ops.aten.threshold_backward(grad @ weight, z, 0) if need_z else None,
                grad.t() @ F.relu(z) if need_weight else None,
                grad.sum(0) if need_bias else None,
            )
        dz = pool.empty(z.shape, z.dtype) if need_z else None
        dweight = torch.zeros_like(weight) if need_weight else None
        dbias = weight.new_zeros(weight.size(0)) if need_bias else None
        with DenormalsAreZero():
            for rows in _blocks(z, weight.size(0)):
                g = grad[rows]
                if dbias is not None:
                    dbias += g.sum(0)
                if dweight is not None:
                    dweight.addmm_(g.t(), z[rows].relu())
                if dz is not None:
                    made = torch.mm(g, weight, out=dz[rows])
                    torch.ops.aten.threshold_backward.grad_input(made, z[rows], 0, grad_input=made)
        return dz, dweight, dbias
