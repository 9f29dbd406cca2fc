"""How close together the rows are that an index names: what lies in a cache from one use to the next is not random.

An index in random order reads every row from where the whole table lies; one that comes back to the same rows, or goes
along them, reads from a cache or in order, as fast as anything can be read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.kernels import Csr
from stretto.observe.nested import leaves

NEAR = 1 << 20  # bytes of rows after which one used again is no longer sure to be in a cache
WINDOWS, WINDOW = 4, 1 << 13  # of an index that are looked at, and their entries


def closeness(index: Tensor, row: float) -> float:
    """Share of an index's entries that name a row used shortly before, or the next one. index [E] -> 0 to 1."""
    flat = index.detach().reshape(-1)
    if not flat.numel():
        return 1.0
    total, result = 0, 0
    reach = max(1, int(NEAR / max(row, 1.0)))
    for window in range(WINDOWS):
        start = window * max(0, flat.numel() - WINDOW) // max(1, WINDOWS - 1)
        part = flat[start : start + WINDOW].to(torch.int64).cpu()
        after = torch.zeros(part.numel(), dtype=torch.bool)
        after[1:] = (part[1:] - part[:-1]).abs() <= 1
        order = torch.argsort(part, stable=True)
        again = torch.zeros_like(after)
        same = part[order][1:] == part[order][:-1]
        again[order[1:][same & (order[1:] - order[:-1] <= reach)]] = True
        total, result = total + part.numel(), result + int((after | again).sum())
        if flat.numel() <= WINDOW:
            break
    return result / total


def index_of(args: Any) -> Tensor | None:
    """The places where an op reads or writes rows: the columns of a matrix, or the first index after the table."""
    if isinstance(args, (list, tuple)) and args and isinstance(args[0], Csr):
        return args[0].col
    indices = (leaf for leaf in leaves(list(args)[1:]) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
    index = next((t for t in indices if t.dim() and t.dtype in (torch.int64, torch.int32)), None)
    return index if index is None or index.dim() == 1 or not index.numel() else index.flatten(1)[:, 0]
