"""The edges of a graph in blocks: whole rows, and pieces of a row that is longer than a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.kernels.csr import Csr


@dataclass(eq=False)
class Block:
    """Edges of a few whole rows, or a piece of one row: their destinations, sources and numbers, and their graph.

    opens, closes: whether the first edge of its rows is here, and the last.
    """

    first: int
    last: int
    opens: bool
    closes: bool
    rows: Tensor
    columns: Tensor
    ids: Tensor
    graph: Graph

    @property
    def whole(self) -> bool:
        return self.opens and self.closes

    def where(self, place: int) -> Tensor:
        """The index of the block's edges at their destination (0), at their source (1), or of themselves (2)."""
        return (self.rows, self.columns, self.ids)[place]


def blocks(graph: Graph, block: int) -> Iterator[Block]:
    """The edges of a graph, at most `block` at a time; made anew each time, since kept they would double the graph."""
    csr = graph.edge_csr
    bounds = graph.derived(("edge_mlp", block), lambda: _bounds(csr.rowptr, block))
    for first, last, begin, end, opens, closes in bounds:
        rowptr = csr.rowptr[first : last + 1].clamp(begin, end) - begin
        rows = torch.repeat_interleave(rowptr.diff(), output_size=end - begin) + first
        part = slice(begin, end)
        columns = torch.arange(begin, end, device=csr.device) if csr.col is None else csr.col[part].long()
        ids = torch.arange(begin, end, device=csr.device) if csr.edge_id is None else csr.edge_id[part].long()
        inner = Csr(rowptr, None, None, last - first, end - begin, end - begin)
        yield Block(first, last, opens, closes, rows, columns, ids, Graph(inner))


def _bounds(rowptr: Tensor, block: int) -> list[tuple[int, int, int, int, bool, bool]]:
    """(first row, row after the last, first edge, edge after the last, opens, closes) of every block."""
    pointers, num_rows = rowptr.cpu(), rowptr.numel() - 1
    result: list[tuple[int, int, int, int, bool, bool]] = []
    first = 0
    while first < num_rows or not result:
        begin = int(pointers[first])
        last = int(torch.searchsorted(pointers, begin + block, right=True)) - 1
        if last > first or not num_rows:
            result.append((first, last, begin, int(pointers[last]), True, True))
            first = last
            continue
        stop = int(pointers[first + 1])  # one row has more edges than a block
        for start in range(begin, stop, block):
            end = min(start + block, stop)
            result.append((first, first + 1, start, end, start == begin, end == stop))
        first += 1
    return result
