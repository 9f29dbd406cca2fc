"""The points of a sweep: one axis moved at a time, away from the call that was found in the model.

The axes are what a user can change: the order of the edges, types of values and indices, threads, torch.compile; and
whether a candidate still leads with its gradient, in cold caches, and at other sizes. How ops behave on graphs of other
kinds is the operator study's question (benchmarks/operator_study).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

WIDTHS = (64, 256, 16, 1, 512, 128, 33)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
TYPES = ("f32", "bf16", "f16")  # that are moved to; a model in f64 is swept in it, too
ORDERS = ("given", "shuffled", "sorted", "by degree")
SIZES = (1.0, 0.25, 4.0)  # times the number of edges or nodes of the base
DIRECTIONS = ("forward", "both")


@dataclass(frozen=True)
class Point:
    """One cell of the sweep."""

    width: int
    dtype: str = "f32"
    index: str = "int64"
    order: str = "given"
    edges: float = 1.0  # times as many entries as were found, over the same nodes
    nodes: float = 1.0  # times as many rows as were found, for the same entries
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
        "order": ORDERS, "direction": DIRECTIONS, "width": WIDTHS, "dtype": TYPES, "index": ("int64", "int32"),
        "edges": tuple(size * base.edges for size in SIZES), "nodes": tuple(size * base.nodes for size in SIZES),
        "threads": tuple(range(1, cores + 1)) if base.device == "cpu" else (),
        "cache": ("warm", "cold"), "compiled": (False, True),
    }  # fmt: skip
    moved = [
        [point for value in values if (point := replace(base, **{axis: value})) != base]  # type: ignore[arg-type]
        for axis, values in axes.items()
    ]
    for turn in zip_longest(*moved):
        yield from (point for point in turn if point is not None)


def place(index: Tensor, num_rows: int, point: Point) -> tuple[Tensor, int]:
    """The index of a point: another size or order. index [E] -> ([E'], rows)"""
    index, num_rows = spread(times(index, point.edges), num_rows, point.nodes)
    if point.order == "shuffled":
        index = index[torch.randperm(index.numel(), generator=torch.Generator().manual_seed(0))]
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


def values(rows: int, point: Point) -> Tensor:
    """Random features. -> [rows, width]"""
    x = torch.randn(rows, point.width, generator=torch.Generator().manual_seed(0))
    return x.to(point.device, DTYPES[point.dtype])
