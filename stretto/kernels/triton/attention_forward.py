"""Attention forward in Triton: score, softmax and weighted sum in one launch over the pieces of rows.

A program takes as many heads as fit a tile, so that indices and per-edge numbers are read once for all of them. Scores
that are sums of scalars are read twice, first for their maximum: that costs less than to rescale what has been summed
at every step. Scores made of rows are met once, tile by tile. A wide tile holds its edges
in the registers of a lane, and they are summed at once; a narrow one has some of them in other lanes, and its sums
meet at the end.
"""

# ruff: noqa: RUF059, SIM102, SIM109 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton.language as tl

from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import at_entry, hub_of, locate
from stretto.kernels.triton.scores import DOT, GIVEN, SUM, SUM_ROWS, WEIGHT, dropped, key_of, own_terms, scores

SIZES = [
    "ldv", "ldl", "ldr", "heads", "width", "score_width", "attr_width", "value_step", "right_step", "windows",
    "chunk", "drop_below",
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
def finish(most, total, acc, row, h, mh, heads, width, f, some, out, stats, bias, first, FORM: tl.constexpr):
    """Normalise and store heads of a row. Scores that are all -inf sum to 0 and give NaN, as in torch."""
    inside = mh[:, None] & (f < width)[None, :]
    if FORM != WEIGHT:
        inverse = tl.where(some, 1.0 / total, 1.0)
        acc = acc * inverse[:, None]
        if first:
            at = (row * heads + h) * 2
            tl.store(stats + at, tl.where(some, most, 0.0), mask=mh)
            tl.store(stats + at + 1, inverse, mask=mh)
    if bias is not None:
        acc += tl.load(bias + (h * width)[:, None] + f[None, :], mask=inside, other=0.0).to(acc.dtype)
    to = (row * heads + h)[:, None] * width + f[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)


@jit
def plus(acc, tile, WIDE: tl.constexpr):
    """acc and a tile [edges, heads, columns]: the edges of a wide tile lie in one lane and are summed at once."""
    if WIDE:
        return acc + tl.sum(tile, 0)[None, :, :]
    else:
        return acc + tile


@jit
def plus_halves(acc, acc2, factor, rows, rows2, TWO: tl.constexpr, WIDE: tl.constexpr):
    """plus() of rows times a factor of each edge and head, and of their second half, where there are TWO."""
    acc = plus(acc, factor[:, :, None] * rows, WIDE)
    if TWO:
        acc2 = plus(acc2, factor[:, :, None] * rows2, WIDE)
    return acc, acc2


@jit
def halves(at, mask, mask2, TWO: tl.constexpr, ACC: tl.constexpr, BLOCK_F: tl.constexpr):
    """Rows at these places, and their second half, where there are TWO. [edges, heads, columns]"""
    rows = tl.load(at, mask=mask, other=0.0).to(ACC)
    rows2 = rows
    if TWO:
        rows2 = tl.load(at + BLOCK_F, mask=mask2, other=0.0).to(ACC)
    return rows, rows2


@jit
def masked(p, number, h, heads, drop_below, keep, key, DROP: tl.constexpr):
    """p with its dropout mask, where there is one."""
    if DROP:
        return dropped(p, number, h, heads, drop_below, keep, key)
    else:
        return p


@jit
def met(s, there, most, total, acc, acc2):
    """Scores met once, tile by tile: p, and what was summed before brought to the largest score so far."""
    s = tl.where(there[:, None], s, float("-inf"))
    before = most
    most = tl.maximum(most, tl.max(s, 0))
    safe = tl.where(most == float("-inf"), 0.0, most)
    factor = tl.exp(before - safe)
    p = tl.exp(s - safe[None, :])
    total = total * factor + tl.sum(p, 0)
    acc = acc * factor[None, :, None]
    acc2 = acc2 * factor[None, :, None]
    return p, most, total, acc, acc2


@jit
def leave(
    most, total, acc, acc2, place, part, part_stats, mh, f, width,
    FORM: tl.constexpr, TWO: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """What a piece has summed into its slot."""
    at_slot = part + place[:, None] * width + f[None, :]
    tl.store(at_slot, acc, mask=mh[:, None] & (f < width)[None, :])
    if TWO:
        tl.store(at_slot + BLOCK_F, acc2, mask=mh[:, None] & (f + BLOCK_F < width)[None, :])
    if FORM != WEIGHT:
        if tl.program_id(2) == 0:
            tl.store(part_stats + place * 2, most, mask=mh)
            tl.store(part_stats + place * 2 + 1, total, mask=mh)


@jit
def finish_halves(
    most, total, acc, acc2, row, h, mh, heads, width, f, some, out, stats, bias,
    FORM: tl.constexpr, TWO: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """finish(), and the second half of the columns, where there are TWO."""
    first = tl.program_id(2) == 0
    finish(most, total, acc, row, h, mh, heads, width, f, some, out, stats, bias, first, FORM)
    if TWO:
        finish(most, total, acc2, row, h, mh, heads, width, f + BLOCK_F, some, out, stats, bias, False, FORM)


@jit
def edges_ahead(
    mine, mine2, left, ldl, right, ldr, att, edge, attr, query, col, edge_id, i, own, j, base, end, h, mh, heads,
    score_width, attr_width, right_step, slope, scale,
    FORM: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """How a tile of edges starts: which are there, their numbers and scores; and the sources of the tile after it,
    while this one's rows arrive."""
    e = base + tl.arange(0, BLOCK_E)
    there = e < end
    ahead = at_entry(col, e + BLOCK_E, e + BLOCK_E < end, INT)
    number = at_entry(edge_id, e, there, INT)
    s, z, near, far, both, near2, far2, both2 = scores(
        mine, mine2, left, ldl, right, ldr, att, edge, attr, query, i, own, j, there, number, there, h, mh, heads,
        score_width, attr_width, right_step, slope, scale, FORM, ONE, TWO, EVEN, ACC, BLOCK_E, BLOCK_H, BLOCK_F,
        BLOCK_D,
    )  # fmt: skip
    return there, number, ahead, s, far, far2


@jit
def highest(
    mine, right, ldr, edge, col, edge_id, i, own, start, end, h, mh, heads, slope,
    FORM: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The largest score of a piece, for scores that are sums of scalars. [heads]"""
    most = tl.full((BLOCK_S, BLOCK_H), float("-inf"), ACC)
    j = at_entry(col, start + tl.arange(0, BLOCK_S), start + tl.arange(0, BLOCK_S) < end, INT)
    for base in range(start, end, BLOCK_S):
        there, _, j, s, _, _ = edges_ahead(
            mine, mine, None, 0, right, ldr, None, edge, None, None, col, edge_id, i, own, j, base, end, h, mh, heads,
            0, 0, 0, slope, slope, FORM, True, False, EVEN, ACC, INT, BLOCK_S, BLOCK_H, 1, 1,
        )  # fmt: skip
        most = tl.where(there[:, None] & (s > most), s, most)
    return tl.max(most, 0)


@kernel(*SIZES)
def pieces_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, v, ldv, left, ldl, right, ldr, att, edge, attr, query,
    constants, drop_below, seed, out, stats, bias, part, part_stats,
    heads, width, score_width, attr_width, value_step, right_step,
    FORM: tl.constexpr, DROP: tl.constexpr, RAW: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr,
    SAME: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    start, end = start.to(INT), end.to(INT)
    slope, scale, keep = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = (h < heads) | EVEN
    f = tl.program_id(2) * (2 * BLOCK_F if TWO else BLOCK_F) + tl.arange(0, BLOCK_F)
    width = width // VEC * VEC
    score_width = score_width // VEC * VEC
    ldv = ldv // VEC * VEC
    if FORM == SUM_ROWS or FORM == DOT:
        ldl, ldr = ldl // VEC * VEC, ldr // VEC * VEC
    value_step, right_step = value_step // VEC * VEC, right_step // VEC * VEC
    live = mh[None, :, None] & ((f < width) | EVEN)[None, None, :]
    live2 = mh[None, :, None] & ((f + BLOCK_F < width) | EVEN)[None, None, :]
    i = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = i >= 0
    key = key_of(seed, RAW) if DROP else 0
    most = tl.full((BLOCK_H,), float("-inf"), ACC)
    total = tl.full((BLOCK_H,), 0.0, ACC)
    totals = tl.full((BLOCK_E, BLOCK_H), 0.0, ACC)
    mine, mine2 = own_terms(left, ldl, score_width, i, h, mh, score_width, FORM, ONE, TWO, EVEN, ACC, BLOCK_F)
    if FORM == GIVEN or FORM == SUM:
        most = highest(
            mine, right, ldr, edge, col, edge_id, i, own, start, end, h, mh, heads, slope,
            FORM, EVEN, ACC, INT, BLOCK_S, BLOCK_H,
        )  # fmt: skip
    safe = tl.where(most == float("-inf"), 0.0, most)
    acc = tl.full((1 if WIDE else BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    acc2 = tl.full((1 if WIDE else BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    j = at_entry(col, start + tl.arange(0, BLOCK_E), start + tl.arange(0, BLOCK_E) < end, INT)
    for base in range(start, end, BLOCK_E):
        there, number, ahead, s, far, far2 = edges_ahead(
            mine, mine2, None if FORM == SUM or ONE else left, ldl, right, ldr, att, edge, attr, query, col, edge_id,
            i, own, j, base, end, h, mh, heads, score_width, attr_width, right_step, slope, scale, FORM, ONE, TWO,
            EVEN, ACC, INT, BLOCK_E, BLOCK_H, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        if SAME:  # the values are the rows just read for the score
            rows, rows2 = far, far2
        else:
            at = v + ((j * ldv)[:, None, None] + (h * value_step)[None, :, None] + f[None, None, :])
            here = there[:, None, None]
            rows, rows2 = halves(at, here & live, here & live2, TWO, ACC, BLOCK_F)
        if FORM == WEIGHT:
            p = tl.where(there[:, None], s, 0.0)
        elif FORM == GIVEN or FORM == SUM:
            p = tl.where(there[:, None], tl.exp(s - safe[None, :]), 0.0)
            totals += p
        else:
            p, most, total, acc, acc2 = met(s, there, most, total, acc, acc2)
        p = masked(p, number, h, heads, drop_below, keep, key, DROP)
        acc, acc2 = plus_halves(acc, acc2, p, rows, rows2, TWO, WIDE)
        j = ahead
    acc, acc2 = tl.sum(acc, 0), tl.sum(acc2, 0)
    if FORM == GIVEN or FORM == SUM:
        total = tl.sum(totals, 0)
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
        leave(most, total, acc, acc2, place, part, part_stats, mh, f, width, FORM, TWO, BLOCK_F)
    else:
        finish_halves(
            most, total, acc, acc2, row, h, mh, heads, width, f, end > start, out, stats, bias, FORM, TWO, BLOCK_F
        )  # fmt: skip


@kernel("windows", "chunk", "heads", "width")
def hubs_kernel(
    rowptr, row_of, windows, chunk, part, part_stats, out, stats, bias, heads, width,
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
    finish(most, total, acc, row, h, mh, heads, width, f, True, out, stats, bias, tl.program_id(2) == 0, FORM)


@kernel(*[n for n in SIZES if n not in ("ldv", "width", "value_step")])
def alpha_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, left, ldl, right, ldr, att, edge, attr, query,
    constants, drop_below, seed, stats, alpha, heads, score_width, attr_width, right_step,
    FORM: tl.constexpr, DROP: tl.constexpr, RAW: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr,
    EVEN: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The weights themselves, from the scores and what is kept of their rows."""
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    slope, scale, keep = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = (h < heads) | EVEN
    i = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = i >= 0
    mine, mine2 = own_terms(left, ldl, score_width, i, h, mh, score_width, FORM, ONE, TWO, EVEN, ACC, BLOCK_F)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        j = at_entry(col, e, there, INT)
        number = at_entry(edge_id, e, there, INT)
        s, z, near, far, both, near2, far2, both2 = scores(
            mine, mine2, None if FORM == SUM or ONE else left, ldl, right, ldr, att, edge, attr, query, i, own, j,
            there, number, there, h, mh, heads, score_width, attr_width, right_step, slope, scale, FORM, ONE, TWO,
            EVEN, ACC, BLOCK_E, BLOCK_H, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        if FORM != WEIGHT:
            at = (row * heads + h) * 2
            most, inverse = tl.load(stats + at, mask=mh, other=0.0), tl.load(stats + at + 1, mask=mh, other=0.0)
            s = tl.exp(s - most[None, :]) * inverse[None, :]
        if DROP:
            s = dropped(s, number, h, heads, drop_below, keep, key_of(seed, RAW))
        tl.store(alpha + (number * heads)[:, None] + h[None, :], s, mask=there[:, None] & mh[None, :])
