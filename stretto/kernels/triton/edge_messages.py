"""edge_messages in Triton: messages made of rows at both ends and of the edge, and summed, piece by piece.

One kernel for three passes. Its rows are destinations (forward, and gradients of what stands at destinations) or
sources (gradients of what stands at sources and edges); `near` is the term of the row itself, `far` is gathered.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.reference_edge import ACTS
from stretto.kernels.schema import REDUCES, accumulate_type
from stretto.kernels.triton.activations import through, value_of
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import acc_of, at_entry, locate, offsets, power, tiles, vector
from stretto.kernels.triton.pieces import Pieces, pieces
from stretto.kernels.triton.spmm import _hubs

TILE = 256  # values of a tile; two terms and their gradients are alive at once


@jit
def argument(near, far, edge, own, at_far, at_edge, inside, ACC: tl.constexpr):
    """The sum of the terms that are there. [edges, columns]"""
    u = tl.where(inside, 0.0, 0.0).to(ACC)
    if near is not None:
        u += own[None, :]
    if far is not None:
        u += tl.load(far + at_far, mask=inside, other=0.0).to(ACC)
    if edge is not None:
        u += tl.load(edge + at_edge, mask=inside, other=0.0).to(ACC)
    return u


@jit
def own_row(near, at, live, ACC: tl.constexpr, BLOCK_K: tl.constexpr):
    """The row's own term. [columns]"""
    if near is not None:
        return tl.load(near + at, mask=live, other=0.0).to(ACC)
    else:
        return tl.full((BLOCK_K,), 0.0, ACC)


@jit
def leave(sums, into, part, row, slot, k, width, live):
    """Sums of a whole row, or into the slot of a piece."""
    if slot >= 0:
        tl.store(part + slot.to(tl.int64) * width + k, sums, mask=live)
    else:
        tl.store(into + row * width + k, sums.to(into.dtype.element_ty), mask=live)


@jit
def upstream(up, grad, at_far, inside, BY_ROW: tl.constexpr, ACC: tl.constexpr):
    """The gradient of what edges add up to: the row's own, `up`, or that of the rows at their far ends."""
    if BY_ROW:
        return up
    else:
        return tl.load(grad + at_far, mask=inside, other=0.0).to(ACC)


@jit
def leave_edges(into, at_edge, d, inside):
    """A tile of gradients of edges, where they are wanted."""
    if into is not None:
        tl.store(into + at_edge, d.to(into.dtype.element_ty), mask=inside)


@kernel("windows", "chunk", "width")
def _pieces(
    rowptr, row_of, windows, chunk, col, edge_id, near, far, edge, near2, far2, edge2, grad,
    out, out2, dedge, dedge2, part, part2, width,
    ACT: tl.constexpr, ACT2: tl.constexpr, BACKWARD: tl.constexpr, BY_ROW: tl.constexpr,
    ACC: tl.constexpr, INT: tl.constexpr, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    wide = width // VEC * VEC
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < wide
    at_row = row * wide + k
    own = own_row(near, at_row, live, ACC, BLOCK_K)
    own2 = own_row(near2, at_row, live, ACC, BLOCK_K)
    acc = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    acc2 = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    up = tl.full((BLOCK_E, BLOCK_K), 1.0, ACC)
    if BACKWARD and BY_ROW:
        up = up * tl.load(grad + at_row, mask=live, other=0.0).to(ACC)[None, :]
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & live[None, :]
        at_far = (at_entry(col, e, there, INT) * wide)[:, None] + k[None, :]
        at_edge = (at_entry(edge_id, e, there, INT) * wide)[:, None] + k[None, :]
        u = argument(near, far, edge, own, at_far, at_edge, inside, ACC)
        first = value_of(u, ACT)
        if ACT2 == 0:
            if BACKWARD:
                up = upstream(up, grad, at_far, inside, BY_ROW, ACC)
                d = tl.where(inside, through(up, u, ACT), 0.0)
                acc += d
                leave_edges(dedge, at_edge, d, inside)
            else:
                acc += tl.where(inside, first, 0.0)
        else:
            u2 = argument(near2, far2, edge2, own2, at_far, at_edge, inside, ACC)
            second = value_of(u2, ACT2)
            if BACKWARD:
                up = upstream(up, grad, at_far, inside, BY_ROW, ACC)
                d = tl.where(inside, through(up * second, u, ACT), 0.0)
                d2 = tl.where(inside, through(up * first, u2, ACT2), 0.0)
                acc += d
                acc2 += d2
                leave_edges(dedge, at_edge, d, inside)
                leave_edges(dedge2, at_edge, d2, inside)
            else:
                acc += tl.where(inside, first * second, 0.0)
    if out is not None:
        leave(tl.sum(acc, 0), out, part, row, slot, k, width, live)
    if out2 is not None:
        leave(tl.sum(acc2, 0), out2, part2, row, slot, k, width, live)


def blocks(width: int) -> tuple[int, int]:
    """Edges and columns of a tile."""
    cols = power(width, 128)
    return max(2, min(16, TILE // cols)), cols


def merge(cut: Pieces, part: Tensor | None, into: Tensor | None) -> None:
    """Sums of the hubs' slots, in order, into their rows. part [windows, k], into [rows, k]"""
    if cut.windows and part is not None and into is not None:
        width = part.size(1)
        block = power(width, 128)
        _hubs[(cut.windows, tiles(width, block))](
            *cut.args, part, None, None, None, 0, 1.0, into, None, width,
            REDUCE=REDUCES["sum"], TIES=False, ACC=acc_of(part.dtype), BLOCK_S=8, BLOCK_K=block, num_warps=1,
        )  # fmt: skip


def _run(
    csr: Csr, terms: tuple[Any, ...], acts: tuple[str, str], grad: Any, outs: tuple[Any, Any], dedges: tuple[Any, Any],
    *, by_row: bool, like: Tensor, most: int,
) -> None:  # fmt: skip
    """One pass. terms: near, far, edge, and the same of the second factor."""
    cut, width, acc = pieces(csr), like.size(1), accumulate_type(like.dtype)
    edges, cols = blocks(width)
    parts = [None if out is None else like.new_empty(cut.windows, width, dtype=acc) for out in outs]
    given = [t for t in (*terms, grad, *outs, *dedges) if t is not None]
    _pieces[(cut.count, tiles(width, cols))](
        *cut.args, csr.col, csr.edge_id, *terms, grad, *outs, *dedges, *parts, width,
        ACT=ACTS.index(acts[0]), ACT2=ACTS.index(acts[1]), BACKWARD=grad is not None, BY_ROW=by_row,
        ACC=acc_of(like.dtype), INT=offsets(*given, most=most), VEC=vector(*given, width=width),
        BLOCK_E=edges, BLOCK_K=cols, num_warps=1,
    )  # fmt: skip
    for part, out in zip(parts, outs, strict=True):
        merge(cut, part, out)


def edge_messages(csr: Csr, tensors: tuple[Tensor | None, ...], acts: tuple[str, str]) -> Tensor:
    """reference_edge.edge_messages."""
    given = tuple(None if t is None else t.contiguous() for t in tensors)
    like = next(t for t in given if t is not None)
    out = like.new_empty(csr.num_rows, like.size(1))
    if out.numel():
        most = csr.num_edges * like.size(1)
        _run(csr, given, acts, None, (out, None), (None, None), by_row=True, like=like, most=most)
    return out


def edge_messages_grad(
    csr: Csr,
    csr_t: Csr,
    tensors: tuple[Tensor | None, ...],
    acts: tuple[str, str],
    grad: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors that need one."""
    row, col, edge, row2, col2, edge2 = (None if t is None else t.contiguous() for t in tensors)
    grad = grad.contiguous()
    found = [t.new_empty(t.shape) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)]
    drow, dcol, dedge, drow2, dcol2, dedge2 = found
    most = csr.num_edges * grad.size(1)
    if grad.size(1):
        if any(d is not None for d in (dcol, dcol2, dedge, dedge2)) and csr_t.num_rows:
            terms = (col, row, edge, col2, row2, edge2)
            _run(csr_t, terms, acts, grad, (dcol, dcol2), (dedge, dedge2), by_row=False, like=grad, most=most)
        if any(d is not None for d in (drow, drow2)) and csr.num_rows:
            terms = (row, col, edge, row2, col2, edge2)
            _run(csr, terms, acts, grad, (drow, drow2), (None, None), by_row=True, like=grad, most=most)
    return tuple(found)
