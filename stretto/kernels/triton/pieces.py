"""How the work on a matrix is cut for a GPU: a piece is a whole row, or a part of a long one (a hub).

The edges are thought of in windows of `chunk`. A row of more than `chunk` edges contains the first edge of one window
at least; each such window is a piece of that row, and the first of them also takes the edges before it. Pieces
[0, windows) are windows, the others whole rows; what is no piece (a window of short rows, a hub's own row) has nothing
to do. Window w leaves its partial result in slot w, and the slots of a hub, which lie side by side, are merged in
order: no atomics, the same bits every time. The only thing to derive is which row holds each window's first edge, by
bisection on the device: nothing is counted, so nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.kernels.csr import Csr

# A chunk is long enough to amortise its partial result, short enough that one does not outlast the rest of the launch.
LEAST_CHUNK = 256
MOST_CHUNKS = 1 << 16


@dataclass(frozen=True)
class Pieces:
    """count pieces, the first `windows` of them windows of `chunk` edges; row [windows]: of each window's first edge.

    row None: no row can be longer than a chunk, piece p is row p.
    """

    count: int
    rowptr: Tensor
    row: Tensor | None
    windows: int
    chunk: int

    @property
    def args(self) -> tuple[Tensor, Tensor | None, int, int]:
        """What operands.locate takes."""
        return self.rowptr, self.row, self.windows, self.chunk


def pieces(csr: Csr) -> Pieces:
    """The pieces of a matrix; kept with it."""
    kept = csr.cache.get("pieces")
    if kept is None:
        kept = csr.cache["pieces"] = cut(csr.rowptr, csr.num_rows, csr.num_edges, chunk_of(csr.num_edges))
    return kept


def short_rows(csr: Csr) -> None:
    """Say that no row of a matrix is long: a piece is a row, and kernels for hubs are never asked for."""
    csr.cache["pieces"] = Pieces(csr.num_rows, csr.rowptr, None, 0, csr.num_edges)


def chunk_of(num_edges: int) -> int:
    """Edges of a window: a power of two that grows with the graph, so that slots stay few."""
    chunk = LEAST_CHUNK
    while chunk * MOST_CHUNKS < num_edges:
        chunk *= 2
    return chunk


def cut(rowptr: Tensor, num_rows: int, num_edges: int, chunk: int) -> Pieces:
    """Pieces of at most two chunks."""
    if num_edges <= chunk:  # no row can be longer
        return Pieces(num_rows, rowptr, None, 0, chunk)
    first = torch.arange(0, num_edges, chunk, device=rowptr.device)
    # One past the row that holds each first edge; the kernels take the one off.
    after = torch.searchsorted(rowptr, first, right=True, out_int32=num_rows < 2**31)
    return Pieces(num_rows + first.numel(), rowptr, after, first.numel(), chunk)
