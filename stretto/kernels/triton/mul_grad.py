"""mul_grad in Triton: each row's zeros are counted and its other entries multiplied; each edge then divides itself out.

Pieces of a hub leave count and product in slots; a second launch combines them in order and writes those pieces.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import acc_of, at_entry, hub_of, locate, power, tiles
from stretto.kernels.triton.pieces import pieces


@jit
def write(x, grad, dx, edge_id, row, start, end, k, width, zeros, rest, ACC: tl.constexpr):
    """grad times the product of the other entries, for the edges [start, end) of a row."""
    live = k < width
    own = tl.load(grad + row * width + k, mask=live, other=0.0)
    for base in range(start, end):
        e = base + tl.arange(0, 1)
        at = at_entry(edge_id, e, e < end) * width + k
        v = tl.load(x + at, mask=live, other=1.0)
        others = zeros - (v == 0).to(ACC)
        r = tl.where(others == 0, own * (rest / tl.where(v == 0, 1.0, v)), 0.0)
        tl.store(dx + at, r, mask=live)


@kernel("windows", "chunk", "width")
def _pieces(
    rowptr, row_of, windows, chunk, edge_id, x, grad, dx, part, width, ACC: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < width
    zeros = tl.full((BLOCK_K,), 0.0, ACC)
    rest = tl.full((BLOCK_K,), 1.0, ACC)
    for base in range(start, end):
        e = base + tl.arange(0, 1)
        v = tl.load(x + at_entry(edge_id, e, e < end) * width + k, mask=live, other=1.0)
        zeros += (v == 0).to(ACC)
        rest = rest * tl.where(v == 0, 1.0, v)
    if slot >= 0:
        to = slot.to(tl.int64) * width * 2 + k
        tl.store(part + to, zeros, mask=live)
        tl.store(part + to + width, rest, mask=live)
    elif end > start:
        write(x, grad, dx, edge_id, row, start, end, k, width, zeros, rest, ACC)


@kernel("windows", "chunk", "width")
def _hubs(
    rowptr, row_of, windows, chunk, edge_id, x, grad, dx, part, width,
    ACC: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, first, last = hub_of(tl.program_id(0), rowptr, row_of, chunk)
    if row < 0:
        return
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < width
    zeros = tl.full((BLOCK_K,), 0.0, ACC)
    rest = tl.full((BLOCK_K,), 1.0, ACC)
    for base in range(first, last):
        at = (base + tl.arange(0, 1)).to(tl.int64) * width * 2 + k
        zeros += tl.load(part + at, mask=live, other=0.0)
        rest = rest * tl.load(part + at + width, mask=live, other=1.0)
    _, _, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    write(x, grad, dx, edge_id, row, start, end, k, width, zeros, rest, ACC)


def mul_grad(csr: Csr, x: Tensor, grad: Tensor) -> Tensor:
    """reference.mul_grad; in the accumulation type."""
    acc, width = accumulate_type(x.dtype), x.size(1)
    dx = torch.empty(x.shape, dtype=acc, device=x.device)
    if dx.numel():
        values, upstream = x.to(acc).contiguous(), grad.to(acc).contiguous()
        cut = pieces(csr)
        block = power(width, 128)
        across = tiles(width, block)
        part = values.new_empty(cut.windows, 2, width)
        flags = {"ACC": acc_of(acc), "BLOCK_K": block, "num_warps": 1}
        _pieces[(cut.count, across)](
            *cut.args, csr.edge_id, values, upstream, dx, part, width, **flags
        )  # fmt: skip
        if cut.windows:
            _hubs[(cut.windows, across)](
                *cut.args, csr.edge_id, values, upstream, dx,
                part, width, **flags,
            )  # fmt: skip
    return dx.to(x.dtype)
