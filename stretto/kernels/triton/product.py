"""Dense fp32 products in Triton: on the tensor cores, without giving up fp32's precision.

product: tall matrices times small ones. Each factor is the sum of two tf32 numbers; three of their four products are
made, and sums of 32 are added up in fp32. The small matrix is split beforehand: the tensor cores then read it as it is.
transposed_product: two tall matrices, summed over their rows, as the gradient of a weight is. Each factor is the sum of
three bf16 numbers, of whose nine products six are made: tf32 operands may not lie across. Programs take blocks of rows,
whose sums are added in order. Both err less than torch's own fp32 product (docs/gpu.md). Where torch is allowed to
round to tf32, it does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.triton import tape
from stretto.kernels.triton.activations import positive
from stretto.kernels.triton.column_sum import sum_few
from stretto.kernels.triton.launch import call, interpreted, jit, kernel
from stretto.kernels.triton.operands import power, tiles

PROGRAMS = {
    128: 132,
    64: 264,
}  # of a transposed product, by the height of a tile: as many as run at once on a large card
WIDE, NARROW = 128, 32  # columns of its factors from which it is faster than torch's
LEAST_ROWS = 512  # of such a program
TINY = tl.constexpr(2.0**-40)
REGISTERS = {"maxnreg": 128}  # two programs of 8 warps share a multiprocessor


@jit
def rounded(a):
    """The nearest tf32 number, as fp32."""
    return ((a.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)


@jit
def halves(a):
    """a as the sum of two tf32 numbers; infinities have no second."""
    high = rounded(a)
    low = a - high
    return high, tl.where(low == low, low, 0.0)


@kernel("rows", "inner", "by_row", "by_column")
def _split(w, by_row, by_column, out, rows, inner, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (r < rows)[:, None] & (c < inner)[None, :]
    a = tl.load(w + r[:, None] * by_row + c[None, :] * by_column, mask=live, other=0.0)
    # Both halves have a's sign, and the second is 0 only where a is: an infinity times each is the same infinity.
    high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    rest = a - high
    low = rounded(tl.where(rest == rest, rest, 0.0))
    low = tl.where(low == 0.0, high * TINY, low)
    to = r[:, None] * inner + c[None, :]
    tl.store(out + to, high, mask=live)
    tl.store(out + rows * inner + to, low, mask=live)


@kernel("ldx", "ldo", "rows", "inner", "width", "step")
def _tiles(
    x, ldx, w, bias, add, gate, out, ldo, att, att2, score, score2, rows, inner, width, step,
    RELU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # All strides are known to be divisible by 4: loads of 16 bytes.
    ldx, ldo, ldw = ldx // 4 * 4, ldo // 4 * 4, inner // 4 * 4
    r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) * (step // 4 * 4)
    c = first + tl.arange(0, BLOCK_N)
    mine = (c < width // 4 * 4) & (c < first + step // 4 * 4)
    from_x = x + r[:, None].to(tl.int64) * ldx
    from_w = w + c[None, :] * ldw  # columns lie together: w is the transpose of a weight
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for base in range(0, inner, BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        a = tl.load(from_x + k[None, :], mask=(r < rows)[:, None] & (k < ldw)[None, :], other=0.0)
        inside = (k < ldw)[:, None] & mine[None, :]
        high = tl.load(from_w + k[:, None], mask=inside, other=0.0)
        low = tl.load(from_w + k[:, None] + width * ldw, mask=inside, other=0.0)
        if RELU:
            a = positive(a)
        a_high, a_low = halves(a)
        part = tl.dot(a_high, low, input_precision="tf32")
        part = tl.dot(a_low, high, part, input_precision="tf32")
        acc += tl.dot(a_high, high, part, input_precision="tf32")
    inside = (r < rows)[:, None] & mine[None, :]
    to = r[:, None].to(tl.int64) * ldo + c[None, :]
    if bias is not None:
        acc += tl.load(bias + c, mask=mine, other=0.0)[None, :]
    if add is not None:
        acc += tl.load(add + to, mask=inside, other=0.0)
    if gate is not None:
        acc = tl.where(tl.load(gate + to, mask=inside, other=0.0) > 0, acc, 0.0)
    tl.store(out + to, acc, mask=inside)
    if att is not None:  # a column tile is a head: its scores follow
        at = r.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        one = tl.load(att + c, mask=mine, other=0.0)[None, :]
        other = tl.load(att2 + c, mask=mine, other=0.0)[None, :]
        tl.store(score + at, tl.sum(acc * one, 1), mask=r < rows)
        tl.store(score2 + at, tl.sum(acc * other, 1), mask=r < rows)


@kernel("lda", "ldb", "rows", "width", "width_b", "rows_each")
def _across(
    a, lda, b, ldb, part, sums, rows, width, width_b, rows_each,
    RELU: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    lda, ldb, m, n = lda // 4 * 4, ldb // 4 * 4, width // 4 * 4, width_b // 4 * 4
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2).to(tl.int64) * rows_each
    count = tl.minimum(rows_each, rows - first).to(tl.int32)
    a += first * lda
    b += first * ldb
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    total = tl.full((BLOCK_K, BLOCK_M), 0.0, tl.float32)
    for base in range(0, count, BLOCK_K):
        r = base + tl.arange(0, BLOCK_K)
        p = tl.load(a + r[:, None] * lda + i[None, :], mask=(r < count)[:, None] & (i < m)[None, :], other=0.0)
        q = tl.load(b + r[:, None] * ldb + j[None, :], mask=(r < count)[:, None] & (j < n)[None, :], other=0.0)
        if RELU:
            q = positive(q)
        # Wanted or not: a matrix that is read across only is loaded number by number.
        total += p
        p1, p2, p3 = thirds(tl.trans(p))
        q1, q2, q3 = thirds(q)
        some = plus_dot(None, p3, q1, BITS)  # the small ones first
        some = plus_dot(some, p1, q3, BITS)
        some = plus_dot(some, p2, q2, BITS)
        some = plus_dot(some, p2, q1, BITS)
        some = plus_dot(some, p1, q2, BITS)
        acc += plus_dot(some, p1, q1, BITS)
    to = (tl.program_id(2) * width + i)[:, None] * width_b + j[None, :]
    tl.store(part + to, acc, mask=(i < width)[:, None] & (j < width_b)[None, :])
    if tl.program_id(1) == 0:
        tl.store(sums + tl.program_id(2) * width + i, tl.sum(total, 0), mask=i < width)


@jit
def plus_dot(sums, p, q, BITS: tl.constexpr):
    """sums + p q. Triton's interpreter multiplies the bits of bf16 numbers: it gets them as fp32."""
    if BITS:
        p, q = p.to(tl.float32), q.to(tl.float32)
    return tl.dot(p, q, sums)


@jit
def thirds(a):
    """a as the sum of three bf16 numbers, of eight of its bits each; infinities have no others."""
    one = upper(a)
    rest = a - one
    rest = tl.where(rest == rest, rest, 0.0)
    two = upper(rest)
    return half(one), half(two), half(rest - two)


@jit
def upper(a):
    """The number of the first eight bits of a's fraction: nothing is rounded, which costs less."""
    return (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@jit
def half(a):
    """A number of eight bits as bf16."""
    return (a.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


def split(w: Tensor) -> Tensor:
    """The columns of w as sums of two tf32 numbers. w [k, n] -> [2, n, k]."""
    k, n = w.shape
    out = w.new_empty(2, n, k)
    _split[(tiles(n, 32), tiles(k, 32))](w, w.stride(1), w.stride(0), out, n, k, BLOCK=32, num_warps=4)
    return out


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    add: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    relu: bool = False,
    block_m: int = 128,
    block_n: int = 64,
    block_k: int = 32,
    warps: int = 8,
    stages: int = 3,
) -> Tensor:
    """x w + bias or + add, into `out` where given, which may be `add` itself. x [m, k], w [k, n], both fp32 -> [m, n].

    The row stride of x, k and n are divisible by 4; the rows of x are contiguous. relu: of relu(x) instead of x; gate
    [m, n]: only where it is above 0, elsewhere 0.
    """
    options = (relu, block_m, block_n, block_k, warps, stages)
    if out is not None:
        return _product(options, x, w, bias, add, gate, out)[0]
    inputs = (x, w, bias, add, gate)
    (found,) = tape.run(tape.GENERAL, ("product", options), functools.partial(_product, options), inputs)
    assert found is not None
    return found


def _product(
    options: tuple[Any, ...],
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    add: Tensor | None,
    gate: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor]:
    relu, block_m, block_n, block_k, warps, stages = options
    m, k = x.shape
    n = w.size(1)
    out = x.new_empty(m, n) if out is None else out
    if m:
        _tiles[(tiles(n, block_n), tiles(m, block_m))](
            x, x.stride(0), split(w), bias, add, gate, out, out.stride(0), None, None, None, None, m, k, n, block_n,
            RELU=relu, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
            **REGISTERS,
        )  # fmt: skip
    return (out,)


def product_with_scores(x: Tensor, w: Tensor, att: Tensor, att2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x w, and what every head of it makes with two vectors. x [m, k], w [k, h * f], att [.., h, f] -> [m, h], twice.

    f is divisible by 4 and at most 128.
    """
    m, k = x.shape
    n = w.size(1)
    heads, width = att.shape[-2:]
    out, score, score2 = x.new_empty(m, n), x.new_empty(m, heads), x.new_empty(m, heads)
    if m:
        _tiles[(heads, tiles(m, 128))](
            x, x.stride(0), split(w), None, None, None, out, n, att, att2, score, score2, m, k, n, width,
            RELU=False, BLOCK_M=128, BLOCK_N=max(16, power(width, 128)), BLOCK_K=32, num_warps=8, num_stages=3,
            **(REGISTERS if width <= 64 else {}),
        )  # fmt: skip
    return out, score, score2


def transposed_product(a: Tensor, b: Tensor, *, relu: bool = False, sums: bool = False) -> tuple[Tensor, Tensor | None]:
    """a' b, or a' relu(b), and the sums of the columns of a, if wanted. a [r, m], b [r, n], both fp32 -> [m, n], [m].

    Row strides, m and n are divisible by 4, rows contiguous.
    """
    function = functools.partial(_transposed_product, relu, sums)
    found, total = tape.run(tape.GENERAL, ("transposed product", relu, sums), function, (a, b))
    assert found is not None
    return found, total


def _transposed_product(relu: bool, sums: bool, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor | None]:
    rows, m, n = a.size(0), a.size(1), b.size(1)
    tall = 128 if m > 64 else 64  # a program of the smaller tile takes half the registers: two share a multiprocessor
    down, over = tiles(m, tall), tiles(n, 128)
    blocks = max(1, min(tiles(rows, LEAST_ROWS), PROGRAMS[tall] // (down * over)))
    part, total = a.new_empty(blocks, m * n), a.new_empty(blocks, m)
    _across[(down, over, blocks)](
        a, a.stride(0), b, b.stride(0), part, total, rows, m, n, tiles(rows, 32 * blocks) * 32, RELU=relu,
        BITS=interpreted(_across), BLOCK_M=tall, BLOCK_N=128, BLOCK_K=32, num_warps=tall // 16, num_stages=3,
    )  # fmt: skip
    return sum_few(part).view(m, n), sum_few(total) if sums else None


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """grad' x, by torch's kernel where x is narrow. grad [r, o], x [r, i] -> [o, i]."""
    if x.size(1) >= WIDE and grad.size(1) >= NARROW:
        return _transposed_product(False, False, grad, x)[0]
    out = grad.new_empty(grad.size(1), x.size(1))
    call(lambda g, rows, into: torch.mm(g.t(), rows, out=into), grad, x, out)
    return out
