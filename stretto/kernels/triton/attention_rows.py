"""Attention backward in Triton, row by row: what is made of sums over edges, of attributes and of results."""

# ruff: noqa: RUF059 -- kernels are written in Triton's subset of Python
from __future__ import annotations

import triton.language as tl

from stretto.kernels.triton.launch import kernel
from stretto.kernels.triton.operands import at_entry, locate
from stretto.kernels.triton.scores import row_dot


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
