"""relu_product: relu(z) W' + b on a device, as one step: relu(z) is no array, forward or backward.

For tall fp32 matrices, on the tensor cores (kernels/triton/product.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.kernels.reference_dense import relu_dense_grad
from stretto.ops import library
from stretto.ops.dense import column_sum
from stretto.ops.kernel import differentiable
from stretto.ops.product import LEAST_ROWS, MOST_INNER, _ours, stays_fp32

PLAIN = (Tensor, torch.nn.Parameter)


def takes(z: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether relu_product is made for these."""
    return kernels.has_own_memory(z.device) and z.dim() == 2 and not library.traced(z) and _ours(z, weight.t(), bias)


def follows(rows: int, like: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels of relu_product take an array [rows, i] that is yet to be made, on the device of `like`."""
    if rows < LEAST_ROWS or library.traced(like) or type(weight) not in PLAIN or not stays_fp32(like):
        return False
    if weight.dtype != like.dtype or weight.device != like.device or weight.size(0) % 4 or weight.size(1) % 4:
        return False
    if weight.size(1) > MOST_INNER or kernels.backend(like.device).transposed_product is None:
        return False
    return bias is None or (bias.dtype == like.dtype and bias.device == like.device and bias.is_contiguous())


def relu_product(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return relu(z) W' + bias. z [n, i], weight [o, i], bias [o] -> [n, o], where `takes` agrees."""
    out: Tensor = _relu_product(None, z, weight, bias)
    return out


def _run(_: None, z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = kernels.backend(z.device).product(z, weight.t(), bias, relu=True)
    return out


def _gradients(_: None, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    (z, weight), (need_z, need_weight, need_bias) = saved, needs
    if torch.is_grad_enabled():  # create_graph=True: gradients must be differentiable themselves
        every = relu_dense_grad(z, None, weight, grads[0])
        return tuple(every[k] if need else None for k, need in zip((0, 2, 3), needs, strict=True))
    grad, backend = grads[0].contiguous(), kernels.backend(z.device)
    dz = backend.product(grad, weight, gate=z) if need_z else None
    if not need_weight:
        return dz, None, column_sum(grad) if need_bias else None
    return dz, *backend.transposed_product(grad, z, relu=True, sums=need_bias)


_relu_product = differentiable("ReluProduct", _run, _gradients, saves=2)
