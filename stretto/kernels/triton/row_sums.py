"""Sums of a few numbers per edge by row in Triton: several rows to a program, since one takes less than its start."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import REDUCES
from stretto.kernels.triton.attention import by_edge
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import acc_of, at_entry, locate, offsets, power, tiles
from stretto.kernels.triton.pieces import Pieces, pieces
from stretto.kernels.triton.spmm import SLOTS, spmm
from stretto.kernels.triton.spmm import _hubs as sum_hubs

NARROW = 8  # numbers per edge at most
ROWS, EDGES, WARPS = 4, 32, 2  # of a program: its tile holds edges of several rows


@jit
def of_window(
    rowptr, row_of, windows, chunk, edge_id, score, part, heads,
    ACC: tl.constexpr, INT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A window of a hub, into its slot."""
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    h = tl.arange(0, BLOCK_H)
    start, end = start.to(INT), end.to(INT)
    if row >= 0:
        sums = tl.full((BLOCK, BLOCK_H), 0.0, ACC)
        for base in range(start, end, BLOCK):
            e = base + tl.arange(0, BLOCK)
            at = (at_entry(edge_id, e, e < end, INT) * heads)[:, None] + h[None, :]
            sums += tl.load(score + at, mask=(e < end)[:, None] & (h < heads)[None, :], other=0.0)
        tl.store(part + slot.to(tl.int64) * heads + h, tl.sum(sums, 0), mask=h < heads)


@jit
def of_rows(
    first, rowptr, chunk, edge_id, score, out, rows, heads,
    ACC: tl.constexpr, INT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some rows, but for hubs."""
    h = tl.arange(0, BLOCK_H)
    r = first.to(tl.int64) + tl.arange(0, BLOCK_R)
    start = tl.load(rowptr + r, mask=r < rows, other=0).to(INT)
    length = (tl.load(rowptr + r + 1, mask=r < rows, other=0).to(INT) - start).to(tl.int32)
    mine = (r < rows) & (length <= chunk)
    length = tl.where(mine, length, 0)
    acc = tl.full((BLOCK_R, BLOCK_E, BLOCK_H), 0.0, ACC)
    for base in range(0, tl.max(length, 0), BLOCK_E):
        k = base + tl.arange(0, BLOCK_E)
        there = k[None, :] < length[:, None]
        at = (at_entry(edge_id, start[:, None] + k[None, :], there, INT) * heads)[:, :, None] + h[None, None, :]
        acc += tl.load(score + at, mask=there[:, :, None] & (h < heads)[None, None, :], other=0.0)
    to = (r * heads)[:, None] + h[None, :]
    tl.store(out + to, tl.sum(acc, 1), mask=mine[:, None] & (h < heads)[None, :])


@kernel("windows", "chunk", "rows", "heads")
def _sums(
    rowptr, row_of, windows, chunk, edge_id, score, out, part, rows, heads,
    ACC: tl.constexpr, INT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < windows:
        of_window(
            rowptr, row_of, windows, chunk, edge_id, score, part, heads, ACC, INT, BLOCK_R * BLOCK_E, BLOCK_H
        )  # fmt: skip
    else:
        first = (tl.program_id(0) - windows) * BLOCK_R
        of_rows(first, rowptr, chunk, edge_id, score, out, rows, heads, ACC, INT, BLOCK_R, BLOCK_E, BLOCK_H)


def row_sums(csr: Csr, score: Tensor) -> Tensor:
    """Sums of a row's edges. score [E, h] in the user's order, in the accumulation type -> [n, h]."""
    heads = score.size(1)
    if heads > NARROW:
        return spmm(by_edge(csr), score)[0]
    cut = pieces(csr)
    out, part = score.new_empty(csr.num_rows, heads), score.new_empty(cut.windows, heads)
    if out.numel():
        _sums[(cut.windows + tiles(csr.num_rows, ROWS),)](
            *cut.args, csr.edge_id, score, out, part, csr.num_rows, heads,
            ACC=acc_of(score.dtype), INT=offsets(score), BLOCK_R=ROWS, BLOCK_E=EDGES, BLOCK_H=power(heads, NARROW),
            num_warps=WARPS,
        )  # fmt: skip
        merge(cut, part, out)
    return out


def merge(cut: Pieces, part: Tensor, into: Tensor) -> None:
    """Sums of the hubs' slots, in order, into their rows. part [slots, ...], into [rows, ...]."""
    width = part.stride(0)
    block = power(width, 128)
    if cut.windows and part.numel():
        sum_hubs[(cut.windows, tiles(width, block))](
            *cut.args, part, None, None, None, 0, 1.0, into, None, width,
            REDUCE=REDUCES["sum"], TIES=False, ACC=acc_of(part.dtype), BLOCK_S=SLOTS, BLOCK_K=block, num_warps=1,
        )  # fmt: skip
