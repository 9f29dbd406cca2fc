"""Dense products inside our own autograd Functions, on the CPU: torch's GEMM into kept buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.kernels import pool
from stretto.kernels.denormals import DenormalsAreZero, matter


def product(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """x w + bias, or factor x w + add, which is overwritten; no autograd. x [m, k], w [k, n] -> [m, n]"""
    if not (matter(x) or matter(w)):
        return _product(x, w, bias, add, factor)
    with DenormalsAreZero():
        return _product(x, w, bias, add, factor)


def _product(x: Tensor, w: Tensor, bias: Tensor | None, add: Tensor | None, factor: float) -> Tensor:
    if add is not None:
        return add.addmm_(x, w, alpha=factor)
    out = pool.empty((x.size(0), w.size(1)), x.dtype)
    if bias is not None:
        return torch.addmm(bias, x, w, out=out)
    return torch.mm(x, w, out=out)
