"""Dense products inside our own autograd Functions, on the CPU: torch's GEMM into kept buffers; and relu(z + b) W' + c.

The latter runs in a kernel of our own where rows are narrow (csrc/kernels/dense.cpp), else by torch's GEMM in blocks
that stay in the cache from one step to the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stretto.kernels import native
from stretto.kernels.denormals import DenormalsAreZero, matter
from stretto.kernels.schema import CPU, DTYPES, WIDE
from stretto.memory import pool

BLOCK = 1 << 20  # bytes of z and of the result in a block
LEAST_ROWS = 1024  # below, a GEMM spends its time on packing W
WIDEST = {"avx512": 256}  # values in a row of z or of the result that our kernel takes, by instruction set
WIDEST_ELSEWHERE = 128
ROWS_PER_TASK = 2048
MOST_TASKS = 64
SKINNY = 17  # columns below which torch's GEMM adds many terms, or all, one after the other
MANY, SUMMED = 512, 64  # terms from which on that loses digits; terms of a block
RESULTS = 1 << 22  # bytes of the results of blocks that are added up together


def product(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """x w + bias, or factor x w + add, which is overwritten; no autograd. x [m, k], w [k, n] -> [m, n]."""
    if not (matter(x) or matter(w)):
        return _product(x, w, bias, add, factor)
    with DenormalsAreZero():
        return _product(x, w, bias, add, factor)


def _product(x: Tensor, w: Tensor, bias: Tensor | None, add: Tensor | None, factor: float) -> Tensor:
    if x.size(1) > max(MANY, x.size(0)) and min(x.size(0), w.size(1)) < SKINNY:  # over the rows of two tall matrices
        out = product_in_blocks(x, w)
        if add is not None:
            return add.add_(out, alpha=factor)
        return out if bias is None else out.add_(bias)
    if add is not None:
        return add.addmm_(x, w, alpha=factor)
    out = pool.empty((x.size(0), w.size(1)), x.dtype)
    if bias is not None:
        return torch.addmm(bias, x, w, out=out)
    return torch.mm(x, w, out=out)


def product_in_blocks(x: Tensor, w: Tensor) -> Tensor:
    """x w, where every block of terms is summed by itself. x [m, k], w [k, n] -> [m, n]."""
    k, size = x.size(1), x.size(0) * w.size(1)
    at_once = SUMMED * max(RESULTS // max(size * x.element_size(), 1), 1)
    if k <= at_once:
        return _sum_of_blocks(x, w)
    total = torch.zeros(x.size(0), w.size(1), dtype=torch.float64, device=CPU)
    for first in range(0, k, at_once):
        total += _sum_of_blocks(x[:, first : first + at_once], w[first : first + at_once])
    return total.to(x.dtype)


def _sum_of_blocks(x: Tensor, w: Tensor) -> Tensor:
    whole = x.size(1) // SUMMED * SUMMED
    blocks = x[:, :whole].unflatten(1, (-1, SUMMED)).transpose(0, 1).bmm(w[:whole].unflatten(0, (-1, SUMMED)))
    out = torch.sum(blocks, 0)
    return out if whole == x.size(1) else out.add_(x[:, whole:] @ w[whole:])


def relu_dense(z: Tensor, z_bias: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z [n, i], weight [o, i] -> [n, o]."""
    out = pool.empty((z.size(0), weight.size(0)), z.dtype)
    if _narrow(z, weight):
        z, turned = z.contiguous(), weight.t().contiguous()
        z_bias, bias = _side_by_side(z_bias, z.size(1)), _side_by_side(bias, weight.size(0))
        native.kernel("stretto_relu_dense", DTYPES[z.dtype], z, *z.shape, z_bias, turned, weight.size(0), bias, out)
        return out
    transposed = weight.t()
    with DenormalsAreZero():
        for rows in _blocks(z, weight.size(0)):
            active = _active(z[rows], z_bias)
            if bias is None:
                torch.mm(active, transposed, out=out[rows])
            else:
                torch.addmm(bias, active, transposed, out=out[rows])
    return out


def relu_dense_grad(
    z: Tensor, z_bias: Tensor | None, weight: Tensor, grad: Tensor, *, need_z: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Gradients of z, z_bias (with that of z only), weight and bias."""
    dz = pool.empty(z.shape, z.dtype) if need_z else None
    if _narrow(z, weight):
        return _narrow_grad(
            z.contiguous(), _side_by_side(z_bias, z.size(1)), weight.contiguous(), grad.contiguous(), dz
        )
    dz_bias = z.new_zeros(z.size(1), dtype=torch.float64) if need_z and z_bias is not None else None
    dweight, dbias = torch.zeros_like(weight), weight.new_zeros(weight.size(0), dtype=torch.float64)
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
    return dz, None if dz_bias is None else dz_bias.to(z.dtype), dweight, dbias.to(z.dtype)


def _narrow_grad(
    z: Tensor, z_bias: Tensor | None, weight: Tensor, grad: Tensor, dz: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    (rows, i), o = z.shape, weight.size(0)
    tasks = min(-(-rows // ROWS_PER_TASK), MOST_TASKS)
    shares = torch.empty(tasks, o * i + o + i, dtype=z.dtype, device=CPU)
    sums = shares, tasks
    native.kernel("stretto_relu_dense_grad", DTYPES[z.dtype], z, rows, i, z_bias, weight, o, grad, dz, *sums)
    dweight, dbias, dz_bias = shares.sum(0).split([o * i, o, i])
    return dz, None if dz is None else dz_bias, dweight.view(o, i), dbias


def _narrow(z: Tensor, weight: Tensor) -> bool:
    """Whether our kernel is made for such sizes."""
    return z.dtype in WIDE and max(weight.shape) <= WIDEST.get(native.isa(), WIDEST_ELSEWHERE)


def _blocks(z: Tensor, width: int) -> Iterator[slice]:
    rows = max(BLOCK // (z.element_size() * (z.size(1) + width)), LEAST_ROWS)
    return (slice(first, first + rows) for first in range(0, z.size(0), rows))


def _active(z: Tensor, z_bias: Tensor | None) -> Tensor:
    return z.relu() if z_bias is None else (z + z_bias).relu_()


def _side_by_side(bias: Tensor | None, width: int) -> Tensor | None:
    """A bias as our kernels read it, [width] without gaps: a user's may be one number, or part of something larger."""
    return None if bias is None else bias.expand(width).contiguous()
