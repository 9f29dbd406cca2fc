"""spmm in Triton: a piece of a row per program, a tile of edges x columns in flight.

Column tiles are the slow axis of the grid: while one runs, the slice of x it gathers from stays in the L2 cache.
"""

# ruff: noqa: SIM109, SIM114 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import REDUCES, accumulate_type
from stretto.kernels.triton import tape
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import acc_of, at_entry, hub_of, locate, offsets, plain, power, rows, tiles, vector
from stretto.kernels.triton.pieces import pieces

SLOTS = 8  # of a hub that are merged at once
TILE = 512  # values of a tile: loads in flight against registers (benchmarks/results/tiles.csv)
SIZES = ["windows", "chunk", "ldx", "ldy", "heads", "head_width", "width"]
OTHERS = {"sum": 0.0, "max": float("-inf"), "min": float("inf"), "mul": 1.0}  # what changes nothing
SUM, MAX, MIN, MUL = (tl.constexpr(REDUCES[name]) for name in ("sum", "max", "min", "mul"))


@jit
def identity(REDUCE: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """What changes nothing when combined. -> [ROWS, COLS]"""
    if REDUCE == SUM:
        return tl.full((ROWS, COLS), 0.0, ACC)
    elif REDUCE == MAX:
        return tl.full((ROWS, COLS), float("-inf"), ACC)
    elif REDUCE == MIN:
        return tl.full((ROWS, COLS), float("inf"), ACC)
    else:
        return tl.full((ROWS, COLS), 1.0, ACC)


@jit
def better(v, best, REDUCE: tl.constexpr):
    """Whether v replaces best. A NaN replaces anything and is replaced by nothing, as in torch."""
    if REDUCE == MAX:
        return (v > best) | (v != v)
    else:
        return (v < best) | (v != v)


@jit
def fold(best, count, REDUCE: tl.constexpr):
    """A tile's rows into one. -> [COLS], and for max and min how often it is attained."""
    if REDUCE == SUM:
        return tl.sum(best, 0), tl.sum(best, 0)
    elif REDUCE == MUL:  # its tiles have one row
        return tl.sum(best, 0), tl.sum(best, 0)
    else:
        lost = best != best
        if REDUCE == MAX:
            m = tl.max(tl.where(lost, float("-inf"), best), 0)
        else:
            m = tl.min(tl.where(lost, float("inf"), best), 0)
        ties = tl.sum(tl.where(best == m[None, :], count, 0.0), 0)
        return tl.where(tl.max(lost.to(tl.int32), 0) > 0, float("nan"), m), ties


@jit
def finish(acc, row, k, live, empty, row_scale, y, ldy, beta, out, width, REDUCE: tl.constexpr):
    """Empty rows, scaling, y, and the store of one row's tile."""
    if REDUCE == MAX or REDUCE == MIN:
        acc = tl.where(empty, 0.0, acc)
    if row_scale is not None:
        acc = acc * tl.load(row_scale + row)
    if y is not None:
        acc += beta * tl.load(y + row * ldy + k, mask=live, other=0.0).to(acc.dtype)
    tl.store(out + row * width + k, acc.to(out.dtype.element_ty), mask=live)


@jit
def scaled(
    v, weight, edge_id, col_scale, e, j, k, there, inside, heads, head_width,
    PER_HEAD: tl.constexpr, INT: tl.constexpr,
):  # fmt: skip
    """Rows times the weight of their edge, or of their edge and head, and the scale of their column."""
    if weight is not None:
        w_at = at_entry(edge_id, e, there, INT)
        if PER_HEAD:
            head = k // head_width
            v = v * tl.load(weight + w_at[:, None] * heads + head[None, :], mask=inside, other=1.0)
        else:
            v = v * tl.load(weight + w_at, mask=there, other=1.0)[:, None]
    if col_scale is not None:
        v = v * tl.load(col_scale + j, mask=there, other=1.0)[:, None]
    return v


@jit
def leave(total, often, part, part_ties, at_slot, live, TIES: tl.constexpr):
    """A piece's tile into its slot."""
    tl.store(part + at_slot, total, mask=live)
    if TIES:
        tl.store(part_ties + at_slot, often, mask=live)


@kernel(*SIZES)
def _pieces(
    rowptr, row_of, windows, chunk, col, edge_id, x, ldx, weight, heads, head_width, row_scale, col_scale, y, ldy, beta,
    out, ties, part, part_ties, width,
    REDUCE: tl.constexpr, OTHER: tl.constexpr, PER_HEAD: tl.constexpr, TIES: tl.constexpr, ACC: tl.constexpr,
    INT: tl.constexpr, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    start, end = start.to(INT), end.to(INT)
    wide = width // VEC * VEC  # the same number, known to be divisible: loads of VEC values at once
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < wide
    offs = tl.arange(0, BLOCK_E)
    acc = identity(REDUCE, ACC, BLOCK_E, BLOCK_K)
    count = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    ahead = at_entry(col, start + offs, start + offs < end, INT)
    for base in range(start, end, BLOCK_E):
        e = base + offs
        there = e < end
        j = ahead
        ahead = at_entry(col, e + BLOCK_E, e + BLOCK_E < end, INT)  # the next tile's, while this one's rows arrive
        at = j * (ldx // VEC) * VEC
        inside = there[:, None] & live[None, :]
        # A missing edge reads as what changes nothing; for max and min that still counts as a tie (see below).
        v = tl.load(x + at[:, None] + k[None, :], mask=inside, other=OTHER).to(ACC)
        v = scaled(v, weight, edge_id, col_scale, e, j, k, there, inside, heads, head_width, PER_HEAD, INT)
        if REDUCE == SUM:
            acc += v
        elif REDUCE == MUL:
            acc = acc * v
        else:
            first = better(v, acc, REDUCE)
            if TIES:
                count = tl.where(first, 1.0, tl.where(v == acc, count + 1.0, count))
            acc = tl.where(first, v, acc)
    if TIES:  # lanes that found nothing but infinity counted the missing edge of the last tile as one more
        rest = (end - start) % BLOCK_E
        missing = (rest > 0) & (offs >= rest)
        count -= (missing[:, None] & (acc == OTHER)).to(ACC)
    total, often = fold(acc, count, REDUCE)
    if slot >= 0:
        leave(total, often, part, part_ties, slot.to(tl.int64) * width + k, live, TIES)
    else:
        finish(total, row, k, live, end == start, row_scale, y, ldy, beta, out, width, REDUCE)
        if TIES:
            tl.store(ties + row * width + k, often, mask=live)


@kernel("windows", "chunk", "ldy", "width")
def _hubs(
    rowptr, row_of, windows, chunk, part, part_ties, row_scale, y, ldy, beta, out, ties, width,
    REDUCE: tl.constexpr, TIES: tl.constexpr, ACC: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, start, end = hub_of(tl.program_id(0), rowptr, row_of, chunk)
    if (row < 0) | (start != tl.program_id(0)):
        return
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < width
    offs = tl.arange(0, BLOCK_S)
    acc = identity(REDUCE, ACC, BLOCK_S, BLOCK_K)
    count = tl.full((BLOCK_S, BLOCK_K), 0.0, ACC)
    for base in range(start, end, BLOCK_S):
        s = base + offs
        inside = (s < end)[:, None] & live[None, :]
        at = s.to(tl.int64)[:, None] * width + k[None, :]
        v = tl.load(part + at, mask=inside, other=0.0)
        if REDUCE == SUM:
            acc += v
        elif REDUCE == MUL:
            acc = acc * tl.where(inside, v, 1.0)
        else:
            first = inside & better(v, acc, REDUCE)
            if TIES:
                n = tl.load(part_ties + at, mask=inside, other=0.0)
                count = tl.where(first, n, count + tl.where(inside & (v == acc), n, 0.0))
            acc = tl.where(first, v, acc)
    total, often = fold(acc, count, REDUCE)
    finish(total, row, k, live, end == start, row_scale, y, ldy, beta, out, width, REDUCE)
    if TIES:
        tl.store(ties + row * width + k, often, mask=live)


def blocks(width: int, x: Tensor, reduce: str, block_k: int = 0) -> tuple[int, int]:
    """Edges and columns of a tile: a warp's lanes across the columns, a few 16-byte loads in flight for each."""
    cols = power(width, block_k or 512 // x.element_size())
    edges = 1 if reduce == "mul" else max(2, min(32, TILE // cols))
    return edges, cols


def spmm(
    csr: Csr,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    y: Tensor | None = None,
    beta: float = 1.0,
    count_ties: bool = False,
    block_k: int = 0,
    block_e: int = 0,
    warps: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """reference.spmm; block_k columns by block_e edges a tile and `warps` warps a program, where given."""
    options = (reduce, beta, count_ties, block_k, block_e, warps)
    inputs = (x, weight, row_scale, col_scale, y)
    out, ties = tape.run(tape.kept_with(csr), ("spmm", options), functools.partial(_spmm, csr, options), inputs)
    assert out is not None
    return out, ties


def _spmm(
    csr: Csr,
    options: tuple[Any, ...],
    x: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    y: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    reduce, beta, count_ties, block_k, block_e, warps = options
    x = rows(x)
    acc = accumulate_type(x.dtype)
    heads, head_width = (x.size(1), x.size(2)) if x.dim() == 3 else (1, x.size(1))
    width = heads * head_width
    out = x.new_empty(csr.num_rows, *x.shape[1:])
    ties = torch.empty_like(out, dtype=acc) if count_ties else None
    if out.numel() == 0:
        return out, ties
    if y is not None:
        y = rows(y.to(x.dtype))
        if x.dtype == torch.float64 and beta != 1.0:  # a kernel's scalar is fp32
            y, beta = y * beta, 1.0
    cut = pieces(csr)
    vec = vector(x, y, out, width=width)
    edges, cols = blocks(width, x, reduce, block_k)
    edges, num_warps = edges if reduce == "mul" else block_e or edges, warps or 1
    flags = {"REDUCE": REDUCES[reduce], "TIES": count_ties, "ACC": acc_of(x.dtype), "BLOCK_K": cols}
    partial = x.new_empty(cut.windows, width, dtype=acc)
    partial_ties = torch.empty_like(partial) if count_ties else None
    row_scale, ldy = plain(row_scale, x.dtype), 0 if y is None else y.stride(0)
    across = tiles(width, cols)
    _pieces[(cut.count, across)](
        *cut.args, csr.col, csr.edge_id if weight is not None else None, x, x.stride(0),
        plain(weight, x.dtype), heads, head_width, row_scale, plain(col_scale, x.dtype), y, ldy, beta,
        out, ties, partial, partial_ties, width,
        OTHER=OTHERS[reduce], PER_HEAD=weight is not None and weight.dim() == 2, VEC=vec, BLOCK_E=edges,
        INT=offsets(x, weight, most=csr.num_edges), num_warps=num_warps, **flags,
    )  # fmt: skip
    if cut.windows:
        _hubs[(cut.windows, across)](
            *cut.args, partial, partial_ties, row_scale, y, ldy, beta, out, ties, width,
            BLOCK_S=1 if reduce == "mul" else SLOTS, num_warps=num_warps, **flags,
        )  # fmt: skip
    return out, ties
