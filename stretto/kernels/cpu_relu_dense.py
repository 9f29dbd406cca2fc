"""relu(z + b) W' + c for narrow matrices, in our own kernel (csrc/kernels/relu_dense.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.kernels import native, pool

WIDEST = 128  # values in a row of z or of the result; beyond, torch's GEMM in blocks is as fast
ROWS_PER_TASK = 2048
MOST_TASKS = 64
_DTYPES = {torch.float32: 0, torch.float64: 1}


def fits(z: Tensor, width: int) -> bool:
    """Whether the kernel is there and made for such sizes."""
    return z.dtype in _DTYPES and z.size(1) <= WIDEST and width <= WIDEST and native.library() is not None


def forward(z: Tensor, z_bias: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z [n, i], weight [o, i] -> [n, o]"""
    z, turned = z.contiguous(), weight.t().contiguous()
    out = pool.empty((z.size(0), weight.size(0)), z.dtype)
    native.call(
        "stretto_relu_dense",
        _DTYPES[z.dtype],
        z.data_ptr(),
        *z.shape,
        _pointer(z_bias),
        turned.data_ptr(),
        weight.size(0),
        _pointer(bias),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def backward(
    z: Tensor, z_bias: Tensor | None, weight: Tensor, grad: Tensor, *, need_z: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of z, z_bias (with that of z only), weight and bias."""
    z, weight, grad = z.contiguous(), weight.contiguous(), grad.contiguous()
    (rows, i), o = z.shape, weight.size(0)
    tasks = min(-(-rows // ROWS_PER_TASK), MOST_TASKS)
    dz = pool.empty(z.shape, z.dtype) if need_z else None
    shares = torch.empty(tasks, o * i + o + i, dtype=z.dtype)
    native.call(
        "stretto_relu_dense_grad",
        _DTYPES[z.dtype],
        z.data_ptr(),
        rows,
        i,
        _pointer(z_bias),
        weight.data_ptr(),
        o,
        grad.data_ptr(),
        _pointer(dz),
        shares.data_ptr(),
        tasks,
        torch.get_num_threads(),
    )
    dweight, dbias, dz_bias = shares.sum(0).split([o * i, o, i])
    return dz, dz_bias if need_z else None, dweight.view(o, i), dbias


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
