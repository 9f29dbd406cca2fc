"""Dense products in plain, differentiable PyTorch: specification, oracle and fallback."""

from __future__ import annotations

import torch
from torch import Tensor


def product(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """x w + bias, or factor x w + add. x [m, k], w [k, n] -> [m, n]."""
    if add is not None:
        return torch.addmm(add, x, w, alpha=factor)
    return x @ w if bias is None else torch.addmm(bias, x, w)


def relu_dense(z: Tensor, z_bias: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """relu(z + z_bias) W' + bias. z [n, i], weight [o, i] -> [n, o]."""
    return torch.nn.functional.linear(torch.relu(z if z_bias is None else z + z_bias), weight, bias)


def relu_dense_grad(
    z: Tensor, z_bias: Tensor | None, weight: Tensor, grad: Tensor, *, need_z: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of z, z_bias, weight and bias. need_z only spares a kernel work."""
    before = z if z_bias is None else z + z_bias
    dz = torch.ops.aten.threshold_backward(grad @ weight, before, 0)
    return dz, dz.sum(0), grad.t() @ torch.relu(before), grad.sum(0)


def product_in_blocks(x: Tensor, w: Tensor) -> Tensor:
    """x w. x [m, k], w [k, n] -> [m, n]."""
    return x @ w
