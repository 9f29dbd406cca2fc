"""product in Triton: tall fp32 matrices times small ones on the tensor cores, without giving up fp32's precision.

Each factor is the sum of two tf32 numbers; three of their four products are made, and sums of 32 are added up in fp32.
The result errs less than torch's own fp32 product (docs/gpu.md). Where torch is allowed to round to tf32, it does.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from stretto.kernels.triton.launch import kernel
from stretto.kernels.triton.operands import tiles


@kernel("ldx", "ldw", "ldo", "rows", "inner", "width")
def _tiles(
    x, ldx, w, ldw, bias, add, out, ldo, rows, inner, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # All strides are known to be divisible by 4: loads of 16 bytes.
    ldx, ldw, ldo = ldx // 4 * 4, ldw // 4 * 4, ldo // 4 * 4
    r = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_x = x + r[:, None].to(tl.int64) * ldx
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    for base in range(0, inner, BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        a = tl.load(from_x + k[None, :], mask=(r < rows)[:, None] & (k < inner // 4 * 4)[None, :], other=0.0)
        at = k[:, None] + c[None, :] * ldw  # columns lie together: w is the transpose of a weight
        b = tl.load(w + at, mask=(k < inner // 4 * 4)[:, None] & (c < width)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    inside = (r < rows)[:, None] & (c < width // 4 * 4)[None, :]
    to = r[:, None].to(tl.int64) * ldo + c[None, :]
    if bias is not None:
        acc += tl.load(bias + c, mask=c < width, other=0.0)[None, :]
    if add is not None:
        acc += tl.load(add + to, mask=inside, other=0.0)
    tl.store(out + to, acc, mask=inside)


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    add: Tensor | None = None,
    out: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 64,
    block_k: int = 32,
    warps: int = 8,
    stages: int = 3,
) -> Tensor:
    """x w + bias or + add, into `out` where given, which may be `add` itself. x [m, k], w [k, n], both fp32 -> [m, n]

    The row stride of x, k and n are divisible by 4; the rows of x are contiguous.
    """
    m, k = x.shape
    n = w.size(1)
    out = x.new_empty(m, n) if out is None else out
    if w.stride(0) != 1:  # small, and the tensor cores want it by columns: turned once instead of by every program
        w = w.t().contiguous().t()
    _tiles[(tiles(n, block_n), tiles(m, block_m))](
        x, x.stride(0), w, w.stride(1), bias, add, out, out.stride(0), m, k, n,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
