"""sddmm in Triton: a piece of a row per program; the row at its own end is read once, the other end gathered."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton.launch import kernel
from stretto.kernels.triton.operands import acc_of, at_entry, locate, power, rows, tiles, vector
from stretto.kernels.triton.pieces import pieces
from stretto.kernels.triton.scores import row_dot


@kernel("windows", "chunk", "lda", "ldb", "heads", "width")
def _dot(
    rowptr, row_of, windows, chunk, col, edge_id, a, lda, b, ldb, out, heads, width,
    ACC: tl.constexpr, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row, _, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    wide = width // VEC * VEC
    at_a = (row * (lda // VEC * VEC) + h * wide)[None, :]
    own = (h < heads)[None, :]
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & own
        at_b = (at_entry(col, e, there) * (ldb // VEC * VEC))[:, None] + (h * wide)[None, :]
        d = row_dot(a, at_a, own, b, at_b, inside, wide, BLOCK_E, BLOCK_H, ACC, BLOCK_F)
        to = (at_entry(edge_id, e, there) * heads)[:, None] + h[None, :]
        tl.store(out + to, d, mask=inside)


@kernel("windows", "chunk", "heads")
def _add(
    rowptr, row_of, windows, chunk, col, edge_id, a, b, out, heads,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row, _, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < heads
    if end > start:
        own = tl.load(a + row * heads + h, mask=live, other=0.0)
        for base in range(start, end, BLOCK_E):
            e = base + tl.arange(0, BLOCK_E)
            there = e < end
            inside = there[:, None] & live[None, :]
            j = at_entry(col, e, there)
            other = tl.load(b + j[:, None] * heads + h[None, :], mask=inside, other=0.0)
            to = at_entry(edge_id, e, there)
            tl.store(out + to[:, None] * heads + h[None, :], own[None, :] + other, mask=inside)


def sddmm(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """reference.sddmm."""
    a, b = rows(a), rows(b)
    heads, width = a.size(1), a.size(2)
    out = a.new_empty(csr.num_edges, heads, dtype=accumulate_type(a.dtype))
    if out.numel() == 0:
        return out
    if width == 0:
        return out.zero_()
    cut = pieces(csr)
    block = power(width, 256)
    block_heads = power(heads, 256 // block)
    _dot[(cut.count, tiles(heads, block_heads))](
        *cut.args, csr.col, csr.edge_id, a, a.stride(0), b, b.stride(0), out, heads, width,
        ACC=acc_of(a.dtype), VEC=vector(a, b, width=width), BLOCK_E=max(2, min(32, 512 // (block * block_heads))),
        BLOCK_H=block_heads, BLOCK_F=block, num_warps=1,
    )  # fmt: skip
    return out


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """reference.sddmm_add; summed in the accumulation type."""
    acc, heads = accumulate_type(a.dtype), a.size(1)
    out = torch.empty(csr.num_edges, heads, dtype=acc, device=a.device)
    if out.numel():
        cut = pieces(csr)
        block = power(heads, 32)
        _add[(cut.count, tiles(heads, block))](
            *cut.args, csr.col, csr.edge_id, a.to(acc).contiguous(), b.to(acc).contiguous(), out,
            heads, BLOCK_E=max(8, 128 // block), BLOCK_H=block, num_warps=1,
        )  # fmt: skip
    return out.to(a.dtype)
