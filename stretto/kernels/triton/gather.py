"""gather_rows in Triton: a tile of output rows per program."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.triton.launch import kernel
from stretto.kernels.triton.operands import power, tiles

# A copy knows no types, only sizes: rows travel as the widest integers that divide them and where they begin.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@kernel("words", "n")
def _gather(x, index, out, words, n, VEC: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    wide = words // VEC * VEC
    there = i < n
    inside = there[:, None] & (k < wide)[None, :]
    at = tl.load(index + i, mask=there, other=0).to(tl.int64) * (words // VEC) * VEC
    v = tl.load(x + at[:, None] + k[None, :], mask=inside, other=0)
    tl.store(out + (i * (words // VEC) * VEC)[:, None] + k[None, :], v, mask=inside)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]. x [m, ...], index [E] -> [E, ...]."""
    x, index = x.contiguous(), index.contiguous()
    out = x.new_empty(index.numel(), *x.shape[1:])
    if out.numel() == 0:
        return out
    row_bytes = x[0].numel() * x.element_size()
    start = x.storage_offset() * x.element_size()  # a slice may begin between two words
    size = max(s for s in WORDS if row_bytes % s == start % s == x.data_ptr() % s == 0)
    source, target = (t.reshape(-1).view(torch.uint8).view(WORDS[size]) for t in (x, out))
    words = row_bytes // size
    vec = 2 if words % 2 == 0 and size == 8 else 1
    block = power(words, 128)
    edges = max(1, 512 // block)
    _gather[(tiles(index.numel(), edges), tiles(words, block))](
        source, index, target, words, index.numel(), VEC=vec, BLOCK_E=edges, BLOCK_K=block, num_warps=2
    )
    return out
