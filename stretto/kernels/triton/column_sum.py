"""Sums of columns in Triton, in two launches: blocks of rows, then the blocks' sums, in order."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton import tape
from stretto.kernels.triton.launch import kernel
from stretto.kernels.triton.operands import acc_of, power, rows, tiles, vector

MOST_BLOCKS = 512  # enough to fill a device, few enough for their sums to cost nothing
LEAST_ROWS = 128


@kernel("ld", "num_rows", "width", "rows_each")
def _sum(
    x, ld, out, num_rows, width, rows_each,
    ADD: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wide = width // VEC * VEC
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < wide
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, num_rows)
    acc = tl.full((BLOCK_R, BLOCK_K), 0.0, ACC)
    for base in range(first, last, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R)
        at = r[:, None] * (ld // VEC * VEC) + k[None, :]
        acc += tl.load(x + at, mask=(r < last)[:, None] & live[None, :], other=0.0).to(ACC)
    to = tl.program_id(0) * width + k
    total = tl.sum(acc, 0)
    if ADD:
        total += tl.load(out + to, mask=live, other=0.0).to(ACC)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


def column_sum(x: Tensor) -> Tensor:
    """x [n, k] -> [k]; summed in the accumulation type."""
    (found,) = tape.run(tape.GENERAL, "column sum", _column_sum, (x,))
    assert found is not None
    return found


def _column_sum(x: Tensor) -> tuple[Tensor]:
    x = rows(x)
    n, width = x.shape
    out = x.new_empty(width)
    if out.numel() == 0 or n == 0:
        return (out.zero_(),)
    acc = accumulate_type(x.dtype)
    rows_each = max(LEAST_ROWS, tiles(n, MOST_BLOCKS))
    blocks = tiles(n, rows_each)
    block = power(width, 128)
    flags = {"ADD": False, "ACC": acc_of(x.dtype), "BLOCK_R": max(4, 2048 // block), "BLOCK_K": block, "num_warps": 4}
    across = tiles(width, block)
    if blocks == 1:
        _sum[(1, across)](x, x.stride(0), out, n, width, n, VEC=vector(x, width=width), **flags)
        return (out,)
    part = x.new_empty(blocks, width, dtype=acc)
    _sum[(blocks, across)](x, x.stride(0), part, n, width, rows_each, VEC=vector(x, width=width), **flags)
    return (sum_few(part, out),)


def sum_few(part: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """column_sum of a few hundred rows in one launch, or that added to out. part [n, k] contiguous -> [k]."""
    n, width = part.shape
    out = part.new_empty(width) if out is None else out
    block = power(width, 8)  # few rows: spread over columns
    _sum[(1, tiles(width, block))](
        part, width, out, n, width, n, ADD=add, ACC=acc_of(part.dtype), VEC=vector(part, width=width),
        BLOCK_R=power(n, 512), BLOCK_K=block, num_warps=4,
    )  # fmt: skip
    return out
