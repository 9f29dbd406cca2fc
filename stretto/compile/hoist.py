"""Products of constants kept across steps: A X when X is the same unchanged tensor step after step.

A product is kept once its tensor has been seen twice without a change (identity and version; what comes out of dropout
is a new tensor every step and never qualifies), while the budget STRETTO_HOIST_MB allows, as long as the tensor lives.

Under hooks on what is saved for backward (torch.utils.checkpoint) nothing is looked up: there a tensor that was met in
forward is met again in backward, and must be served as before.

A constant X that is nearly all zeros (a bag of words) is kept by its nonzeros too: X W' is then a sparse product.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto import settings
from stretto.graph import Graph
from stretto.lifetime import popped_from
from stretto.ops.autograd_state import saved_elsewhere

Nonzeros = tuple[Graph, Tensor]  # [n, i] with an entry for each nonzero, and their values
LOOKS = 3  # how often a tensor is met before its zeros are counted
FEW = 32  # one value in so many is not zero
MANY = 1 << 18  # values below which a dense product is as fast
MOST_ASKED = 16  # products of a tensor remembered until they are asked for again


@dataclass
class _Entry:
    ref: weakref.ref[Tensor]
    mark: Hashable
    seen: int = 0
    products: dict[Hashable, Tensor] = field(default_factory=dict)
    held: dict[Hashable, object] = field(default_factory=dict)  # what keys name by number must outlive them
    asked: dict[Hashable, weakref.ref[Tensor] | None] = field(default_factory=dict)  # for products not kept yet
    looks: int = 0
    nonzeros: Nonzeros | None = None


class Hoist:
    """What is kept, per constant tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    def constant(self, x: Tensor) -> bool:
        """Whether x was seen before, unchanged; counts this time."""
        if x.requires_grad or x.is_inference() or saved_elsewhere():
            return False
        entry = self._entry(x)
        entry.seen += 1
        return entry.seen > 1

    def nonzeros(self, x: Tensor) -> Nonzeros | None:
        """A constant x [n, i] by its nonzeros, where they are few; None for any other, and at the first few looks."""
        if x.requires_grad or x.device.type != "cpu" or x.numel() < MANY or x.dim() != 2 or x.is_inference():
            return None
        if saved_elsewhere():
            return None
        entry = self._entry(x)
        entry.looks += 1
        if entry.looks == LOOKS and x.dtype in (torch.float32, torch.float64):
            entry.nonzeros = _compressed(x)
        return entry.nonzeros

    def affords(self, nbytes: int) -> bool:
        """Whether so many more bytes fit the budget."""
        return self.nbytes() + nbytes <= settings.integer("STRETTO_HOIST_MB") << 20

    def asked_again(self, x: Tensor, key: Hashable, beside: Tensor | None) -> bool:
        """Whether this product of x, which did not change, was asked for before; remembers this time.

        beside: a tensor that the key names by its number, and that must be the same object.
        """
        if saved_elsewhere():
            return False
        entry = self._entry(x)
        if key in entry.products:
            return True
        if key in entry.asked:
            kept = entry.asked[key]
            if beside is None or (kept is not None and kept() is beside):
                return True
        if len(entry.asked) >= MOST_ASKED:
            entry.asked.clear()
        entry.asked[key] = None if beside is None else weakref.ref(beside)
        return False

    def keep(self, x: Tensor, key: Hashable, make: Callable[[], Tensor], held: object = None) -> Tensor:
        """The product kept under key, made now if it is not there and the budget allows to keep it.

        held: lives as long as the product, so that numbers of objects in the key stay theirs.
        """
        entry = self._entry(x)
        found = entry.products.get(key)
        if found is None:
            found = make()
            if self.affords(found.numel() * found.element_size()):
                entry.products[key], entry.held[key] = found, held
        return found

    def knows(self, x: Tensor, key: Hashable) -> bool:
        """Whether a product is kept."""
        return key in self._entry(x).products

    def nbytes(self) -> int:
        """Bytes of all products kept."""
        with self._lock:
            kept = [p for e in self._entries.values() for p in e.products.values()]
        return sum(p.numel() * p.element_size() for p in kept)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def _entry(self, x: Tensor) -> _Entry:
        mark = (x.data_ptr(), x.shape, x.stride(), x._version)
        entry = self._entries.get(id(x))
        if entry is None or entry.ref() is not x or entry.mark != mark:
            number = id(x)
            entry = _Entry(popped_from(self._entries, number, x), mark)
            with self._lock:
                self._entries[number] = entry
        return entry


@torch.no_grad()
def _compressed(x: Tensor) -> Nonzeros | None:
    """x by its nonzeros, or None if there are too many or x holds what a product with 0 would spread."""
    some = x[:: x.size(0) // 256 + 1]
    if int(some.count_nonzero()) * FEW > 2 * some.numel():
        return None
    counts, columns, values, left = [], [], [], x.numel() // FEW
    for part in x.split(1024):  # a few rows at a time: no array of x's size is made
        row, column = part.nonzero().unbind(1)
        left -= row.numel()
        if left < 0:
            return None
        counts.append(torch.bincount(row, minlength=part.size(0)))
        columns.append(column.int())
        values.append(part[row, column])
    kept = torch.cat(values)
    if not bool(kept.isfinite().all()):
        return None
    pointers = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(counts).cumsum(0)])
    return Graph.of_pointers(pointers, torch.cat(columns), x.size(1), known=True), kept


HOIST = Hoist()
