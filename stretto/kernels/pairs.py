"""Edges that come in both directions: which two belong together, and whether their features are alike. CPU only."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stretto.kernels import native
from stretto.kernels.cpu import struct
from stretto.kernels.csr import Csr


def find(csr: Csr, reverse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pairs of a matrix that is its own transpose, entry by entry; reverse [E]: the transpose's edge ids.

    -> the pair of every edge in the user's order [E]; an edge of every pair, and its reverse [P]; source and
    destination of the former [2, P].
    """
    count = ctypes.c_int64()
    at, counted = struct(csr), ctypes.addressof(count)
    native.call("stretto_pairs", at, reverse.data_ptr(), counted, None, None, None, None)
    pairs = count.value
    number = torch.empty(csr.num_edges, dtype=reverse.dtype)
    first, second = torch.empty(pairs, dtype=torch.int64), torch.empty(pairs, dtype=torch.int64)
    ends = torch.empty(2, pairs, dtype=torch.int64)
    places = (number.data_ptr(), first.data_ptr(), second.data_ptr(), ends.data_ptr())
    native.call("stretto_pairs", at, reverse.data_ptr(), counted, *places)
    return number, first, second, ends


def alike(rows: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
    """rows at first, if rows at second are the same, bit by bit; else None. rows [E, ...] -> [P, ...]"""
    rows = rows.contiguous()
    out = torch.empty(first.numel(), *rows.shape[1:], dtype=rows.dtype)
    width = rows.element_size() * (rows.numel() // max(rows.size(0), 1))
    same = native.call(
        "stretto_pair_rows",
        rows.data_ptr(),
        width,
        first.data_ptr(),
        second.data_ptr(),
        first.numel(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out if same else None
