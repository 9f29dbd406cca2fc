"""relu_dense: relu(z + b) W' + c, the steps that make up most of an MLP, as one.

On the CPU, for large matrices: narrow ones in a kernel of our own, wider ones by torch's GEMM in blocks of rows. Either
way relu(z + b) is never an array of its own, and the gradient is masked where it is made. On a device: relu_product.py
for tall matrices. Elsewhere: step by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.kernels import cpu_relu_dense, pool
from stretto.kernels.denormals import DenormalsAreZero, matter
from stretto.ops import library, relu_product
from stretto.ops.batched import one_by_one
from stretto.ops.dense import add_bias, dense

BLOCK = 1 << 20  # bytes of z and of the result in a block
LEAST_ROWS = 1024  # below, a GEMM spends its time on packing W


def relu_dense(z: Tensor, weight: Tensor, bias: Tensor | None = None, z_bias: Tensor | None = None) -> Tensor:
    """z [n, i], weight [o, i], bias [o], z_bias [i] -> [n, o]"""
    if z_bias is None and relu_product.takes(z, weight, bias):
        return relu_product.relu_product(z, weight, bias)
    if not joined(z, weight, bias, z_bias):
        return dense(F.relu(z if z_bias is None else add_bias(z, z_bias)), weight, bias)
    if library.recorded(z, weight, bias, z_bias):
        return _ReluDense.apply(z, z_bias, weight, bias)
    return _forward(z, z_bias, weight, bias)


def joined(z: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the steps are run as one."""
    if z.dim() != 2 or not matter(z) or not z.is_contiguous() or library.traced(z) or torch.is_autocast_enabled("cpu"):
        return False
    return all(p is None or p.dtype == z.dtype for p in parameters)


def _forward(z: Tensor, z_bias: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    if cpu_relu_dense.fits(z, weight.size(0)):
        return cpu_relu_dense.forward(z, z_bias, weight, bias)
    out = pool.empty((z.size(0), weight.size(0)), z.dtype)
    transposed = weight.t()
    with DenormalsAreZero():
        for rows in _blocks(z, weight.size(0)):
            active = _active(z[rows], z_bias)
            if bias is None:
                torch.mm(active, transposed, out=out[rows])
            else:
                torch.addmm(bias, active, transposed, out=out[rows])
    return out


def _backward(
    z: Tensor, z_bias: Tensor | None, weight: Tensor, grad: Tensor, *, need_z: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of z, z_bias (with that of z only), weight and bias."""
    if cpu_relu_dense.fits(z, weight.size(0)):
        return cpu_relu_dense.backward(z, z_bias, weight, grad, need_z=need_z)
    dz = pool.empty(z.shape, z.dtype) if need_z else None
    dz_bias = z.new_zeros(z.size(1)) if need_z and z_bias is not None else None
    dweight, dbias = torch.zeros_like(weight), weight.new_zeros(weight.size(0))
    with DenormalsAreZero():
        for rows in _blocks(z, weight.size(0)):
            g, active = grad[rows], _active(z[rows], z_bias)
            dbias += g.sum(0)
            dweight.addmm_(g.t(), active)
            if dz is not None:
                made = torch.mm(g, weight, out=dz[rows])
                torch.ops.aten.threshold_backward.grad_input(made, active, 0, grad_input=made)
                if dz_bias is not None:
                    dz_bias += made.sum(0)
    return dz, dz_bias, dweight, dbias


def _blocks(z: Tensor, width: int) -> Iterator[slice]:
    rows = max(BLOCK // (z.element_size() * (z.size(1) + width)), LEAST_ROWS)
    return (slice(first, first + rows) for first in range(0, z.size(0), rows))


def _active(z: Tensor, z_bias: Tensor | None) -> Tensor:
    return z.relu() if z_bias is None else (z + z_bias).relu_()


class _ReluDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, z_bias: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(z, z_bias, weight)
        return _forward(z.detach(), *(None if t is None else t.detach() for t in (z_bias, weight, bias)))  # type: ignore[arg-type]

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        z, z_bias, weight = ctx.saved_tensors
        (grad,) = grads
        need_z, need_z_bias, need_weight, need_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: gradients must be differentiable themselves
            before = z if z_bias is None else z + z_bias
            dz = torch.ops.aten.threshold_backward(grad @ weight, before, 0)
            dz_bias, dweight, dbias = dz.sum(0), grad.t() @ F.relu(before), grad.sum(0)
        else:
            dz, dz_bias, dweight, dbias = _backward(z, z_bias, weight, grad, need_z=need_z or need_z_bias)
        wanted = ((dz, need_z), (dz_bias, need_z_bias), (dweight, need_weight), (dbias, need_bias))
        return tuple(found if needed else None for found, needed in wanted)
