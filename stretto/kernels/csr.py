"""Csr: the arrays of a sparse matrix as kernels see it. Tensors only; what they mean to a user is Graph's business."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Csr:
    """A matrix of num_rows destinations by num_cols sources, rows compressed.

    rowptr [num_rows + 1] int64; col [E] int32 or int64, or None: entry e has column e;
    edge_id [E], the position of each entry in the user's edge order, or None: CSR order is the user's order;
    tasks [T, 5] and hubs [H, 3] int64 on the CPU: how the work is cut (csrc/abi.h), num_slots partial results.
    """

    rowptr: Tensor
    col: Tensor | None
    edge_id: Tensor | None
    num_rows: int
    num_cols: int
    num_edges: int
    tasks: Tensor | None = None
    hubs: Tensor | None = None
    num_slots: int = 0
    cache: dict[str, Any] = field(default_factory=dict, repr=False)  # derived by a backend: C struct, torch CSR, ...

    @property
    def device(self) -> torch.device:
        return self.rowptr.device

    def rows(self) -> Tensor:
        """Row of every entry. [E] int64."""
        counts = self.rowptr.diff()
        return torch.repeat_interleave(counts, output_size=self.num_edges)

    def columns(self) -> Tensor:
        """Column of every entry. [E] int64."""
        if self.col is None:
            return torch.arange(self.num_edges, device=self.device)
        return self.col.long()

    def to_csr_order(self, values: Tensor) -> Tensor:
        """Per-edge values [E, ...] from the user's order into CSR order."""
        return values if self.edge_id is None else values[self.edge_id.long()]

    def to_user_order(self, values: Tensor) -> Tensor:
        """Per-edge values [E, ...] from CSR order into the user's order."""
        if self.edge_id is None:
            return values
        out = torch.empty_like(values)
        out[self.edge_id.long()] = values
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        held = (self.rowptr, self.col, self.edge_id, self.tasks, self.hubs)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def __getstate__(self) -> dict[str, Any]:
        """The matrix itself: how its work is cut is computed anew, by the library of whoever loads it."""
        return {**self.__dict__, "cache": {}, "tasks": None, "hubs": None, "num_slots": 0}
