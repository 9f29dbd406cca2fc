"""Attention backward in Triton: one pass over the transposed edges, from one read of each gathered row.

The weights are computed again from the scores and the two numbers kept per row; the row sum of the softmax's gradient
is grad . out. What is summed by destination follows from the per-edge numbers `dscore`, in passes of their own.
"""

# ruff: noqa: RUF059, SIM102, SIM109 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton.language as tl

from stretto.kernels.triton.attention_forward import SIZES, plus
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
    at = (j * ldv)[:, None, None] + (h * value_step)[None, :, None] + f[None, None, :]
    values = tl.load(v + at, mask=live, other=0.0).to(ACC)
    values2 = values
    if TWO:
        values2 = tl.load(v + at + BLOCK_F, mask=live2, other=0.0).to(ACC)
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
        g = tl.load(from_grad, mask=there[:, None, None] & live, other=0.0).to(ACC)
        g2 = g
        if TWO:
            g2 = tl.load(from_grad + BLOCK_F, mask=there[:, None, None] & live2, other=0.0).to(ACC)
        s, z, near, far, rows, near2, far2, rows2 = scores(
            mine, mine2, left, ldl, None if FORM == SUM or ONE else right, ldr, att, edge, attr, query, i, there, j,
            own, number, there, h, mh, heads, score_width, attr_width, right_step, slope, scale, FORM, ONE, TWO, EVEN,
            ACC, BLOCK_E, BLOCK_H, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        scalar = (i * heads)[:, None] + h[None, :]
        at_edge = (number * heads)[:, None] + h[None, :]
        if FORM == WEIGHT:
            alpha = tl.where(inside, s, 0.0)
        else:
            alpha = tl.where(inside, tl.exp(s - tl.load(ends + scalar * 2, mask=inside, other=0.0)), 0.0)
        if ONE:
            if TWO:
                d = tl.sum(g * values + g2 * values2, 2)
            else:
                d = tl.sum(g * values, 2)
        else:
            at_value = (j * ldv)[:, None] + (h * value_step)[None, :]
            d = row_dot(
                grad, at_grad, inside, v, at_value, own[:, None] & mh[None, :], width, BLOCK_E, BLOCK_H, ACC, BLOCK_F
            )  # fmt: skip
        if grad_attr is not None:
            d += row_dot(
                grad_attr, scalar * attr_width, inside, attr, (number * attr_width)[:, None], there[:, None],
                attr_width, BLOCK_E, BLOCK_H, ACC, BLOCK_D,
            )  # fmt: skip
        if grad_alpha is not None:
            more = tl.load(grad_alpha + at_edge, mask=inside, other=0.0)
            if DROP and not ALPHA_DROPPED:
                d = dropped(d, number, h, heads, drop_below, keep, key) + more
            else:
                d += more
        if DROP and (grad_alpha is None or ALPHA_DROPPED):
            d = dropped(d, number, h, heads, drop_below, keep, key)
        if FORM == WEIGHT:
            ds = d
        else:
            ds = alpha * (d - tl.load(ends + scalar * 2 + 1, mask=inside, other=0.0))
        if FORM == SUM:
            ds = tl.where(z > 0, ds, ds * slope)
        if FORM == DOT:
            ds = ds * scale
        ds = tl.where(inside, ds, 0.0)
        if DROP:
            alpha = dropped(alpha, number, h, heads, drop_below, keep, key)
        acc = plus(acc, alpha[:, :, None] * g, WIDE)
        if TWO:
            acc2 = plus(acc2, alpha[:, :, None] * g2, WIDE)
        if dscore is not None:
            if tl.program_id(2) == 0:
                tl.store(dscore + at_edge, ds, mask=inside)
        acc_sum += ds
        if FORM == SUM_ROWS or FORM == DOT:
            if not ONE:
                near, far, rows = inner(
                    None, left, ldl, right, ldr, edge, i, there, j, own, number, there, h, mh, f, heads, score_width,
                    right_step, EVEN, ACC,
                )  # fmt: skip
            if FORM == DOT:
                acc_right = plus(acc_right, ds[:, :, None] * near, WIDE)
                if TWO:
                    acc_right2 = plus(acc_right2, ds[:, :, None] * near2, WIDE)
            else:  # what is not above 0 counts `slope` of acc_sum, see below
                acc_right = plus(acc_right, tl.where(rows > 0, ds[:, :, None], 0.0), WIDE)
                if TWO:
                    acc_right2 = plus(acc_right2, tl.where(rows2 > 0, ds[:, :, None], 0.0), WIDE)
                if dedge is not None:
                    store_edges(dedge, at_edge, rows, ds, slope, inside, f, score_width)
                    if TWO:
                        store_edges(dedge, at_edge, rows2, ds, slope, inside, f + BLOCK_F, score_width)
        i, number = i_ahead, number_ahead
    place = row * heads + h
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
    if dv is not None:
        store_rows(tl.sum(acc, 0), dv, part, place, slot, mh, f, width)
        if TWO:
            store_rows(tl.sum(acc2, 0), dv, part, place, slot, mh, f + BLOCK_F, width)
    if dright is not None:
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
            store_rows(sums, dright, part_right, place, slot, mh, f, score_width)
            if TWO:
                store_rows(sums2, dright, part_right, place, slot, mh, f + BLOCK_F, score_width)


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


@kernel("ld", "rows", "columns", "att_columns", "rows_each")
def finish_kernel(
    sums, near, ld, att, more, out, part, part_out, rows, columns, att_columns, rows_each,
    SHARED: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """gatv2: out = sums * att + more; and over a block of rows, the sum of sums * near, part of the gradient of att,
    and the sum of out."""
    columns, ld = columns // VEC * VEC, ld // VEC * VEC
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < columns
    factor = tl.load(att + k, mask=live, other=0.0)[None, :]
    acc = tl.full((BLOCK_R, BLOCK_K), 0.0, ACC)
    acc_out = tl.full((BLOCK_R, BLOCK_K), 0.0, ACC)
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, rows)
    column = k
    if SHARED:
        column = k % att_columns
    for base in range(first, last, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R).to(tl.int64)
        inside = (r < last)[:, None] & live[None, :]
        at = r[:, None] * columns + k[None, :]
        t = tl.load(sums + at, mask=inside, other=0.0)
        if part is not None:
            acc += t * tl.load(near + r[:, None] * ld + column[None, :], mask=inside, other=0.0).to(ACC)
        if out is not None:
            t = t * factor
            if more is not None:
                t += tl.load(more + at, mask=inside, other=0.0)
            tl.store(out + at, t.to(out.dtype.element_ty), mask=inside)
            acc_out += t
    to = tl.program_id(0) * columns + k
    if part is not None:
        tl.store(part + to, tl.sum(acc, 0), mask=live)
    if part_out is not None:
        tl.store(part_out + to, tl.sum(acc_out, 0), mask=live)


@kernel("windows", "chunk", "heads", "attr_width")
def attributes_kernel(
    rowptr, row_of, windows, chunk, edge_id, dscore, alpha, query, grad_attr, dattr, heads, attr_width,
    ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dattr[e] = sum over heads of dscore * query[i] + alpha * grad_attr[i]; alpha is of the weights after dropout."""
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    k = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = k < attr_width
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        number = at_entry(edge_id, e, there)
        acc = tl.full((BLOCK_E, BLOCK_D), 0.0, ACC)
        for h in range(heads):
            at = (row * heads + h) * attr_width + k
            if query is not None:
                own = tl.load(query + at, mask=live, other=0.0).to(ACC)
                acc += tl.load(dscore + number * heads + h, mask=there, other=0.0)[:, None] * own[None, :]
            if grad_attr is not None:
                own = tl.load(grad_attr + at, mask=live, other=0.0).to(ACC)
                acc += tl.load(alpha + number * heads + h, mask=there, other=0.0)[:, None] * own[None, :]
        to = number[:, None] * attr_width + k[None, :]
        tl.store(dattr + to, acc.to(dattr.dtype.element_ty), mask=there[:, None] & live[None, :])


@kernel("lda", "ldb", "rows", "heads", "width")
def row_dot_kernel(
    a, lda, b, ldb, out, rows, heads, width, ACC: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """out[i, h] = a[i, h] . b[i, h]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (i < rows)[:, None] & (h < heads)[None, :]
    width = width // VEC * VEC
    at_a = (i * (lda // VEC * VEC))[:, None] + (h * width)[None, :]
    at_b = (i * (ldb // VEC * VEC))[:, None] + (h * width)[None, :]
    d = row_dot(a, at_a, inside, b, at_b, inside, width, BLOCK_E, BLOCK_H, ACC, BLOCK_F)
    to = (i * heads)[:, None] + h[None, :]
    tl.store(out + to, d, mask=inside)


@kernel("ldg", "ldo", "rows", "heads", "width", "rows_each")
def ends_kernel(
    grad, ldg, out, ldo, bias, stats, more, ends, part, rows, heads, width, rows_each,
    ONE: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """What backward needs of a row: ends[i, h] = (log of its sum of exponentials, grad . out + more).

    bias: what `out` has on top, to be taken off again. part: the sum of grad over a block of rows, where ONE tile holds
    a row's heads' columns.
    """
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = h < heads
    f = tl.arange(0, BLOCK_F)
    width = width // VEC * VEC
    ldg, ldo = ldg // VEC * VEC, ldo // VEC * VEC
    live = mh[:, None] & (f < width)[None, :]
    column = (h * width)[:, None] + f[None, :]
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, rows)
    acc = tl.full((BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    for base in range(first, last, BLOCK_E):
        i = base + tl.arange(0, BLOCK_E)
        inside = (i < last)[:, None] & mh[None, :]
        if ONE:
            within = (i < last)[:, None, None] & live[None, :, :]
            g = tl.load(grad + (i * ldg)[:, None, None] + column[None, :, :], mask=within, other=0.0).to(ACC)
            o = tl.load(out + (i * ldo)[:, None, None] + column[None, :, :], mask=within, other=0.0).to(ACC)
            if bias is not None:
                o -= tl.load(bias + column, mask=live, other=0.0).to(ACC)[None, :, :]
            d = tl.sum(g * o, 2)
            acc += g
        else:
            at_g = (i * ldg)[:, None] + (h * width)[None, :]
            at_o = (i * ldo)[:, None] + (h * width)[None, :]
            d = row_dot(grad, at_g, inside, out, at_o, inside, width, BLOCK_E, BLOCK_H, ACC, BLOCK_F)
        to = (i * heads)[:, None] + h[None, :]
        if more is not None:
            d += tl.load(more + to, mask=inside, other=0.0)
        most = tl.load(stats + to * 2, mask=inside, other=0.0)
        tl.store(ends + to * 2, most - tl.log(tl.load(stats + to * 2 + 1, mask=inside, other=1.0)), mask=inside)
        tl.store(ends + to * 2 + 1, d, mask=inside)
    if part is not None:
        tl.store(part + tl.program_id(0) * (heads * width) + column, tl.sum(acc, 0), mask=live)
