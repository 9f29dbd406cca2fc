"""relu_dense: relu(z + b) W' + c, the steps that make up most of an MLP, as one.

For large matrices on the CPU (kernels/cpu_dense.py) and tall ones on a device (relu_product.py) relu(z + b) is never an
array of its own, and the gradient is masked where it is made. Elsewhere: step by step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.kernels import cpu_dense, reference_dense
from stretto.kernels.denormals import matter
from stretto.ops import library, relu_product
from stretto.ops.batched import one_by_one
from stretto.ops.dense import add_bias, dense


def relu_dense(z: Tensor, weight: Tensor, bias: Tensor | None = None, z_bias: Tensor | None = None) -> Tensor:
    """z [n, i], weight [o, i], bias [o], z_bias [i] -> [n, o]"""
    if z_bias is None and relu_product.takes(z, weight, bias):
        return relu_product.relu_product(z, weight, bias)
    if not joined(z, weight, bias, z_bias) or weight.dim() != 2 or weight.size(1) != z.size(1):
        return dense(F.relu(z if z_bias is None else add_bias(z, z_bias)), weight, bias)
    if library.recorded(z, weight, bias, z_bias):
        return _ReluDense.apply(z, z_bias, weight, bias)
    return cpu_dense.relu_dense(z, z_bias, weight, bias)


def joined(z: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the steps are run as one."""
    if z.dim() != 2 or not matter(z) or not z.is_contiguous() or library.traced(z) or torch.is_autocast_enabled("cpu"):
        return False
    return all(p is None or (p.dtype == z.dtype and p.device == z.device) for p in parameters)


class _ReluDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, z_bias: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(z, z_bias, weight)
        plain = [None if t is None else t.detach() for t in (z_bias, bias)]
        return cpu_dense.relu_dense(z.detach(), plain[0], weight.detach(), plain[1])

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        z, z_bias, weight = ctx.saved_tensors
        (grad,) = grads
        need_z, need_z_bias, need_weight, need_bias = ctx.needs_input_grad
        # create_graph=True: gradients must be differentiable themselves
        run = reference_dense.relu_dense_grad if torch.is_grad_enabled() else cpu_dense.relu_dense_grad
        dz, dz_bias, dweight, dbias = run(z, z_bias, weight, grad, need_z=need_z or need_z_bias)
        wanted = ((dz, need_z), (dz_bias, need_z_bias), (dweight, need_weight), (dbias, need_bias))
        return tuple(found if needed else None for found, needed in wanted)
