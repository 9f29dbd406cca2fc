"""Edges that come in both directions: which two belong together, and whether their features are alike. CPU only."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stretto.kernels import native
from stretto.kernels.cpu import struct
from stretto.kernels.csr import Csr
from stretto.kernels.schema import CPU

MANY = 1 << 16  # edges from which on memory for the most pairs they may be costs more than counting them first


def find(csr: Csr, reverse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pairs of a matrix that is its own transpose, entry by entry; reverse [E]: the transpose's edge ids.

    -> the pair of every edge in the user's order [E]; an edge of every pair, and its reverse [P]; source and
    destination of the former [2, P].
    """
    count = ctypes.c_int64()
    at, counted = struct(csr), ctypes.addressof(count)
    most = csr.num_edges
    if most >= MANY:
        native.call("stretto_pairs", at, reverse, counted, None, None, None, None)
        most = count.value
    number = torch.empty(csr.num_edges, dtype=reverse.dtype, device=CPU)
    found = torch.empty(4 * most, dtype=torch.int64, device=CPU)  # first, second, and both ends
    start, step = found.data_ptr(), 8 * most
    native.call("stretto_pairs", at, reverse, counted, number, start, start + step, start + 2 * step)
    pairs = count.value
    ends = found.as_strided((2, pairs), (pairs, 1), 2 * most)
    return number, found.narrow(0, 0, pairs), found.narrow(0, most, pairs), ends


def alike(rows: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
    """rows at first, if rows at second are the same, bit by bit; else None. rows [E, ...] -> [P, ...]."""
    rows = rows.contiguous()
    out = torch.empty(first.numel(), *rows.shape[1:], dtype=rows.dtype, device=CPU)
    width = rows.element_size() * (rows.numel() // max(rows.size(0), 1))
    same = native.call("stretto_pair_rows", rows, width, first, second, first.numel(), out, torch.get_num_threads())
    return out if same else None
