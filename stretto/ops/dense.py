"""dense: x W' + b as torch's linear has it; on a device, the sum over all rows that b's gradient is runs in our kernel.

torch takes several times as long for that sum as memory asks. On a CPU the gradient of a narrow W is a sum over all
rows that torch's GEMM would take one row after the other: it is taken in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto import kernels
from stretto.kernels.cpu_dense import MANY, SKINNY
from stretto.ops import library, taped
from stretto.ops.kernel import differentiable
from stretto.ops.product import product, product_and_sums
from stretto.ops.tall_product import narrow_product

LARGE = 1 << 22  # values below which torch's one launch costs less than our two


def column_sum(x: Tensor) -> Tensor:
    """Sum over the rows; no autograd. x [n, k] -> [k]."""
    run = kernels.backend(x.device).column_sum if x.numel() >= LARGE else None
    if run is None or x.dtype not in kernels.DTYPES or type(x) is not Tensor:
        return taped.column_sum(x)
    sums: Tensor = run(x)
    return sums


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as torch's linear does. x [n, i], weight [o, i], bias [o] -> [n, o]."""
    own = bias is not None and kernels.backend(x.device).column_sum is not None and x.dim() == 2
    if not (own or _skinny(x, weight)) or library.traced(x) or kernels.autocasts(x):
        return F.linear(x, weight, bias)
    if (
        x.dtype != weight.dtype
        or (bias is not None and weight.dtype != bias.dtype)
        or not library.recorded(x, weight, bias)
    ):
        return F.linear(x, weight, bias)
    out: Tensor = _dense(product, x, weight, bias)
    return out


def dense_of_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply an x that sums have moved to: a row has many terms, which may cancel, and gets few columns.

    What stock adds up edge by edge is added up here one term after the other, if it is left to torch's GEMM.

    x [n, i], weight [o, i] -> [n, o]
    """
    own = kernels.on_host(x) and x.dim() == 2 and x.dtype == weight.dtype and weight.size(0) < SKINNY
    if not own or library.traced(x) or kernels.autocasts(x):
        return dense(x, weight)
    out: Tensor = _dense(_of_sums, x, weight)
    return out


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Add a bias to every row. x [n, k], bias [k] -> [n, k]."""
    own = kernels.backend(x.device).column_sum is not None and x.dim() == 2 and x.dtype == bias.dtype
    if not own or library.traced(x):
        return x + bias
    out: Tensor = _add_bias(None, x, bias)
    return out


def plus_dense(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add x W' to a total. total [n, o], x [n, i], weight [o, i] -> [n, o]."""
    plain = library.traced(x) or not library.recorded(x, weight) or kernels.autocasts(x)
    if plain or not _skinny(x, weight) or not total.dtype == x.dtype == weight.dtype:
        return torch.addmm(total, x, weight.t())
    out: Tensor = _plus_dense(None, total, x, weight)
    return out


def _skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's GEMM would lose digits in the gradient of W, and W learns on a CPU."""
    if not kernels.on_host(x) or x.dim() != 2 or not weight.requires_grad:
        return False
    return x.size(0) > MANY and min(weight.shape) < SKINNY


def _dense_gradient(by: Any, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    (x, weight), (grad,) = saved, grads
    dx = (grad @ weight if torch.is_grad_enabled() else product(grad, weight)) if needs[0] else None
    return dx, *linear_grads(grad, x, needs[1], len(needs) > 2 and needs[2])[: len(needs) - 1]


def _plus_gradient(_: None, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    (_, x, weight), (grad,) = saved, grads
    dx, dweight = grad @ weight if needs[1] else None, weight_grad(grad, x) if needs[2] else None
    return grad if needs[0] else None, dx, dweight


_dense = differentiable(
    "Dense",
    lambda by, x, weight, bias=None: by(x, weight.t(), bias),
    _dense_gradient,
    saves=2,
)
_plus_dense = differentiable(
    "PlusDense",
    lambda _, total, x, weight: torch.addmm(total, x, weight.t()),
    _plus_gradient,
    saves=lambda tensors, result, needs: (None, *tensors[1:]),
)
_add_bias = differentiable(
    "AddBias",
    lambda _, x, bias: x + bias,
    lambda _, saved, grads, needs: (grads[0] if needs[0] else None, row_sum(grads[0]) if needs[1] else None),
    saves=0,
)


def _of_sums(x: Tensor, w: Tensor, bias: None) -> Tensor:
    return narrow_product(x, w)


def linear_grads(grad: Tensor, x: Tensor, need_weight: bool, need_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of W and b in x W' + b; differentiable where wanted. grad [n, o], x [n, i] -> [o, i], [o]."""
    if not (need_weight and need_bias) or torch.is_grad_enabled():
        return weight_grad(grad, x) if need_weight else None, row_sum(grad) if need_bias else None
    weight, bias = product_and_sums(grad, x)
    return weight, column_sum(grad) if bias is None else bias


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of W in x W': differentiable where that is wanted. grad [n, o], x [n, i] -> [o, i]."""
    return grad.t() @ x if torch.is_grad_enabled() else product(grad.t(), x)


def row_sum(grad: Tensor) -> Tensor:
    """The gradient of a bias: differentiable where that is wanted. grad [n, k] -> [k]."""
    return grad.sum(0) if torch.is_grad_enabled() else column_sum(grad)
