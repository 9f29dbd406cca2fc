"""What every launch needs: tensors in the form kernels take them, and block sizes from widths."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton.launch import jit

ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def acc_of(dtype: torch.dtype) -> tl.dtype:
    """The type in which a kernel sums values of dtype."""
    return ACC[accumulate_type(dtype)]


def rows(x: Tensor) -> Tensor:
    """x with rows contiguous in themselves; only the row stride is free."""
    if x.dim() == 3:
        return x if x.stride(2) == 1 and x.stride(1) == x.size(2) else x.contiguous()
    return x if x.stride(1) == 1 else x.contiguous()


def plain(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Weights or scales: contiguous, in the accumulation type."""
    return None if values is None else values.to(accumulate_type(dtype)).contiguous()


def vector(*tensors: Tensor | None, width: int) -> int:
    """How many neighbouring values may be loaded at once: 16 bytes of the narrowest type, if all strides allow it."""
    given = [t for t in tensors if t is not None]
    most = 16 // min(t.element_size() for t in given)
    while most > 1 and (width % most or any(t.stride(0) % most for t in given)):
        most //= 2
    return most


REACH = 2**30  # places below this, doubled, still fit int32


def offsets(*tensors: Tensor | None, most: int = 0) -> tl.dtype:
    """The type of places in the tensors, and up to `most`: int32 while it reaches, for half the arithmetic."""
    spans = [t.size(0) * max(t.stride(0), t.numel() // max(t.size(0), 1)) for t in tensors if t is not None]
    return tl.int32 if max(spans, default=0) < REACH and most < REACH else tl.int64


def tiles(n: int, block: int) -> int:
    """How many blocks cover n; triton.cdiv costs more than a launch."""
    return (n + block - 1) // block


def power(n: int, most: int) -> int:
    """The least power of two >= n, at most `most`."""
    p = 1
    while p < n and p < most:
        p *= 2
    return p


@jit
def locate(piece, rowptr, row_of, windows, chunk):
    """Row (-1: not a piece), slot (-1: a whole row) and edges of a piece (pieces.py)."""
    if row_of is None:
        row = piece.to(tl.int64)
        return row, -1, tl.load(rowptr + row), tl.load(rowptr + row + 1)
    else:
        window = piece < windows
        named = tl.load(row_of + piece, mask=window, other=0).to(tl.int64) - 1
        row = tl.where(window, named, piece.to(tl.int64) - windows)
        start, end = tl.load(rowptr + row), tl.load(rowptr + row + 1)
        real = (end - start > chunk) == window
        edge = piece.to(tl.int64) * chunk  # the first of the window; the hub's first window also takes those before it
        start = tl.where(window & (edge - start >= chunk), edge, start)
        end = tl.where(window, tl.minimum(end, edge + chunk), end)
        return tl.where(real, row, -1), tl.where(window & real, piece, -1), start, tl.where(real, end, start)


@jit
def hub_of(window, rowptr, row_of, chunk):
    """The row whose edges a window holds (-1: it is no hub), and its first slot and the one after its last."""
    row = tl.load(row_of + window).to(tl.int64) - 1
    start, end = tl.load(rowptr + row), tl.load(rowptr + row + 1)
    return tl.where(end - start > chunk, row, -1), (start + chunk - 1) // chunk, (end - 1) // chunk + 1


@jit
def at_entry(index, e, there, INT: tl.constexpr = tl.int64):  # type: ignore[assignment]
    """index[e] as INT; e itself where there is no index."""
    if index is not None:
        return tl.load(index + e, mask=there, other=0).to(INT)
    else:
        return e.to(INT)
