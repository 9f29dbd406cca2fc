"""relu_dense: relu(z + b) W' + c, the steps that make up most of an MLP, as one.

For large matrices on the CPU (kernels/cpu_dense.py) and tall ones on a device (relu_product.py) relu(z + b) is never an
array of its own, and the gradient is masked where it is made. Elsewhere: step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.kernels import cpu_dense, reference_dense
from stretto.kernels.denormals import matter
from stretto.ops import library, relu_product
from stretto.ops.dense import add_bias, dense
from stretto.ops.kernel import differentiable


def relu_dense(z: Tensor, weight: Tensor, bias: Tensor | None = None, z_bias: Tensor | None = None) -> Tensor:
    """Return relu(z + z_bias) W' + bias. z [n, i], weight [o, i], bias [o], z_bias [i] -> [n, o]."""
    if z_bias is None and relu_product.takes(z, weight, bias):
        return relu_product.relu_product(z, weight, bias)
    if not joined(z, weight, bias, z_bias) or weight.dim() != 2 or weight.size(1) != z.size(1):
        return dense(F.relu(z if z_bias is None else add_bias(z, z_bias)), weight, bias)
    out: Tensor = _relu_dense(None, z, z_bias, weight, bias)
    return out


def joined(z: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the steps are run as one."""
    if z.dim() != 2 or not matter(z) or not z.is_contiguous() or library.traced(z) or torch.is_autocast_enabled("cpu"):
        return False
    return all(p is None or (p.dtype == z.dtype and p.device == z.device) for p in parameters)


def _run(_: None, *tensors: Tensor | None) -> Tensor:
    z, z_bias, weight, bias = [None if t is None else t.detach() for t in tensors]
    assert z is not None
    assert weight is not None
    return cpu_dense.relu_dense(z, z_bias, weight, bias)


def _gradients(_: None, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    # create_graph=True: gradients must be differentiable themselves
    run = reference_dense.relu_dense_grad if torch.is_grad_enabled() else cpu_dense.relu_dense_grad
    z, z_bias, weight = saved
    made = run(z, z_bias, weight, grads[0], need_z=needs[0] or needs[1])
    return tuple(grad if needed else None for grad, needed in zip(made, needs, strict=True))


_relu_dense = differentiable("ReluDense", _run, _gradients, saves=3)
