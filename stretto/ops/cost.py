"""What a kernel costs, as its declaration counts it: of tensors, or of specs of them whose sizes may be symbols.

One flop per addition, multiplication, comparison or transcendental. Bytes as if no cache helped: each operand once, one
row per entry of an index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Size = Any  # int, or a sympy expression


class Cost(NamedTuple):
    """flops; bytes read and written in order (stream); bytes at random rows, each of `row` bytes, within `span` bytes.

    depth: steps of an ideal parallel machine, in its log terms; None: those of a sum over the neighbours of a node.
    """

    family: str
    flops: Size = 0
    stream: Size = 0
    random: Size = 0
    row: Size = 0
    span: Size = 0
    depth: Size = 1
    known: bool = True

    @property
    def bytes(self) -> Size:
        """All of them."""
        return self.stream + self.random


Formula = Callable[..., Cost]  # takes what the kernel takes: a matrix with num_rows, num_edges, nbytes, and specs


def row_values(x: Any) -> int:
    """Values of one row of a tensor; a symbol, where those of a spec are."""
    values = 1
    for size in x.shape[1:]:
        values = values * size
    return values


def row_bytes(x: Any) -> int:
    """Bytes of one row."""
    size: int = x.dtype.itemsize
    return row_values(x) * size


def gathered(family: str, flops: Size, stream: Size, num_edges: Size, *tables: Any, ways: int = 1) -> Cost:
    """The cost where one row of every table is read for every edge; ways: how often all of that is done."""
    row, span = sum(row_bytes(t) for t in tables), sum(t.nbytes for t in tables)
    return Cost(family, ways * flops, ways * stream, ways * num_edges * row, row, ways * span, None)


def wide_specs(values: Any) -> list[Any]:
    """Every matrix among arguments, those in tuples included."""
    if isinstance(values, tuple):
        return [spec for value in values for spec in wide_specs(value)]
    return [values] if len(getattr(values, "shape", ())) == 2 else []
