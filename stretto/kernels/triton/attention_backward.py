"""Attention backward in Triton: one pass over the transposed edges, from one read of each gathered row.

The weights are computed again from the scores and the two numbers kept per row; the row sum of the softmax's gradient
is grad . out. What is summed by destination follows from the per-edge numbers `dscore`, in passes of their own.
"""

# ruff: noqa: SIM102, SIM109 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton
import triton.language as tl

from stretto.kernels.triton.attention_forward import SIZES
from stretto.kernels.triton.operands import at_entry, locate
from stretto.kernels.triton.scores import DOT, SUM, SUM_ROWS, WEIGHT, dropped, inner, row_dot, scores


@triton.jit(do_not_specialize=[*SIZES, "ldg"])
def pieces_kernel(
    edge_of, row_of, slot_of, col, edge_id, v, ldv, left, ldl, right, ldr, att, edge, attr, query, grad, ldg,
    grad_attr, grad_alpha, row_sum, constants, drop_below, seed_low, seed_high, stats,
    dv, dright, dedge, dscore, part, part_right,
    heads, width, score_width, attr_width, value_step, right_step, num_rows,
    FORM: tl.constexpr, DROP: tl.constexpr, ALPHA_DROPPED: tl.constexpr, ONE: tl.constexpr, ACC: tl.constexpr,
    VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), edge_of, row_of, slot_of)
    if row >= num_rows:
        return
    slope, scale, keep = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    h = tl.program_id(1)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    width = width // VEC * VEC
    score_width = score_width // VEC * VEC
    ldv, ldl, ldr, ldg = ldv // VEC * VEC, ldl // VEC * VEC, ldr // VEC * VEC, ldg // VEC * VEC
    value_step, right_step = value_step // VEC * VEC, right_step // VEC * VEC
    j = row + tl.zeros((1,), tl.int64)
    own = j >= 0
    values = tl.load(v + j[:, None] * ldv + h * value_step + f[None, :], mask=(f < width)[None, :], other=0.0).to(ACC)
    acc = tl.full((BLOCK_E, BLOCK_F), 0.0, ACC)
    acc_right = tl.full((BLOCK_E, BLOCK_F), 0.0, ACC)
    acc_sum = tl.full((BLOCK_E,), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        i = at_entry(col, e, there)
        number = at_entry(edge_id, e, there)
        inside = there[:, None] & (f < width)[None, :]
        g = tl.load(grad + i[:, None] * ldg + h * width + f[None, :], mask=inside, other=0.0).to(ACC)
        s, z, p, _, rows = scores(
            left, ldl, right, ldr, att, edge, attr, query, i, there, j, own, number, there, h, heads, score_width,
            attr_width, right_step, slope, scale, FORM, ONE, ACC, BLOCK_E, BLOCK_F, BLOCK_D,
        )  # fmt: skip
        scalar = i * heads + h
        if FORM == WEIGHT:
            alpha = tl.where(there, s, 0.0)
        else:
            most = tl.load(stats + scalar * 2, mask=there, other=0.0)
            alpha = tl.where(there, tl.exp(s - most) * tl.load(stats + scalar * 2 + 1, mask=there, other=0.0), 0.0)
        if ONE:
            d = tl.sum(g * values, 1)
        else:
            at_grad, at_value = i * ldg + h * width, j * ldv + h * value_step
            d = row_dot(grad, at_grad, there, v, at_value, own, width, BLOCK_E, ACC, BLOCK_F)
        if grad_attr is not None:
            at = scalar * attr_width
            d += row_dot(grad_attr, at, there, attr, number * attr_width, there, attr_width, BLOCK_E, ACC, BLOCK_D)
        if grad_alpha is not None:
            more = tl.load(grad_alpha + number * heads + h, mask=there, other=0.0)
            if DROP and not ALPHA_DROPPED:
                d = dropped(d, number, h, heads, drop_below, keep, seed_low, seed_high) + more
            else:
                d += more
        if DROP and (grad_alpha is None or ALPHA_DROPPED):
            d = dropped(d, number, h, heads, drop_below, keep, seed_low, seed_high)
        if FORM == WEIGHT:
            ds = d
        else:
            ds = alpha * (d - tl.load(row_sum + scalar, mask=there, other=0.0))
        if FORM == SUM:
            ds = tl.where(z > 0, ds, ds * slope)
        if FORM == DOT:
            ds = ds * scale
        ds = tl.where(there, ds, 0.0)
        if DROP:
            alpha = dropped(alpha, number, h, heads, drop_below, keep, seed_low, seed_high)
        acc += alpha[:, None] * g
        if dscore is not None:
            if tl.program_id(2) == 0:
                tl.store(dscore + number * heads + h, ds, mask=there)
        if FORM == SUM:
            acc_sum += ds
        if FORM == SUM_ROWS or FORM == DOT:
            if not ONE:
                p, _, rows = inner(
                    left, ldl, right, ldr, edge, i, there, j, own, number, there, h, f, heads, score_width, right_step,
                    ACC,
                )  # fmt: skip
            if FORM == DOT:
                acc_right += ds[:, None] * p
            else:
                t = tl.where(rows > 0, ds[:, None], ds[:, None] * slope)
                acc_right += t
                if dedge is not None:
                    at = (number * heads + h)[:, None] * score_width + f[None, :]
                    tl.store(dedge + at, t.to(dedge.dtype.element_ty), mask=there[:, None] & (f < score_width)[None, :])
    place = row * heads + h
    if slot >= 0:
        place = slot.to(tl.int64) * heads + h
    if dv is not None:
        total = tl.sum(acc, 0)
        if slot >= 0:
            tl.store(part + place * width + f, total, mask=f < width)
        else:
            tl.store(dv + place * width + f, total.to(dv.dtype.element_ty), mask=f < width)
    if dright is not None:
        if FORM == SUM:
            sums = tl.sum(acc_sum, 0)
            if tl.program_id(2) == 0:
                if slot >= 0:
                    tl.store(part_right + place, sums)
                else:
                    tl.store(dright + place, sums)
        if FORM == SUM_ROWS or FORM == DOT:
            sums = tl.sum(acc_right, 0)
            if slot >= 0:
                tl.store(part_right + place * score_width + f, sums, mask=f < score_width)
            else:
                tl.store(dright + place * score_width + f, sums.to(dright.dtype.element_ty), mask=f < score_width)


@triton.jit(do_not_specialize=["ldl", "ldr", "heads", "score_width", "right_step", "num_rows"])
def left_kernel(
    edge_of, row_of, slot_of, col, edge_id, left, ldl, right, ldr, edge, dscore, constants, dleft, part,
    heads, score_width, right_step, num_rows,
    ACC: tl.constexpr, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """SUM_ROWS by destination: the sum of dscore * leaky_relu'(z), still without the factor att."""
    row, slot, start, end = locate(tl.program_id(0), edge_of, row_of, slot_of)
    if row >= num_rows:
        return
    slope = tl.load(constants)
    h = tl.program_id(1)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    score_width = score_width // VEC * VEC
    ldl, ldr, right_step = ldl // VEC * VEC, ldr // VEC * VEC, right_step // VEC * VEC
    i = row + tl.zeros((1,), tl.int64)
    own = i >= 0
    acc = tl.full((BLOCK_E, BLOCK_F), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        j = at_entry(col, e, there)
        number = at_entry(edge_id, e, there)
        ds = tl.load(dscore + number * heads + h, mask=there, other=0.0)[:, None]
        _, _, z = inner(
            left, ldl, right, ldr, edge, i, own, j, there, number, there, h, f, heads, score_width, right_step, ACC
        )  # fmt: skip
        acc += tl.where(z > 0, ds, ds * slope)
    total = tl.sum(acc, 0)
    if slot >= 0:
        tl.store(part + (slot.to(tl.int64) * heads + h) * score_width + f, total, mask=f < score_width)
    else:
        tl.store(dleft + (row * heads + h) * score_width + f, total, mask=f < score_width)


@triton.jit(do_not_specialize=["heads", "attr_width"])
def attributes_kernel(
    edge_of, row_of, slot_of, edge_id, dscore, alpha, query, grad_attr, dattr, heads, attr_width,
    ACC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dattr[e] = sum over heads of dscore * query[i] + alpha * grad_attr[i]; alpha is of the weights after dropout."""
    row, _, start, end = locate(tl.program_id(0), edge_of, row_of, slot_of)
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


@triton.jit(do_not_specialize=["lda", "ldb", "rows", "heads", "width"])
def row_dot_kernel(
    a, lda, b, ldb, out, rows, heads, width, ADD: tl.constexpr, ACC: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """out[i, h] = a[i, h] . b[i, h], or that much more."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    there = i < rows
    h = tl.program_id(1)
    width = width // VEC * VEC
    at_a, at_b = i * (lda // VEC * VEC) + h * width, i * (ldb // VEC * VEC) + h * width
    d = row_dot(a, at_a, there, b, at_b, there, width, BLOCK_E, ACC, BLOCK_F)
    if ADD:
        d += tl.load(out + i * heads + h, mask=there, other=0.0)
    tl.store(out + i * heads + h, d, mask=there)
