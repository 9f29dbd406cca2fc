"""Attention backward in Triton: one pass over the transposed edges, from one read of each gathered row.

The weights are computed again from the scores and the two numbers kept per row; the row sum of the softmax's gradient
is grad . out. What is summed by destination follows from the per-edge numbers `dscore`, in passes of their own.
"""

# ruff: noqa: RUF059, SIM102, SIM109 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton.language as tl

from stretto.kernels.triton.attention_forward import SIZES
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import at_entry, locate
from stretto.kernels.triton.scores import DOT, SUM, SUM_ROWS, WEIGHT, dropped, inner, row_dot, scores


@kernel(*SIZES, "ldg")
def pieces_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, v, ldv, left, ldl, right, ldr, att, edge, attr, query, grad, ldg,
    grad_attr, grad_alpha, row_sum, constants, drop_below, seed_low, seed_high, stats,
    dv, dright, dedge, dscore, part, part_right,
    heads, width, score_width, attr_width, value_step, right_step,
    FORM: tl.constexpr, DROP: tl.constexpr, ALPHA_DROPPED: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr,
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
    ldv, ldl, ldr, ldg = ldv // VEC * VEC, ldl // VEC * VEC, ldr // VEC * VEC, ldg // VEC * VEC
    value_step, right_step = value_step // VEC * VEC, right_step // VEC * VEC
    live = mh[None, :, None] & ((f < width) | EVEN)[None, None, :]
    j = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = j >= 0
    at = (j * ldv)[:, None, None] + (h * value_step)[None, :, None] + f[None, None, :]
    values = tl.load(v + at, mask=live, other=0.0).to(ACC)
    acc = tl.full((BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    acc_right = tl.full((BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    acc_sum = tl.full((BLOCK_E, BLOCK_H), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & mh[None, :]
        i = at_entry(col, e, there, INT)
        number = at_entry(edge_id, e, there, INT)
        at_grad = (i * ldg)[:, None] + (h * width)[None, :]
        g = tl.load(grad + at_grad[:, :, None] + f[None, None, :], mask=there[:, None, None] & live, other=0.0).to(ACC)
        s, z, near, far, rows = scores(
            left, ldl, right, ldr, att, edge, attr, query, i, there, j, own, number, there, h, mh, heads, score_width,
            attr_width, right_step, slope, scale, FORM, ONE, EVEN, ACC, BLOCK_E, BLOCK_H, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        scalar = (i * heads)[:, None] + h[None, :]
        at_edge = (number * heads)[:, None] + h[None, :]
        if FORM == WEIGHT:
            alpha = tl.where(inside, s, 0.0)
        else:
            most = tl.load(stats + scalar * 2, mask=inside, other=0.0)
            alpha = tl.where(inside, tl.exp(s - most) * tl.load(stats + scalar * 2 + 1, mask=inside, other=0.0), 0.0)
        if ONE:
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
                d = dropped(d, number, h, heads, drop_below, keep, seed_low, seed_high) + more
            else:
                d += more
        if DROP and (grad_alpha is None or ALPHA_DROPPED):
            d = dropped(d, number, h, heads, drop_below, keep, seed_low, seed_high)
        if FORM == WEIGHT:
            ds = d
        else:
            ds = alpha * (d - tl.load(row_sum + scalar, mask=inside, other=0.0))
        if FORM == SUM:
            ds = tl.where(z > 0, ds, ds * slope)
        if FORM == DOT:
            ds = ds * scale
        ds = tl.where(inside, ds, 0.0)
        if DROP:
            alpha = dropped(alpha, number, h, heads, drop_below, keep, seed_low, seed_high)
        acc += alpha[:, :, None] * g
        if dscore is not None:
            if tl.program_id(2) == 0:
                tl.store(dscore + at_edge, ds, mask=inside)
        if FORM == SUM:
            acc_sum += ds
        if FORM == SUM_ROWS or FORM == DOT:
            if not ONE:
                near, far, rows = inner(
                    left, ldl, right, ldr, edge, i, there, j, own, number, there, h, mh, f, heads, score_width,
                    right_step, EVEN, ACC,
                )  # fmt: skip
            if FORM == DOT:
                acc_right += ds[:, :, None] * near
            else:
                t = tl.where(rows > 0, ds[:, :, None], (ds * slope)[:, :, None])
                acc_right += t
                if dedge is not None:
                    to = at_edge[:, :, None] * score_width + f[None, None, :]
                    within = inside[:, :, None] & (f < score_width)[None, None, :]
                    tl.store(dedge + to, t.to(dedge.dtype.element_ty), mask=within)
    place = row * heads + h
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
    if dv is not None:
        total = tl.sum(acc, 0)
        to = place[:, None] * width + f[None, :]
        within = mh[:, None] & (f < width)[None, :]
        if slot >= 0:
            tl.store(part + to, total, mask=within)
        else:
            tl.store(dv + to, total.to(dv.dtype.element_ty), mask=within)
    if dright is not None:
        if FORM == SUM:
            sums = tl.sum(acc_sum, 0)
            if tl.program_id(2) == 0:
                if slot >= 0:
                    tl.store(part_right + place, sums, mask=mh)
                else:
                    tl.store(dright + place, sums, mask=mh)
        if FORM == SUM_ROWS or FORM == DOT:
            store_rows(tl.sum(acc_right, 0), dright, part_right, place, slot, mh, f, score_width)


@jit
def store_rows(sums, into, part, place, slot, mh, f, score_width):
    """Sums [heads, columns] of a whole row, or into the slot of a piece."""
    to = place[:, None] * score_width + f[None, :]
    within = mh[:, None] & (f < score_width)[None, :]
    if slot >= 0:
        tl.store(part + to, sums, mask=within)
    else:
        tl.store(into + to, sums.to(into.dtype.element_ty), mask=within)


@kernel("windows", "chunk", "ldl", "ldr", "heads", "score_width", "right_step")
def left_kernel(
    rowptr, row_of, windows, chunk, col, edge_id, left, ldl, right, ldr, edge, dscore, constants, dleft, part,
    heads, score_width, right_step,
    EVEN: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """SUM_ROWS by destination: the sum of dscore * leaky_relu'(z), still without the factor att."""
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    slope = tl.load(constants)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mh = (h < heads) | EVEN
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    score_width = score_width // VEC * VEC
    ldl, ldr, right_step = ldl // VEC * VEC, ldr // VEC * VEC, right_step // VEC * VEC
    i = (row + tl.zeros((1,), tl.int64)).to(INT)
    own = i >= 0
    acc = tl.full((BLOCK_E, BLOCK_H, BLOCK_F), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        j = at_entry(col, e, there, INT)
        number = at_entry(edge_id, e, there, INT)
        inside = there[:, None] & mh[None, :]
        ds = tl.load(dscore + (number * heads)[:, None] + h[None, :], mask=inside, other=0.0)
        near, far, z = inner(
            left, ldl, right, ldr, edge, i, own, j, there, number, there, h, mh, f, heads, score_width, right_step,
            EVEN, ACC,
        )  # fmt: skip
        acc += tl.where(z > 0, ds[:, :, None], (ds * slope)[:, :, None])
    place = row * heads + h
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
    store_rows(tl.sum(acc, 0), dleft, part, place, slot, mh, f, score_width)


@kernel("ld", "rows", "columns", "att_columns", "rows_each")
def finish_kernel(
    sums, near, ld, att, more, out, part, rows, columns, att_columns, rows_each,
    ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """gatv2: out = sums * att + more; and the sum over a block of rows of sums * near, part of the gradient of att."""
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < columns
    factor = tl.load(att + k, mask=live, other=0.0)[None, :]
    acc = tl.full((BLOCK_R, BLOCK_K), 0.0, ACC)
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, rows)
    for base in range(first, last, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R).to(tl.int64)
        inside = (r < last)[:, None] & live[None, :]
        at = r[:, None] * columns + k[None, :]
        t = tl.load(sums + at, mask=inside, other=0.0)
        if part is not None:
            place = r[:, None] * ld + (k % att_columns)[None, :]
            acc += t * tl.load(near + place, mask=inside, other=0.0).to(ACC)
        if out is not None:
            t = t * factor
            if more is not None:
                t += tl.load(more + at, mask=inside, other=0.0)
            tl.store(out + at, t.to(out.dtype.element_ty), mask=inside)
    if part is not None:
        tl.store(part + tl.program_id(0) * columns + k, tl.sum(acc, 0), mask=live)


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
    a, lda, b, ldb, out, rows, heads, width, ADD: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """out[i, h] = a[i, h] . b[i, h], or that much more."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (i < rows)[:, None] & (h < heads)[None, :]
    width = width // VEC * VEC
    at_a = (i * (lda // VEC * VEC))[:, None] + (h * width)[None, :]
    at_b = (i * (ldb // VEC * VEC))[:, None] + (h * width)[None, :]
    d = row_dot(a, at_a, inside, b, at_b, inside, width, BLOCK_E, BLOCK_H, ACC, BLOCK_F)
    to = (i * heads)[:, None] + h[None, :]
    if ADD:
        d += tl.load(out + to, mask=inside, other=0.0)
    tl.store(out + to, d, mask=inside)
