"""Gradients of max and min in Triton, over the transposed matrix: rows are sources j, columns destinations i.

An edge takes part where its message attains out[i]; share[i] = grad[i] / ties[i] then flows to it.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import REDUCES, accumulate_type
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import acc_of, at_entry, locate, plain, power, tiles, vector
from stretto.kernels.triton.pieces import pieces
from stretto.kernels.triton.spmm import _hubs, blocks

SIZES = ["windows", "chunk", "width"]


@jit
def flowing(v, w, out, share, at, inside, X: tl.constexpr):
    """share where the message v * w, in the type of x, equals out; else 0. A NaN reaches all entries, as in torch."""
    most = tl.load(out + at, mask=inside, other=0.0)
    part = tl.load(share + at, mask=inside & ((v * w).to(X) == most), other=0.0)
    return tl.where(most == most, part, most.to(part.dtype))


@kernel(*SIZES, "heads", "head_width")
def _dx(
    rowptr, row_of, windows, chunk, col, edge_id, x, weight, heads, head_width, out, share, dx, part, width,
    PER_HEAD: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    wide = width // VEC * VEC
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < wide
    v = tl.load(x + row * wide + k, mask=live, other=0.0).to(ACC)
    acc = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & live[None, :]
        at = (at_entry(col, e, there) * (width // VEC) * VEC)[:, None] + k[None, :]
        if weight is None:
            acc += flowing(v[None, :], 1.0, out, share, at, inside, x.dtype.element_ty)
        else:
            w_at = at_entry(edge_id, e, there)
            if PER_HEAD:
                head = (k // head_width)[None, :]
                w = tl.load(weight + w_at[:, None] * heads + head, mask=inside, other=0.0)
            else:
                w = tl.load(weight + w_at, mask=there, other=0.0)[:, None]
            acc += w * flowing(v[None, :], w, out, share, at, inside, x.dtype.element_ty)
    total = tl.sum(acc, 0)
    if slot >= 0:
        tl.store(part + slot.to(tl.int64) * width + k, total, mask=live)
    else:
        tl.store(dx + row * width + k, total, mask=live)


@kernel(*SIZES, "weight_heads", "weight_width")
def _dweight(
    rowptr, row_of, windows, chunk, col, edge_id, x, weight, weight_heads, weight_width, out, share, dweight, width,
    ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row, _, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        i = at_entry(col, e, there)
        w_at = at_entry(edge_id, e, there) * weight_heads
        for h in range(weight_heads):
            w = tl.load(weight + w_at + h, mask=there, other=0.0)[:, None]
            dots = tl.full((BLOCK_E, BLOCK_F), 0.0, ACC)
            for first in range(0, weight_width, BLOCK_F):
                f = first + tl.arange(0, BLOCK_F)
                k = h * weight_width + f
                live = f < weight_width
                v = tl.load(x + row * width + k, mask=live, other=0.0).to(ACC)[None, :]
                at = i[:, None] * width + k[None, :]
                inside = there[:, None] & live[None, :]
                dots += v * flowing(v, w, out, share, at, inside, x.dtype.element_ty)
            tl.store(dweight + w_at + h, tl.sum(dots, 1), mask=there)


def spmm_extremum_grad(
    csr_t: Csr, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor, *, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """reference.spmm_extremum_grad."""
    x, out, share = x.contiguous(), out.contiguous(), share.contiguous()
    acc = accumulate_type(x.dtype)
    heads, head_width = (x.size(1), x.size(2)) if x.dim() == 3 else (1, x.size(1))
    width = heads * head_width
    dx = x.new_empty(x.shape, dtype=acc) if need_x else None
    dweight = x.new_empty(weight.shape, dtype=acc) if need_weight and weight is not None else None
    if x.numel() == 0 or csr_t.num_edges == 0:
        return (None if dx is None else dx.zero_()), (None if dweight is None else dweight.zero_())
    cut = pieces(csr_t)
    values = plain(weight, x.dtype)
    edge_id = csr_t.edge_id if weight is not None else None
    per_head = weight is not None and weight.dim() == 2
    if dx is not None:
        vec = vector(out, share, width=width)
        edges, cols = blocks(width, share, "max")
        across = tiles(width, cols)
        partial = x.new_empty(cut.windows, width, dtype=acc)
        _dx[(cut.count, across)](
            *cut.args, csr_t.col, edge_id, x, values, heads, head_width, out, share, dx, partial,
            width, PER_HEAD=per_head, ACC=acc_of(x.dtype), VEC=vec, BLOCK_E=edges, BLOCK_K=cols, num_warps=1,
        )  # fmt: skip
        if cut.windows:
            _hubs[(cut.windows, across)](
                *cut.args, partial, None, None, None, 0, 1.0, dx, None, width,
                REDUCE=REDUCES["sum"], TIES=False, ACC=acc_of(x.dtype), BLOCK_S=8, BLOCK_K=cols, num_warps=1,
            )  # fmt: skip
    if dweight is not None:
        weight_heads, weight_width = (heads, head_width) if per_head else (1, width)
        _dweight[(cut.count,)](
            *cut.args, csr_t.col, edge_id, x, values, weight_heads, weight_width, out, share, dweight,
            width, ACC=acc_of(x.dtype), BLOCK_E=16, BLOCK_F=power(weight_width, 64), num_warps=1,
        )  # fmt: skip
    return dx, dweight
