"""The points of a sweep: one axis moved at a time, away from the call that was found in the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from stretto.datasets import er, grid, rmat
from stretto.errors import expect

WIDTHS = (64, 256, 16, 1, 512, 128, 33)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
TYPES = ("f32", "bf16", "f16")  # that are moved to; a model in f64 is swept in it, too
ORDERS = ("given", "shuffled", "sorted", "by degree")
LAWS = ("real", "power law", "regular", "grid")
SPARSITIES = (0.0, 0.9, 0.5, 0.99)
DENSITIES = (1.0, 0.1, 0.5, 0.01)
SIZES = (1.0, 0.25, 4.0)  # times the number of edges or nodes of the base
DIRECTIONS = ("forward", "both")
ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Point:
    """One cell of the sweep."""

    width: int
    dtype: str = "f32"
    index: str = "int64"
    order: str = "given"
    law: str = "real"
    sparsity: float = 0.0  # zeros among the stored values
    density: float = 1.0  # share of the entries of the index that are kept, at random: structural
    edges: float = 1.0  # times as many entries as were found, over the same nodes
    nodes: float = 1.0  # times as many rows as were found, for the same entries
    aligned: bool = True  # the values start at a multiple of 64 bytes, or one value off
    direction: str = "forward"
    threads: int = 1
    cache: str = "warm"
    compiled: bool = False  # torch's own way beside itself under torch.compile, which takes its time to compile
    device: str = "cpu"  # where the model was; never moved

    def moved(self, base: Point) -> str:
        """The axis on which this point differs from the base; "base" for itself."""
        return next((name for name, value in vars(self).items() if value != getattr(base, name)), "base")


def points(base: Point, cores: int) -> Iterator[Point]:
    """The base, then one point of every axis, then a second of each, and so on. A card has no threads of ours.

    A cold cache and torch.compile come after the others of their round: one sample costs tens of milliseconds, the
    other seconds.
    """
    yield base
    axes: dict[str, tuple[object, ...]] = {
        "order": ORDERS, "direction": DIRECTIONS, "width": WIDTHS, "law": LAWS, "sparsity": SPARSITIES,
        "dtype": TYPES, "index": ("int64", "int32"), "density": DENSITIES,
        "edges": tuple(size * base.edges for size in SIZES), "nodes": tuple(size * base.nodes for size in SIZES),
        "aligned": (True, False), "threads": tuple(range(1, cores + 1)) if base.device == "cpu" else (),
        "cache": ("warm", "cold"), "compiled": (False, True),
    }  # fmt: skip
    moved = [
        [point for value in values if (point := replace(base, **{axis: value})) != base]  # type: ignore[arg-type]
        for axis, values in axes.items()
    ]
    for turn in zip_longest(*moved):
        yield from (point for point in turn if point is not None)


def place(index: Tensor, num_rows: int, point: Point) -> tuple[Tensor, int]:
    """The index of a point: another law, size or order, or fewer entries. index [E] -> ([E'], rows)"""
    if point.law != "real":
        index, num_rows = _law(point.law, index.numel(), num_rows)
    index = times(index, point.edges)
    index, num_rows = spread(index, num_rows, point.nodes)
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


def times(index: Tensor, factor: float) -> Tensor:
    """The entries along the last dimension `factor` times: every so many of them, or all of them again and again."""
    if factor < 1:
        return index[..., :: round(1 / factor)]
    # One after the other, not each several times in a row: that would find its row in the nearest cache.
    many = index.repeat(*[1] * (index.dim() - 1), round(factor))
    rising = index.dim() == 1 and bool((index.diff() >= 0).all())
    return many.sort().values if rising and factor > 1 else many


def spread(index: Tensor, num_rows: int, factor: float) -> tuple[Tensor, int]:
    """The same entries over `factor` times as many rows, in the same order."""
    if factor < 1:
        step = round(1 / factor)
        return index // step, max(1, -(-num_rows // step))
    step = round(factor)
    return (index * step + torch.arange(index.size(-1)) % step if step > 1 else index), num_rows * step


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


def values(rows: int, point: Point, width: int | None = None) -> Tensor:
    """Random features with the point's share of stored zeros. -> [rows, width], the point's width unless given"""
    width = point.width if width is None else width
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator)
    if point.sparsity:
        x *= torch.rand(rows, width, generator=generator) >= point.sparsity
    return placed(x.to(point.device, DTYPES[point.dtype]), point.aligned)


def placed(x: Tensor, aligned: bool) -> Tensor:
    """A copy of x that starts at a multiple of 64 bytes, or one value off."""
    size = x.element_size()
    room = x.new_empty(x.numel() + ALIGNED // size + 1)
    start = -room.data_ptr() % ALIGNED // size + (not aligned)
    return room[start : start + x.numel()].view(x.shape).copy_(x)
