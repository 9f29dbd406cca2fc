"""edge_softmax and its gradient in Triton, in at most two launches.

A program reads its piece of a row, then writes it, from cache. Pieces of a hub leave what they know of the row in
slots; a second launch reads all slots of the hub, in order, and writes those pieces.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import acc_of, at_entry, hub_of, locate, power, tiles
from stretto.kernels.triton.pieces import pieces


@jit
def rescaled(s, m, most):
    """A sum of exp(v - m) as one of exp(v - most). A sum of nothing stays 0, a lost one NaN."""
    return tl.where(s > 0, s * tl.exp(m - most), s)


@jit
def known(m, s, SOFTMAX: tl.constexpr):
    """A tile's maxima and sums of exponentials (softmax), or sums alone, folded over its rows."""
    if SOFTMAX:
        most = tl.max(m, 0)
        return most, tl.sum(rescaled(s, m, most[None, :]), 0)
    else:
        return tl.sum(s, 0), tl.sum(s, 0)


@jit
def write(a, b, out, edge_id, start, end, h, heads, most, total, SOFTMAX: tl.constexpr, BLOCK_E: tl.constexpr):
    """Results of the edges [start, end) of a row of which maximum and total are known."""
    live = h < heads
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & live[None, :]
        at = at_entry(edge_id, e, there)[:, None] * heads + h[None, :]
        v = tl.load(a + at, mask=inside, other=0.0)
        if SOFTMAX:
            r = tl.exp(v - most[None, :]) / total[None, :]
        else:
            r = v * (tl.load(b + at, mask=inside, other=0.0) - total[None, :])
        tl.store(out + at, r, mask=inside)


@kernel("windows", "chunk", "heads")
def _pieces(
    rowptr, row_of, windows, chunk, edge_id, a, b, out, part, heads,
    SOFTMAX: tl.constexpr, ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    _, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < heads
    m = tl.full((BLOCK_E, BLOCK_H), float("-inf"), ACC)
    s = tl.full((BLOCK_E, BLOCK_H), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & live[None, :]
        at = at_entry(edge_id, e, there)[:, None] * heads + h[None, :]
        v = tl.load(a + at, mask=inside, other=0.0)
        if SOFTMAX:
            # -inf adds nothing; a row of nothing else, or with a NaN, gives NaN, as in torch.
            most = tl.where(inside & ((v > m) | (v != v)), v, m)
            s = rescaled(s, m, most) + tl.where(inside & (v != float("-inf")), tl.exp(v - most), 0.0)
            m = most
        else:
            s += v * tl.load(b + at, mask=inside, other=0.0)
    most, total = known(m, s, SOFTMAX)
    if slot >= 0:
        to = slot.to(tl.int64) * heads * 2 + h
        tl.store(part + to, most, mask=live)
        tl.store(part + to + heads, total, mask=live)
    else:
        write(a, b, out, edge_id, start, end, h, heads, most, total, SOFTMAX, BLOCK_E)


@kernel("windows", "chunk", "heads")
def _hubs(
    rowptr, row_of, windows, chunk, edge_id, a, b, out, part, heads,
    SOFTMAX: tl.constexpr, ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row, first, last = hub_of(tl.program_id(0), rowptr, row_of, chunk)
    if row < 0:
        return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < heads
    m = tl.full((BLOCK_E, BLOCK_H), float("-inf"), ACC)
    s = tl.full((BLOCK_E, BLOCK_H), 0.0, ACC)
    for base in range(first, last, BLOCK_E):
        n = base + tl.arange(0, BLOCK_E)
        inside = (n < last)[:, None] & live[None, :]
        at = n.to(tl.int64)[:, None] * heads * 2 + h[None, :]
        sums = tl.load(part + at + heads, mask=inside, other=0.0)
        if SOFTMAX:
            v = tl.load(part + at, mask=inside, other=float("-inf"))
            most = tl.where((v > m) | (v != v), v, m)
            s = rescaled(s, m, most) + rescaled(sums, v, most)
            m = most
        else:
            s += sums
    most, total = known(m, s, SOFTMAX)
    _, _, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    write(a, b, out, edge_id, start, end, h, heads, most, total, SOFTMAX, BLOCK_E)


def edge_softmax(csr: Csr, score: Tensor) -> Tensor:
    """reference.edge_softmax; in the accumulation type."""
    return _run(csr, score, None)


def edge_softmax_grad(csr: Csr, alpha: Tensor, grad: Tensor) -> Tensor:
    """reference.edge_softmax_grad; in the accumulation type."""
    return _run(csr, alpha, grad)


def _run(csr: Csr, a: Tensor, b: Tensor | None) -> Tensor:
    acc, heads = accumulate_type(a.dtype), a.size(1)
    out = torch.empty(a.shape, dtype=acc, device=a.device)
    if out.numel():
        values = a.to(acc).contiguous()
        others = None if b is None else b.to(acc).contiguous()
        cut = pieces(csr)
        block = power(heads, 32)
        across = tiles(heads, block)
        part = values.new_empty(cut.windows, 2, heads)
        flags = {"SOFTMAX": b is None, "ACC": acc_of(acc), "BLOCK_E": max(8, 256 // block), "BLOCK_H": block}
        _pieces[(cut.count, across)](
            *cut.args, csr.edge_id, values, others, out, part, heads, num_warps=1, **flags
        )  # fmt: skip
        if cut.windows:
            _hubs[(cut.windows, across)](
                *cut.args, csr.edge_id, values, others, out, part, heads,
                num_warps=1, **flags,
            )  # fmt: skip
    return out.to(a.dtype)
