"""Scores of attention, shared by its forward and backward kernels (csrc/abi.h lists the forms), and its dropout mask.

One program works on some heads h of one piece of a row. `i` and `j` are the destinations and sources of its edges: a
vector at the gathered end, a vector of one at the program's own end; both broadcast. Tiles are [edges, heads] for
scalars and [edges, heads, columns] for rows; masks of ends, edges and heads are vectors (mi, mj, there, mh).
"""

# ruff: noqa: SIM109 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton.language as tl

from stretto.kernels.triton.launch import jit

GIVEN, WEIGHT, SUM, SUM_ROWS, DOT = (tl.constexpr(n) for n in range(5))


@jit
def mix(x):
    """A 32-bit mixing function with little bias: csrc/kernels/attention.h has the same."""
    x = x ^ (x >> 16)
    x = x * tl.full((1, 1), 0x21F0AAAD, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((1, 1), 0xD35A2D97, tl.uint32)
    return x ^ (x >> 15)


@jit
def key_of(seed, RAW: tl.constexpr):
    """The 64 bits that a mask depends on, from a seed on the device; RAW: still to be mixed, as ops.attention does."""
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    if RAW:
        key = key + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        key = (key ^ (key >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
        key = (key ^ (key >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
        key = key ^ (key >> 31)
    return key


@jit
def dropped(p, e, h, heads, drop_below, keep, key):
    """p with its mask: 0 or times `keep`, a function of (key, edge, head). drop_below is 2**31 too small: an int32."""
    counter = e.to(tl.uint64)[:, None] * heads.to(tl.uint64) + h.to(tl.uint64)[None, :]
    bits = mix(counter.to(tl.uint32) + key.to(tl.uint32))
    bits = mix(bits ^ ((counter >> 32).to(tl.uint32) + (key >> 32).to(tl.uint32)))
    return tl.where(bits.to(tl.int64) < drop_below.to(tl.int64) + 2147483648, 0.0, p * keep)


@jit
def row_dot(
    p, at_p, mp, q, at_q, mq, d,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum over d columns of p[at_p] * q[at_q]; places and masks broadcast to [BLOCK_E, BLOCK_H], as is the result."""
    dots = tl.full((BLOCK_E, BLOCK_H, BLOCK), 0.0, ACC)
    for first in range(0, d, BLOCK):
        c = (first + tl.arange(0, BLOCK))[None, None, :]
        u = tl.load(p + at_p[:, :, None] + c, mask=mp[:, :, None] & (c < d), other=0.0).to(ACC)
        w = tl.load(q + at_q[:, :, None] + c, mask=mq[:, :, None] & (c < d), other=0.0).to(ACC)
        dots += u * w
    return tl.sum(dots, 2)


@jit
def leaky(z, slope):
    return tl.where(z > 0, z, z * slope)


@jit
def read_row(rows, ld, step, i, mi, h, mh, columns, width, EVEN: tl.constexpr, ACC: tl.constexpr):
    """rows[i] at some columns of the heads. [edges, heads, columns]."""
    c = columns[None, None, :]
    at = (i * ld)[:, None, None] + (h * step)[None, :, None] + c
    return tl.load(rows + at, mask=mi[:, None, None] & mh[None, :, None] & ((c < width) | EVEN), other=0.0).to(ACC)


@jit
def inner(
    mine, left, ldl, right, ldr, edge, i, mi, j, mj, e, there, h, mh, columns, heads, score_width, right_step,
    EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """left[i] and right[j] (and their sum with edge[e]) at some columns of the heads; `mine` where one is not given.
    [edges, heads, columns]."""
    p, q = mine, mine
    if left is not None:
        p = read_row(left, ldl, score_width, i, mi, h, mh, columns, score_width, EVEN, ACC)
    if right is not None:
        q = read_row(right, ldr, right_step, j, mj, h, mh, columns, score_width, EVEN, ACC)
    z = p + q
    if edge is not None:
        c = columns[None, None, :]
        live = mh[None, :, None] & ((c < score_width) | EVEN)
        at = (e * heads)[:, None, None] * score_width + (h * score_width)[None, :, None] + c
        z += tl.load(edge + at, mask=there[:, None, None] & live, other=0.0).to(ACC)
    return p, q, z


@jit
def plus_block(
    dots, mine, left, ldl, right, ldr, att, edge, i, mi, j, mj, e, there, h, mh, columns, heads, score_width,
    right_step,
    slope, FORM: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """inner() of some columns, and dots plus what they add to the score."""
    p, q, z = inner(
        mine, left, ldl, right, ldr, edge, i, mi, j, mj, e, there, h, mh, columns, heads, score_width, right_step,
        EVEN, ACC,
    )  # fmt: skip
    if FORM == SUM_ROWS:
        dots += weighed(att, h, mh, columns, score_width, z, slope)
    else:
        dots += p * q
    return p, q, z, dots


@jit
def own_terms(
    terms, ld, step, own, h, mh, width,
    FORM: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What all scores of a program have in common, read once: the scalar of its own end (SUM) [1, heads], or that end's
    row, where ONE tile holds it, and its second half, where it has TWO. [1, heads, columns]."""
    if FORM == SUM:
        mine = tl.load(terms + (own * ld)[:, None] + h[None, :], mask=mh[None, :], other=0.0)
        return mine, mine
    elif (FORM == SUM_ROWS or FORM == DOT) and ONE:
        c = tl.arange(0, BLOCK_C)
        mine = read_row(terms, ld, step, own, own >= 0, h, mh, c, width, EVEN, ACC)
        mine2 = mine
        if TWO:
            mine2 = read_row(terms, ld, step, own, own >= 0, h, mh, BLOCK_C + c, width, EVEN, ACC)
        return mine, mine2
    else:
        none = tl.full((1, 1, 1), 0.0, ACC)
        return none, none


@jit
def scores(
    mine, mine2, left, ldl, right, ldr, att, edge, attr, query, i, mi, j, mj, e, there, h, mh, heads, score_width,
    attr_width, right_step, slope, scale,
    FORM: tl.constexpr, ONE: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr, ACC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """-> score [edges, heads], the argument of its leaky_relu (SUM); where ONE tile holds a row: left, right, sum, and
    the same of its second half, where it has TWO. mine, mine2: the own_terms, in place of the end that is not given."""
    none = tl.full((1, 1, 1), 0.0, ACC)
    at_edge = (e * heads)[:, None] + h[None, :]
    inside = there[:, None] & mh[None, :]
    if FORM == GIVEN or FORM == WEIGHT:
        s = tl.load(edge + at_edge, mask=inside, other=0.0)
        return s, s, none, none, none, none, none, none
    elif FORM == SUM:
        if left is not None:
            z = mine + tl.load(left + (i * ldl)[:, None] + h[None, :], mask=mi[:, None] & mh[None, :], other=0.0)
        else:
            z = mine + tl.load(right + (j * ldr)[:, None] + h[None, :], mask=mj[:, None] & mh[None, :], other=0.0)
        if edge is not None:
            z += tl.load(edge + at_edge, mask=inside, other=0.0)
        return leaky(z, slope), z, none, none, none, none, none, none
    else:
        p, q, z, p2, q2, z2 = none, none, none, none, none, none
        c = tl.arange(0, BLOCK_C)
        dots = tl.full((BLOCK_E, BLOCK_H, BLOCK_C), 0.0, ACC)
        if ONE:
            p, q, z, dots = plus_block(
                dots, mine, left, ldl, right, ldr, att, edge, i, mi, j, mj, e, there, h, mh, c, heads, score_width,
                right_step, slope, FORM, EVEN, ACC,
            )  # fmt: skip
            if TWO:
                p2, q2, z2, dots = plus_block(
                    dots, mine2, left, ldl, right, ldr, att, edge, i, mi, j, mj, e, there, h, mh, BLOCK_C + c, heads,
                    score_width, right_step, slope, FORM, EVEN, ACC,
                )  # fmt: skip
        else:
            for first in range(0, score_width, BLOCK_C):
                _, _, _, dots = plus_block(
                    dots, mine, left, ldl, right, ldr, att, edge, i, mi, j, mj, e, there, h, mh, first + c, heads,
                    score_width, right_step, slope, FORM, EVEN, ACC,
                )  # fmt: skip
        s = tl.sum(dots, 2)
        if FORM == DOT:
            if query is not None:
                at_query = ((i * heads)[:, None] + h[None, :]) * attr_width
                at_attr = (e * attr_width)[:, None]
                s += row_dot(
                    query, at_query, mi[:, None] & mh[None, :], attr, at_attr, there[:, None], attr_width,
                    BLOCK_E, BLOCK_H, ACC, BLOCK_D,
                )  # fmt: skip
            s = s * scale
        return s, s, p, q, z, p2, q2, z2


@jit
def weighed(att, h, mh, c, score_width, z, slope):
    """att * leaky_relu(z) at some columns of the heads, as two products with z and |z|: nothing is selected."""
    at = (h * score_width)[None, :, None] + c[None, None, :]
    w = tl.load(att + at, mask=mh[None, :, None] & (c < score_width)[None, None, :], other=0.0)
    return (w * (0.5 + 0.5 * slope)) * z + (w * (0.5 - 0.5 * slope)) * tl.abs(z)
