"""Attention forward in Triton: score, softmax and weighted sum in one pass over a row's edges.

Every lane of a tile keeps its own running maximum, sum and weighted values; they meet once, at the end of the piece.
A program takes as many heads as fit a tile, so that indices and per-edge numbers are read once for all of them.
"""

# ruff: noqa: RUF059, SIM102 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton.language as tl

from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import at_entry, hub_of, locate
from stretto.kernels.triton.scores import WEIGHT, dropped, scores

SIZES = [
    "ldv", "ldl", "ldr", "heads", "width", "score_width", "attr_width", "value_step", "right_step", "windows",
    "chunk", "drop_below", "seed_low", "seed_high",
]  # fmt: skip


@jit
def rescale(before, after):
    """The factor that brings sums of exp(s - before) to `after`; 0 where nothing has been summed."""
    return tl.where(before == float("-inf"), 0.0, tl.exp(before - after))


@jit
def meet(m, total, acc):
    """The lanes of a tile into one: largest scores [heads], sums of exponentials, weighted values [heads, columns]."""
    most = tl.max(m, 0)
    factor = rescale(m, most[None, :])
    return most, tl.sum(total * factor, 0), tl.sum(acc * factor[:, :, None], 0)


@jit
def finish(most, total, acc, row, h, mh, heads, width, f, some, out, stats, first, FORM: tl.constexpr):
    """Normalise and store heads of a row. Scores that are all -inf sum to 0 and give NaN, as in torch."""
    if FORM != WEIGHT:
        inverse = tl.where(some, 1.0 / total, 1.0)
        acc = acc * inverse[:, None]
        if first:
            at = (row * heads + h) * 2
            tl.store(stats + at, tl.where(some, most, 0.0), mask=mh)
            tl.store(stats + at + 1, inverse, mask=mh)
    to = (row * heads + h)[:, None] * width + f[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=mh[:, None] & (f < width)[None, :])


@kernel(*SIZES)
def pieces_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, v, ldv, left, ldl, right, ldr, att, edge, attr, query,
    constants, drop_below, seed_low, seed_high, out, stats, part, part_stats,
    heads, width, score_width, attr_width, value_step, right_step,
    FORM: tl.constexpr, DROP: tl.constexpr, ONE: tl.constexpr, SAME: tl.constexpr, EVEN: tl.constexpr,
    ACC: tl.constexpr, INT: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    slope, scale, keep = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = (h < heads) | EVEN
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    width = width // VEC * VEC
    score_width = score_width // VEC * VEC
    ldv, ldl, ldr = ldv // VEC * VEC, ldl // VEC * VEC, ldr // VEC * VEC
    value_step, right_step = value_step // VEC * VEC, right_step // VEC * VEC
    live = mh[None, :, None] & ((f < width) | EVEN)[None, None, :]
    i = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = i >= 0
    m = tl.full((BLOCK_E, BLOCK_H), float("-inf"), ACC)
    total = tl.full((BLOCK_E, BLOCK_H), 0.0, ACC)
    acc = tl.full((BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        j = at_entry(col, e, there, INT)
        number = at_entry(edge_id, e, there, INT)
        s, z, near, far, inside = scores(
            left, ldl, right, ldr, att, edge, attr, query, i, own, j, there, number, there, h, mh, heads, score_width,
            attr_width, right_step, slope, scale, FORM, ONE, EVEN, ACC, BLOCK_E, BLOCK_H, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        if SAME:  # the values are the rows just read for the score
            rows = far
        else:
            at = (j * ldv)[:, None, None] + (h * value_step)[None, :, None] + f[None, None, :]
            rows = tl.load(v + at, mask=there[:, None, None] & live, other=0.0).to(ACC)
        if FORM == WEIGHT:
            p = tl.where(there[:, None], s, 0.0)
        else:
            most = tl.where(there[:, None] & ((s > m) | (s != s)), s, m)
            factor = rescale(m, most)
            p = tl.where(there[:, None] & (s != float("-inf")), tl.exp(s - most), 0.0)
            total = total * factor + p
            acc = acc * factor[:, :, None]
            m = most
        if DROP:
            p = dropped(p, number, h, heads, drop_below, keep, seed_low, seed_high)
        acc += p[:, :, None] * rows
    if FORM == WEIGHT:
        most, total, acc = tl.max(m, 0), tl.sum(total, 0), tl.sum(acc, 0)
    else:
        most, total, acc = meet(m, total, acc)
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
        tl.store(part + place[:, None] * width + f[None, :], acc, mask=mh[:, None] & (f < width)[None, :])
        if FORM != WEIGHT:
            if tl.program_id(2) == 0:
                tl.store(part_stats + place * 2, most, mask=mh)
                tl.store(part_stats + place * 2 + 1, total, mask=mh)
    else:
        finish(most, total, acc, row, h, mh, heads, width, f, end > start, out, stats, tl.program_id(2) == 0, FORM)


@kernel("windows", "chunk", "heads", "width")
def hubs_kernel(
    rowptr, row_of, windows, chunk, part, part_stats, out, stats, heads, width,
    FORM: tl.constexpr, ACC: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    row, first, end = hub_of(tl.program_id(0), rowptr, row_of, chunk)
    if (row < 0) | (first != tl.program_id(0)):
        return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = h < heads
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    m = tl.full((BLOCK_S, BLOCK_H), float("-inf"), ACC)
    total = tl.full((BLOCK_S, BLOCK_H), 0.0, ACC)
    acc = tl.full((BLOCK_S, BLOCK_H, BLOCK_F), 0.0, ACC)
    for base in range(first, end, BLOCK_S):
        s = base + tl.arange(0, BLOCK_S)
        place = (s.to(tl.int64) * heads)[:, None] + h[None, :]
        there = (s < end)[:, None] & mh[None, :]
        at = place[:, :, None] * width + f[None, None, :]
        rows = tl.load(part + at, mask=there[:, :, None] & (f < width)[None, None, :], other=0.0)
        if FORM == WEIGHT:
            acc += rows
        else:
            score = tl.load(part_stats + place * 2, mask=there, other=float("-inf"))
            sums = tl.load(part_stats + place * 2 + 1, mask=there, other=0.0)
            most = tl.where((score > m) | (score != score), score, m)
            factor, share = rescale(m, most), rescale(score, most)
            total = total * factor + sums * share
            acc = acc * factor[:, :, None] + rows * share[:, :, None]
            m = most
    if FORM == WEIGHT:
        most, total, acc = tl.max(m, 0), tl.sum(total, 0), tl.sum(acc, 0)
    else:
        most, total, acc = meet(m, total, acc)
    finish(most, total, acc, row, h, mh, heads, width, f, True, out, stats, tl.program_id(2) == 0, FORM)


@kernel(*[n for n in SIZES if n not in ("ldv", "width", "value_step")])
def alpha_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, left, ldl, right, ldr, att, edge, attr, query,
    constants, drop_below, seed_low, seed_high, stats, alpha, heads, score_width, attr_width, right_step,
    FORM: tl.constexpr, DROP: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
    INT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The weights themselves, from the scores and what is kept of their rows."""
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    slope, scale, keep = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = (h < heads) | EVEN
    i = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = i >= 0
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        j = at_entry(col, e, there, INT)
        number = at_entry(edge_id, e, there, INT)
        s, z, near, far, inside = scores(
            left, ldl, right, ldr, att, edge, attr, query, i, own, j, there, number, there, h, mh, heads, score_width,
            attr_width, right_step, slope, scale, FORM, ONE, EVEN, ACC, BLOCK_E, BLOCK_H, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        if FORM != WEIGHT:
            at = (row * heads + h) * 2
            most, inverse = tl.load(stats + at, mask=mh, other=0.0), tl.load(stats + at + 1, mask=mh, other=0.0)
            s = tl.exp(s - most[None, :]) * inverse[None, :]
        if DROP:
            s = dropped(s, number, h, heads, drop_below, keep, seed_low, seed_high)
        tl.store(alpha + (number * heads)[:, None] + h[None, :], s, mask=there[:, None] & mh[None, :])
