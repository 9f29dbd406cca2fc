"""How the work on a matrix is cut for a GPU: pieces of rows, derived on the device once per matrix and kept with it.

A piece is a whole row, or at most `chunk` edges of a longer one (a hub). Pieces follow the order of the edges, so that
piece p covers the edges [edge[p], edge[p + 1]) of row[p]. Pieces of a hub leave partial results in slots, which are
merged in order: no atomics, the same bits every time. Everything here depends on the graph alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.kernels.csr import Csr

# A chunk is long enough to amortise its partial result, short enough that one does not outlast the rest of the launch.
LEAST_CHUNK = 256
MOST_CHUNKS = 1 << 16
# Up to this many slots the counts are bounded instead of read back: a mini-batch then never waits for the device.
BOUNDED_SLOTS = 1 << 13


@dataclass(frozen=True)
class Pieces:
    """edge [count + 1], row [count], slot [count] (-1: a whole row); hub_row [num_hubs], hub_slot [num_hubs + 1].

    slot_piece [num_slots] is the piece of each slot; its hub owns the slots [slot_first, slot_last). row None: piece p
    is row p and edge is rowptr. Where counts are bounds, surplus pieces and hubs have row num_rows, surplus slots
    piece -1.
    """

    count: int
    edge: Tensor
    row: Tensor | None
    slot: Tensor | None
    hub_row: Tensor | None
    hub_slot: Tensor | None
    num_hubs: int = 0
    num_slots: int = 0
    slot_piece: Tensor | None = None
    slot_first: Tensor | None = None
    slot_last: Tensor | None = None


def pieces(csr: Csr) -> Pieces:
    """The pieces of a matrix."""
    kept = csr.cache.get("pieces")
    if kept is None:
        kept = csr.cache["pieces"] = cut(csr.rowptr, csr.num_rows, csr.num_edges, chunk_of(csr.num_edges))
    return kept


def chunk_of(num_edges: int) -> int:
    """Edges of a piece at most: a power of two that grows with the graph, so that slots stay few."""
    chunk = LEAST_CHUNK
    while chunk * MOST_CHUNKS < num_edges:
        chunk *= 2
    return chunk


def cut(rowptr: Tensor, num_rows: int, num_edges: int, chunk: int) -> Pieces:
    """Pieces of at most `chunk` edges."""
    if num_edges <= chunk:  # no row can be longer
        return Pieces(num_rows, rowptr, None, None, None, None)
    device = rowptr.device
    degree = rowptr.diff()
    per_row = torch.div(degree + (chunk - 1), chunk, rounding_mode="floor")
    cut_rows = per_row > 1
    in_slots = torch.where(cut_rows, per_row, torch.zeros_like(per_row))
    per_row = per_row.clamp(min=1)
    count, num_slots, num_hubs = num_rows + num_edges // chunk, 2 * num_edges // chunk, num_edges // chunk
    if num_slots > BOUNDED_SLOTS:
        exact = torch.stack([per_row.sum(), in_slots.sum(), cut_rows.sum()]).tolist()
        count, num_slots, num_hubs = (int(n) for n in exact)
        if num_hubs == 0:
            return Pieces(num_rows, rowptr, None, None, None, None)
    ends = per_row.cumsum(0)
    place = torch.arange(count, device=device)
    row = torch.searchsorted(ends, place, right=True)  # surplus pieces: num_rows
    real = row.clamp(max=num_rows - 1)
    nth = place - (ends[real] - per_row[real])
    start = rowptr[real] + nth * chunk
    edge = torch.full((count + 1,), num_edges, dtype=rowptr.dtype, device=device)
    edge[:-1] = torch.where(row < num_rows, start, edge[:-1])
    slot_ends = in_slots.cumsum(0)
    first_slot = slot_ends - in_slots
    slot = torch.where((row < num_rows) & cut_rows[real], first_slot[real] + nth, torch.full_like(nth, -1))
    # The n-th hub goes to place n; all other rows to the surplus place at the end, which nobody reads.
    number = torch.where(cut_rows, cut_rows.cumsum(0) - 1, torch.full_like(degree, num_hubs))
    hub_row = torch.full((num_hubs + 1,), num_rows, dtype=torch.int64, device=device)
    hub_row.scatter_(0, number, torch.arange(num_rows, device=device))
    hub_slot = torch.zeros(num_hubs + 2, dtype=torch.int64, device=device)
    hub_slot.scatter_(0, number + 1, slot_ends)
    slot_piece = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
    slot_piece.scatter_(0, torch.where(slot >= 0, slot, torch.full_like(slot, num_slots)), place)
    slot_piece = slot_piece[:num_slots]
    owner = real[slot_piece.clamp(min=0)]
    small = torch.int32 if max(num_rows, count) < 2**31 else torch.int64
    return Pieces(
        count,
        edge,
        row.to(small),
        slot.to(torch.int32),
        hub_row[:num_hubs].to(small),
        hub_slot[: num_hubs + 1].to(torch.int32),
        num_hubs,
        num_slots,
        slot_piece.to(small),
        first_slot[owner].to(torch.int32),
        slot_ends[owner].to(torch.int32),
    )
