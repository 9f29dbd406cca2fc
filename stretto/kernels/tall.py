"""Dense products of tall matrices on the CPU by our own kernel (csrc/kernels/product.h); torch: cpu_dense.py."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.kernels import native
from stretto.kernels.schema import CPU, DTYPES, WIDE
from stretto.memory import pool

TALL = 4096  # rows
MOST_SUMMED = 1024  # terms of a sum
MOST_WIDE = 2048  # columns of a result that has many rows
MOST_SMALL = 1 << 18  # values of the small matrix; half as many where it is the result, of which every task has one
ROWS_PER_SUM, MOST_SUM_TASKS = 4096, 32


def shape_of(x: Tensor, w: Tensor, bias: Tensor | None, add: Tensor | None) -> str | None:
    """What x w is to our kernel: the product of a "tall" x, a "sum" over the rows of two tall ones, or nothing."""
    if x.dtype not in WIDE or w.dtype != x.dtype or w.size(0) != x.size(1) or w.device != x.device:
        return None
    if x.layout != torch.strided or w.layout != torch.strided:
        return None
    others = [t for t in (bias, add) if t is not None]
    if _is_tall(x, w):
        return "tall" if all(t.dtype == x.dtype and t.is_contiguous() for t in others) else None
    return "sum" if not others and _sums_rows(x, w) else None


def _is_tall(x: Tensor, w: Tensor) -> bool:
    (m, k), n = x.shape, w.size(1)
    return x.stride(1) == 1 and m >= TALL and k <= MOST_SUMMED and n <= MOST_WIDE and k * n <= MOST_SMALL


def _sums_rows(x: Tensor, w: Tensor) -> bool:
    (m, k), n = x.shape, w.size(1)
    small = max(m, n) <= MOST_WIDE and m * n <= MOST_SMALL // 2
    return x.stride(0) == 1 and w.stride(1) == 1 and k >= TALL and small


def tall_product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    add: Tensor | None = None,
    factor: float = 1.0,
    beside: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x w + bias, or factor x w + add, which is overwritten, where shape_of says what it is; no autograd.

    beside: another tall matrix and its small one, whose product is added (and no factor).
    """
    if x.size(0) < x.size(1):
        return sum_product(x, w)[0]
    (m, k), n = x.shape, w.size(1)
    out = pool.empty((m, n), x.dtype) if add is None else add
    bias = None if bias is None else bias.expand(n).contiguous()  # the kernel reads n values side by side
    other: tuple[Tensor | int | None, ...] = (None, 0, 0, None, 0, 0)
    if beside is not None:
        y, v = beside
        other = (y, y.stride(0), y.size(1), v, *v.stride())
    operands = x, m, x.stride(0), w, k, *w.stride(), n, bias, factor, add is not None
    native.kernel("stretto_tall_product", DTYPES[x.dtype], *operands, *other, out)
    return out


def sum_product(x: Tensor, w: Tensor, *, sums: bool = False) -> tuple[Tensor, Tensor | None]:
    """x w where shape_of says "sum", and if asked for the sums of x over the rows that are summed. x [m, k], w [k, n]
    -> [m, n], [m]"""
    (m, k), n = x.shape, w.size(1)
    tasks = min(-(-k // ROWS_PER_SUM), MOST_SUM_TASKS)
    parts = pool.empty((tasks, m, n), x.dtype)
    totals = torch.empty(tasks, m, dtype=torch.float64, device=CPU) if sums else None
    operands = x, k, x.stride(1), m, w, w.stride(0), n
    native.kernel("stretto_sum_product", DTYPES[x.dtype], *operands, parts, totals, tasks)
    return parts.sum(0), None if totals is None else totals.sum(0).to(x.dtype)
