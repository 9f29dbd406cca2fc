"""segment_matmul in Triton: all segments in one launch, a tile of rows and columns per program.

fp32 products are made of three tf32 ones, which errs less than torch's own fp32 product (docs/gpu.md). A tile's segment
and first row are listed on the host, which knows the bounds, and kept by them.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.triton.launch import kernel
from stretto.kernels.triton.operands import power, tiles

ROWS = 64
PRECISION = {torch.float32: "tf32x3", torch.bfloat16: "tf32", torch.float16: "tf32"}


@kernel("ldx", "ws", "wi", "wo", "inner", "width")
def _tiles(
    x, ldx, weight, ws, wi, wo, out, places, inner, width,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    at = places + tl.program_id(0) * 3
    segment, first, last = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    r = first + tl.arange(0, ROWS)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    acc = tl.full((ROWS, BLOCK_O), 0.0, tl.float32)
    for base in range(0, inner, BLOCK_I):
        i = base + tl.arange(0, BLOCK_I)
        a = tl.load(x + r[:, None] * ldx + i[None, :], mask=(r < last)[:, None] & (i < inner)[None, :], other=0.0)
        place = segment * ws + i[:, None] * wi + o[None, :] * wo
        b = tl.load(weight + place, mask=(i < inner)[:, None] & (o < width)[None, :], other=0.0)
        # A value of 16 bits fits tf32.
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    to = r[:, None] * width + o[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=(r < last)[:, None] & (o < width)[None, :])


@functools.lru_cache(maxsize=64)
def _places(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    """Segment, first row and the row after the segment's last, of every tile. [tiles, 3] int64."""
    listed = [
        (s, first, bounds[s + 1])
        for s in range(len(bounds) - 1)
        for first in range(bounds[s], bounds[s + 1], ROWS)
    ]  # fmt: skip
    return torch.tensor(listed, dtype=torch.int64).reshape(-1, 3).to(device)


def segment_matmul(x: Tensor, bounds: list[int], weight: Tensor) -> Tensor:
    """reference.segment_matmul."""
    out = x.new_empty(x.size(0), weight.size(2))
    if x.dtype not in PRECISION:  # fp64: torch's own, segment by segment
        for s in range(weight.size(0)):
            torch.mm(x[bounds[s] : bounds[s + 1]], weight[s], out=out[bounds[s] : bounds[s + 1]])
        return out
    if out.numel() == 0 or x.size(1) == 0:
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    places = _places(tuple(bounds), x.device)
    block = max(16, power(weight.size(2), 64))
    _tiles[(places.size(0), tiles(weight.size(2), block))](
        x, x.stride(0), weight, *weight.stride(), out, places, x.size(1), weight.size(2),
        PRECISION=PRECISION[x.dtype], ROWS=ROWS, BLOCK_I=32, BLOCK_O=block, num_warps=4,
    )  # fmt: skip
    return out
