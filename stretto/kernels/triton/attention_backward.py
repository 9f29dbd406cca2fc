"""Attention backward in Triton: one pass over the transposed edges, from one read of each gathered row.

The weights are computed again from the scores and the two numbers kept per row; the row sum of the softmax's gradient
is grad . out. What is summed by destination follows from the per-edge numbers `dscore`, in passes of their own.
"""

# ruff: noqa: RUF059, SIM102, SIM109 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton.language as tl

from stretto.kernels.triton.attention_forward import SIZES, halves, masked, plus, plus_halves
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import at_entry, locate
from stretto.kernels.triton.scores import (
    DOT,
    SUM,
    SUM_ROWS,
    WEIGHT,
    dropped,
    inner,
    key_of,
    own_terms,
    read_row,
    row_dot,
    scores,
)


@kernel(*SIZES, "ldg")
def pieces_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, v, ldv, left, ldl, right, ldr, att, edge, attr, query, grad, ldg,
    grad_attr, grad_alpha, ends, constants, drop_below, seed, dv, dright, dedge, dscore, part, part_right,
    heads, width, score_width, attr_width, value_step, right_step,
    FORM: tl.constexpr, DROP: tl.constexpr, RAW: tl.constexpr, ALPHA_DROPPED: tl.constexpr, ONE: tl.constexpr,
    TWO: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
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
    ldv, ldg = ldv // VEC * VEC, ldg // VEC * VEC
    if FORM == SUM_ROWS or FORM == DOT:
        ldl, ldr = ldl // VEC * VEC, ldr // VEC * VEC
    value_step, right_step = value_step // VEC * VEC, right_step // VEC * VEC
    live = mh[None, :, None] & ((f < width) | EVEN)[None, None, :]
    live2 = mh[None, :, None] & ((f + BLOCK_F < width) | EVEN)[None, None, :]
    j = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = j >= 0
    at = v + ((j * ldv)[:, None, None] + (h * value_step)[None, :, None] + f[None, None, :])
    values, values2 = halves(at, live, live2, TWO, ACC, BLOCK_F)
    key = key_of(seed, RAW) if DROP else 0
    mine, mine2 = own_terms(right, ldr, right_step, j, h, mh, score_width, FORM, ONE, TWO, EVEN, ACC, BLOCK_F)
    acc = tl.full((1 if WIDE else BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    acc2, acc_right, acc_right2 = acc, acc, acc
    acc_sum = tl.full((BLOCK_E, BLOCK_H), 0.0, ACC)
    e = start + tl.arange(0, BLOCK_E)
    i = at_entry(col, e, e < end, INT)
    number = at_entry(edge_id, e, e < end, INT)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & mh[None, :]
        # The next tile's places, while this one's rows arrive.
        i_ahead = at_entry(col, e + BLOCK_E, e + BLOCK_E < end, INT)
        number_ahead = at_entry(edge_id, e + BLOCK_E, e + BLOCK_E < end, INT)
        at_grad = (i * ldg)[:, None] + (h * width)[None, :]
        from_grad = grad + at_grad[:, :, None] + f[None, None, :]
        here = there[:, None, None]
        g, g2 = halves(from_grad, here & live, here & live2, TWO, ACC, BLOCK_F)
        s, z, near, far, rows, near2, far2, rows2 = scores(
            mine, mine2, left, ldl, None if FORM == SUM or ONE else right, ldr, att, edge, attr, query, i, there, j,
            own, number, there, h, mh, heads, score_width, attr_width, right_step, slope, scale, FORM, ONE, TWO, EVEN,
            ACC, BLOCK_E, BLOCK_H, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        scalar = (i * heads)[:, None] + h[None, :]
        at_edge = (number * heads)[:, None] + h[None, :]
        alpha = weight_of(s, ends, scalar, inside, FORM)
        at_value = (j * ldv)[:, None] + (h * value_step)[None, :]
        d = weight_grad(
            g, g2, values, values2, grad, at_grad, inside, v, at_value, own[:, None] & mh[None, :], width,
            ONE, TWO, ACC, BLOCK_E, BLOCK_H, BLOCK_F,
        )  # fmt: skip
        if grad_attr is not None:
            d += row_dot(
                grad_attr, scalar * attr_width, inside, attr, (number * attr_width)[:, None], there[:, None],
                attr_width, BLOCK_E, BLOCK_H, ACC, BLOCK_D,
            )  # fmt: skip
        d = through_dropout(
            d, grad_alpha, at_edge, inside, number, h, heads, drop_below, keep, key, DROP, ALPHA_DROPPED
        )  # fmt: skip
        ds = score_grad(d, alpha, z, ends, scalar, inside, slope, scale, FORM)
        alpha = masked(alpha, number, h, heads, drop_below, keep, key, DROP)
        acc, acc2 = plus_halves(acc, acc2, alpha, g, g2, TWO, WIDE)
        store_scores(dscore, at_edge, ds, inside)
        acc_sum += ds
        if FORM == SUM_ROWS or FORM == DOT:
            if not ONE:
                near, far, rows = inner(
                    None, left, ldl, right, ldr, edge, i, there, j, own, number, there, h, mh, f, heads, score_width,
                    right_step, EVEN, ACC,
                )  # fmt: skip
            acc_right, acc_right2 = plus_right(
                acc_right, acc_right2, ds, near, near2, rows, rows2, dedge, at_edge, slope, inside, f, score_width,
                FORM, TWO, WIDE, BLOCK_F,
            )  # fmt: skip
        i, number = i_ahead, number_ahead
    place = row * heads + h
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
    if dv is not None:
        store_halves(tl.sum(acc, 0), tl.sum(acc2, 0), dv, part, place, slot, mh, f, width, TWO, BLOCK_F)
    if dright is not None:
        finish_right(
            acc_sum, acc_right, acc_right2, dright, part_right, place, slot, mh, f, score_width, slope,
            FORM, TWO, BLOCK_F,
        )  # fmt: skip


@jit
def weight_of(s, ends, scalar, inside, FORM: tl.constexpr):
    """The weights of edges before dropout, from their scores."""
    if FORM == WEIGHT:
        return tl.where(inside, s, 0.0)
    else:
        return tl.where(inside, tl.exp(s - tl.load(ends + scalar * 2, mask=inside, other=0.0)), 0.0)


@jit
def weight_grad(
    g, g2, values, values2, grad, at_grad, inside, v, at_value, at_own, width,
    ONE: tl.constexpr, TWO: tl.constexpr, ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """grad . value of every edge and head."""
    if ONE:
        if TWO:
            return tl.sum(g * values + g2 * values2, 2)
        else:
            return tl.sum(g * values, 2)
    else:
        return row_dot(grad, at_grad, inside, v, at_value, at_own, width, BLOCK_E, BLOCK_H, ACC, BLOCK_F)


@jit
def through_dropout(
    d, grad_alpha, at_edge, inside, number, h, heads, drop_below, keep, key,
    DROP: tl.constexpr, ALPHA_DROPPED: tl.constexpr,
):  # fmt: skip
    """Gradients of weights as they were before dropout, with those of the weights that were handed out."""
    if grad_alpha is not None:
        more = tl.load(grad_alpha + at_edge, mask=inside, other=0.0)
        if DROP and not ALPHA_DROPPED:
            d = dropped(d, number, h, heads, drop_below, keep, key) + more
        else:
            d += more
    if DROP and (grad_alpha is None or ALPHA_DROPPED):
        d = dropped(d, number, h, heads, drop_below, keep, key)
    return d


@jit
def score_grad(d, alpha, z, ends, scalar, inside, slope, scale, FORM: tl.constexpr):
    """Gradients of scores, of what is in leaky_relu (SUM), or of what is scaled (DOT)."""
    if FORM == WEIGHT:
        ds = d
    else:
        ds = alpha * (d - tl.load(ends + scalar * 2 + 1, mask=inside, other=0.0))
    if FORM == SUM:
        ds = tl.where(z > 0, ds, ds * slope)
    if FORM == DOT:
        ds = ds * scale
    return tl.where(inside, ds, 0.0)


@jit
def store_scores(dscore, at_edge, ds, inside):
    """dscore, where it is wanted: by the programs of the first columns."""
    if dscore is not None:
        if tl.program_id(2) == 0:
            tl.store(dscore + at_edge, ds, mask=inside)


@jit
def plus_right(
    acc_right, acc_right2, ds, near, near2, rows, rows2, dedge, at_edge, slope, inside, f, score_width,
    FORM: tl.constexpr, TWO: tl.constexpr, WIDE: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """What a tile adds to dright; gatv2: and the gradients of its edges."""
    if FORM == DOT:
        acc_right, acc_right2 = plus_halves(acc_right, acc_right2, ds, near, near2, TWO, WIDE)
    else:  # what is not above 0 counts `slope` of acc_sum, see finish_right
        acc_right = plus(acc_right, tl.where(rows > 0, ds[:, :, None], 0.0), WIDE)
        if TWO:
            acc_right2 = plus(acc_right2, tl.where(rows2 > 0, ds[:, :, None], 0.0), WIDE)
        if dedge is not None:
            store_edges(dedge, at_edge, rows, ds, slope, inside, f, score_width)
            if TWO:
                store_edges(dedge, at_edge, rows2, ds, slope, inside, f + BLOCK_F, score_width)
    return acc_right, acc_right2


@jit
def finish_right(
    acc_sum, acc_right, acc_right2, dright, part_right, place, slot, mh, f, score_width, slope,
    FORM: tl.constexpr, TWO: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """dright of a row or a piece: sums of scalars, or of rows."""
    if FORM == SUM:
        sums = tl.sum(acc_sum, 0)
        if tl.program_id(2) == 0:
            if slot >= 0:
                tl.store(part_right + place, sums, mask=mh)
            else:
                tl.store(dright + place, sums, mask=mh)
    if FORM == SUM_ROWS or FORM == DOT:
        sums, sums2 = tl.sum(acc_right, 0), tl.sum(acc_right2, 0)
        if FORM == SUM_ROWS:
            rest = (slope * tl.sum(acc_sum, 0))[:, None]
            sums, sums2 = (1.0 - slope) * sums + rest, (1.0 - slope) * sums2 + rest
        store_halves(sums, sums2, dright, part_right, place, slot, mh, f, score_width, TWO, BLOCK_F)


@jit
def store_edges(dedge, at_edge, z, ds, slope, inside, f, score_width):
    """dscore * leaky_relu'(z) of every edge: the gradient of its term, without the factor att."""
    to = at_edge[:, :, None] * score_width + f[None, None, :]
    each = tl.where(z > 0, ds[:, :, None], (ds * slope)[:, :, None])
    tl.store(dedge + to, each.to(dedge.dtype.element_ty), mask=inside[:, :, None] & (f < score_width)[None, None, :])


@jit
def store_rows(sums, into, part, place, slot, mh, f, score_width):
    """Sums [heads, columns] of a whole row, or into the slot of a piece."""
    to = place[:, None] * score_width + f[None, :]
    within = mh[:, None] & (f < score_width)[None, :]
    if slot >= 0:
        tl.store(part + to, sums, mask=within)
    else:
        tl.store(into + to, sums.to(into.dtype.element_ty), mask=within)


@jit
def store_halves(
    sums, sums2, into, part, place, slot, mh, f, width, TWO: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """store_rows, and their second half, where there are TWO."""
    store_rows(sums, into, part, place, slot, mh, f, width)
    if TWO:
        store_rows(sums2, into, part, place, slot, mh, f + BLOCK_F, width)


@jit
def above(near, far, z, ds, edge):
    """ds where z = near + far (+ an edge's term) is above 0. A rounded sum keeps its sign: it need not be made."""
    if edge is not None:
        return tl.where(z > 0, ds[:, :, None], 0.0)
    else:
        return tl.where(far > -near, ds[:, :, None], 0.0)


@kernel("windows", "chunk", "ldl", "ldr", "heads", "score_width", "right_step")
def left_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, left, ldl, right, ldr, edge, dscore, constants, dleft, part,
    heads, score_width, right_step,
    TWO: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr,
    VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """SUM_ROWS by destination: the sum of dscore * leaky_relu'(z), still without the factor att."""
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    start, end = start.to(INT), end.to(INT)
    slope = tl.load(constants)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = (h < heads) | EVEN
    f = tl.program_id(2) * (2 * BLOCK_F if TWO else BLOCK_F) + tl.arange(0, BLOCK_F)
    score_width = score_width // VEC * VEC
    ldl, ldr, right_step = ldl // VEC * VEC, ldr // VEC * VEC, right_step // VEC * VEC
    i = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = i >= 0
    mine = read_row(left, ldl, score_width, i, own, h, mh, f, score_width, EVEN, ACC)
    mine2 = mine
    if TWO:
        mine2 = read_row(left, ldl, score_width, i, own, h, mh, f + BLOCK_F, score_width, EVEN, ACC)
    acc = tl.full((1 if WIDE else BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    acc2 = acc
    acc_sum = tl.full((BLOCK_E, BLOCK_H), 0.0, ACC)
    e = start + tl.arange(0, BLOCK_E)
    j = at_entry(col, e, e < end, INT)
    number = at_entry(edge_id, e, e < end, INT)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        j_ahead = at_entry(col, e + BLOCK_E, e + BLOCK_E < end, INT)
        number_ahead = at_entry(edge_id, e + BLOCK_E, e + BLOCK_E < end, INT)
        inside = there[:, None] & mh[None, :]
        ds = tl.load(dscore + (number * heads)[:, None] + h[None, :], mask=inside, other=0.0)
        near, far, z = inner(
            mine, None, ldl, right, ldr, edge, i, own, j, there, number, there, h, mh, f, heads, score_width,
            right_step, EVEN, ACC,
        )  # fmt: skip
        acc_sum += ds
        acc = plus(acc, above(near, far, z, ds, edge), WIDE)
        if TWO:
            near, far, z = inner(
                mine2, None, ldl, right, ldr, edge, i, own, j, there, number, there, h, mh, f + BLOCK_F, heads,
                score_width, right_step, EVEN, ACC,
            )  # fmt: skip
            acc2 = plus(acc2, above(near, far, z, ds, edge), WIDE)
        j, number = j_ahead, number_ahead
    place = row * heads + h
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
    rest = (slope * tl.sum(acc_sum, 0))[:, None]
    store_rows((1.0 - slope) * tl.sum(acc, 0) + rest, dleft, part, place, slot, mh, f, score_width)
    if TWO:
        store_rows((1.0 - slope) * tl.sum(acc2, 0) + rest, dleft, part, place, slot, mh, f + BLOCK_F, score_width)
