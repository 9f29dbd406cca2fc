"""The points of a sweep: one axis moved at a time, away from the call that was found in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.datasets import er, grid, rmat
from stretto.errors import expect

WIDTHS = (1, 16, 64, 256)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ORDERS = ("given", "shuffled", "sorted", "by degree")
LAWS = ("real", "regular", "power law", "grid")
SPARSITIES = (0.0, 0.5, 0.9, 0.99)
DENSITIES = (1.0, 0.1)
DIRECTIONS = ("forward", "both")


@dataclass(frozen=True)
class Point:
    """One cell of the sweep."""

    width: int
    dtype: str = "f32"
    index: str = "int64"
    order: str = "given"
    law: str = "real"
    sparsity: float = 0.0  # zeros among the stored values
    density: float = 1.0  # share of the entries of the index that are kept: structural
    direction: str = "forward"
    threads: int = 1
    cache: str = "warm"
    compiled: bool = False  # torch's own way beside itself under torch.compile, which takes its time to compile
    device: str = "cpu"  # where the model was; never moved

    def moved(self, base: Point) -> str:
        """The axis on which this point differs from the base; "base" for itself."""
        return next((name for name, value in vars(self).items() if value != getattr(base, name)), "base")


def points(base: Point, cores: int) -> Iterator[Point]:
    """The base first, then every value of every axis. A card has no threads of ours."""
    yield base
    yield replace(base, cache="cold")
    axes: dict[str, tuple[object, ...]] = {
        "order": ORDERS, "direction": DIRECTIONS, "width": WIDTHS, "law": LAWS, "sparsity": SPARSITIES,
        "dtype": tuple(DTYPES), "index": ("int64", "int32"), "density": DENSITIES,
        "threads": tuple(range(1, cores + 1)) if base.device == "cpu" else (), "compiled": (False, True),
    }  # fmt: skip
    for axis, values in axes.items():
        for value in values:
            point = replace(base, **{axis: value})  # type: ignore[arg-type]
            if point != base:
                yield point


def place(index: Tensor, num_rows: int, point: Point) -> tuple[Tensor, int]:
    """The index of a point: another law or order or fewer entries. index [E] -> ([E'], rows)"""
    if point.law != "real":
        index, num_rows = _law(point.law, index.numel(), num_rows)
    generator = torch.Generator().manual_seed(0)
    if point.density < 1.0:
        index = index[torch.rand(index.numel(), generator=generator) < point.density]
    if point.order == "shuffled":
        index = index[torch.randperm(index.numel(), generator=generator)]
    elif point.order == "sorted":
        index = index.sort().values
    elif point.order == "by degree":  # rows renamed so that the most used ones are neighbours in memory
        rank = torch.empty(num_rows, dtype=index.dtype)
        rank[torch.bincount(index, minlength=num_rows).argsort(descending=True)] = torch.arange(
            num_rows, dtype=index.dtype
        )
        index = rank[index]
    return index.to(point.device, torch.int32 if point.index == "int32" else torch.int64), num_rows


def _law(law: str, entries: int, num_rows: int) -> tuple[Tensor, int]:
    if law == "regular":
        edges, rows = er(max(2, num_rows), entries // 2)
    elif law == "power law":
        edges, rows = rmat(max(1, (num_rows - 1).bit_length()), entries)
    else:
        expect(law == "grid", f"sweep: 'law' is {law!r}, wanted one of {', '.join(LAWS)}")
        edges, rows = grid(max(2, round(num_rows**0.5)))
    index = edges[0]
    return index[torch.arange(entries) % index.numel()] if index.numel() else index, rows


def values(rows: int, point: Point) -> Tensor:
    """Random features with the point's share of stored zeros. -> [rows, width]"""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, point.width, generator=generator)
    if point.sparsity:
        x *= torch.rand(rows, point.width, generator=generator) >= point.sparsity
    return x.to(point.device, DTYPES[point.dtype])
