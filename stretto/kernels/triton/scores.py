"""Scores of attention, shared by its forward and backward kernels (csrc/abi.h lists the forms), and its dropout mask.

One program works on one head of one piece of a row. `i` and `j` are the destinations and sources of a tile of edges: a
vector at the gathered end, a vector of one at the program's own end; both broadcast.
"""

# ruff: noqa: SIM109 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton
import triton.language as tl

GIVEN, WEIGHT, SUM, SUM_ROWS, DOT = (tl.constexpr(n) for n in range(5))


@triton.jit
def mix(x):
    """A 32-bit mixing function with little bias: csrc/kernels/attention.h has the same."""
    x = x ^ (x >> 16)
    x = x * tl.full((1,), 0x21F0AAAD, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((1,), 0xD35A2D97, tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def dropped(p, edge, h, heads, drop_below, keep, seed_low, seed_high):
    """p with its mask: 0 or times `keep`, a function of (seed, edge, head). drop_below is 2**31 too small: an int32."""
    counter = edge.to(tl.uint64) * heads.to(tl.uint64) + h.to(tl.uint64)
    bits = mix(counter.to(tl.uint32) + seed_low.to(tl.uint32))
    bits = mix(bits ^ ((counter >> 32).to(tl.uint32) + seed_high.to(tl.uint32)))
    return tl.where(bits.to(tl.int64) < drop_below.to(tl.int64) + 2147483648, 0.0, p * keep)


@triton.jit
def row_dot(p, i, mi, q, j, mj, d, BLOCK_E: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over d columns of p[i] * q[j]; p and q point at columns 0. -> [BLOCK_E]"""
    dots = tl.full((BLOCK_E, BLOCK), 0.0, ACC)
    for first in range(0, d, BLOCK):
        c = first + tl.arange(0, BLOCK)
        live = (c < d)[None, :]
        u = tl.load(p + i[:, None] + c[None, :], mask=mi[:, None] & live, other=0.0).to(ACC)
        w = tl.load(q + j[:, None] + c[None, :], mask=mj[:, None] & live, other=0.0).to(ACC)
        dots += u * w
    return tl.sum(dots, 1)


@triton.jit
def leaky(z, slope):
    return tl.where(z > 0, z, z * slope)


@triton.jit
def inner(left, ldl, right, ldr, edge, i, mi, j, mj, e, there, h, c, heads, score_width, right_step, ACC: tl.constexpr):
    """left[i] and right[j] (and their sum with edge[e]) at columns c of head h."""
    live = (c < score_width)[None, :]
    p = tl.load(left + i[:, None] * ldl + h * score_width + c[None, :], mask=mi[:, None] & live, other=0.0).to(ACC)
    q = tl.load(right + j[:, None] * ldr + h * right_step + c[None, :], mask=mj[:, None] & live, other=0.0).to(ACC)
    z = p + q
    if edge is not None:
        at = (e * heads + h)[:, None] * score_width + c[None, :]
        z += tl.load(edge + at, mask=there[:, None] & live, other=0.0).to(ACC)
    return p, q, z


@triton.jit
def scores(
    left, ldl, right, ldr, att, edge, attr, query, i, mi, j, mj, e, there, h, heads, score_width, attr_width,
    right_step, slope, scale,
    FORM: tl.constexpr, ONE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """-> score [BLOCK_E], the argument of its leaky_relu (SUM); where ONE tile holds a row, left, right and sum."""
    none = tl.full((1, 1), 0.0, ACC)
    if FORM == GIVEN or FORM == WEIGHT:
        s = tl.load(edge + e * heads + h, mask=there, other=0.0)
        return s, s, none, none, none
    elif FORM == SUM:
        z = tl.load(left + i * heads + h, mask=mi, other=0.0) + tl.load(right + j * heads + h, mask=mj, other=0.0)
        if edge is not None:
            z += tl.load(edge + e * heads + h, mask=there, other=0.0)
        return leaky(z, slope), z, none, none, none
    else:
        dots = tl.full((BLOCK_E, BLOCK_C), 0.0, ACC)
        if ONE:
            c = tl.arange(0, BLOCK_C)
            p, q, z = inner(
                left, ldl, right, ldr, edge, i, mi, j, mj, e, there, h, c, heads, score_width, right_step, ACC
            )  # fmt: skip
            if FORM == SUM_ROWS:
                a = tl.load(att + h * score_width + c, mask=c < score_width, other=0.0)[None, :]
                dots += a * leaky(z, slope)
            else:
                dots += p * q
        else:
            p, q, z = none, none, none
            for first in range(0, score_width, BLOCK_C):
                c = first + tl.arange(0, BLOCK_C)
                p1, q1, z1 = inner(
                    left, ldl, right, ldr, edge, i, mi, j, mj, e, there, h, c, heads, score_width, right_step, ACC
                )  # fmt: skip
                if FORM == SUM_ROWS:
                    a = tl.load(att + h * score_width + c, mask=c < score_width, other=0.0)[None, :]
                    dots += a * leaky(z1, slope)
                else:
                    dots += p1 * q1
        s = tl.sum(dots, 1)
        if FORM == DOT:
            if query is not None:
                at_query = (i * heads + h) * attr_width
                s += row_dot(query, at_query, mi, attr, e * attr_width, there, attr_width, BLOCK_E, ACC, BLOCK_D)
            s = s * scale
        return s, s, p, q, z
