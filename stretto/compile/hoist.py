"""Products of constants kept across steps: A X when X is the same unchanged tensor step after step.

A product is kept once its tensor and its matrices have been met together without a change (what comes out of dropout,
of features or of edges, is new every step and never qualifies; what is trained does not either, kernels/looks.py).
It is kept for as long as the tensor and the matrices live, which it does not keep alive, while the budget
STRETTO_HOIST_MB allows.

Under hooks on what is saved for backward (torch.utils.checkpoint) nothing is looked up: there a tensor that was met in
forward is met again in backward, and must be served as before.

A constant X that is nearly all zeros (a bag of words) is kept by its nonzeros too: X W' is then a sparse product.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto import settings
from stretto.graph import Graph
from stretto.kernels import on_host
from stretto.kernels.looks import Look, settled
from stretto.lifetime import popped_from
from stretto.ops.autograd_state import saved_elsewhere

Nonzeros = tuple[Graph, Tensor]  # [n, i] with an entry for each nonzero, and their values
LOOKS = 3  # how often a tensor is met before its zeros are counted
FEW = 32  # one value in so many is not zero
MANY = 1 << 18  # values below which a dense product is as fast
MOST_ASKED = 256  # products of a tensor that are remembered until they are asked for again


class Beside:
    """What a product was made of besides x: objects that its key names by their numbers, held weakly, and what the
    weight among them, which is the user's, looked like."""

    def __init__(self, objects: Sequence[object], weight: Tensor | None = None) -> None:
        self.objects, self.look = objects, None if weight is None else settled(weight)
        self.whole = weight is None or self.look is not None  # whether a change would be seen


@dataclass(eq=False)
class _Asked:
    """A key that was asked for, and what it stood for then."""

    refs: tuple[weakref.ref[object], ...]
    look: Look | None
    kept: dict[int, Tensor]  # the product, if it is kept; emptied when one of the objects is gone

    @property
    def product(self) -> Tensor | None:
        return self.kept.get(0)

    def stands(self, beside: Beside) -> bool:
        same = [ref() is one for ref, one in zip(self.refs, beside.objects, strict=True)]
        return all(same) and self.look == beside.look


@dataclass(eq=False)
class _Entry:
    ref: weakref.ref[Tensor]
    look: Look
    asked: dict[Hashable, _Asked] = field(default_factory=dict)
    looks: int = 0
    nonzeros: Nonzeros | None = None
    nonzeros_bytes: int = 0

    def find(self, key: Hashable, beside: Beside) -> _Asked | None:
        result = self.asked.get(key)
        return result if result is not None and beside.whole and result.stands(beside) else None

    def note(self, key: Hashable, beside: Beside) -> _Asked:
        """Remember that this was asked for, until one of the objects beside is gone."""
        if len(self.asked) >= MOST_ASKED:
            self.asked = {k: asked for k, asked in self.asked.items() if asked.product is not None}
        kept: dict[int, Tensor] = {}
        made = _Asked(tuple([popped_from(kept, 0, one) for one in beside.objects]), beside.look, kept)
        self.asked[key] = made
        return made


class Hoist:
    """What is kept, per constant tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    def nonzeros(self, x: Tensor) -> Nonzeros | None:
        """A constant x [n, i] by its nonzeros, where they are few; None for any other, and at the first few looks."""
        if not on_host(x) or x.numel() < MANY or x.dim() != 2 or saved_elsewhere():
            return None
        entry = self._entry(x)
        if entry is None:
            return None
        entry.looks += 1
        if entry.looks == LOOKS and x.dtype in (torch.float32, torch.float64):
            result = _compressed(x)
            size = 0 if result is None else result[0].nbytes + result[1].nbytes
            if self.affords(size):
                entry.nonzeros, entry.nonzeros_bytes = result, size
        return entry.nonzeros

    def affords(self, nbytes: int) -> bool:
        """Whether so many more bytes fit the budget."""
        return self.nbytes() + nbytes <= settings.integer("STRETTO_HOIST_MB") << 20

    def asked_again(self, x: Tensor, key: Hashable, beside: Beside) -> bool:
        """Whether this was asked of x before, with x and what stands beside it as they are; remembers this time."""
        if saved_elsewhere():
            return False
        entry = self._entry(x)
        if entry is None or not beside.whole:
            return False
        if entry.find(key, beside) is not None:
            return True
        entry.note(key, beside)
        return False

    def keep(self, x: Tensor, key: Hashable, make: Callable[[], Tensor], beside: Beside) -> Tensor:
        """The product kept under key, made now if it is not there and the budget allows to keep it."""
        entry = self._entry(x)
        asked = None if entry is None else entry.find(key, beside)
        if asked is not None and asked.product is not None:
            return asked.product
        made = make()
        if entry is not None and beside.whole and self.affords(made.nbytes):
            (asked or entry.note(key, beside)).kept[0] = made
        return made

    def knows(self, x: Tensor, key: Hashable, beside: Beside) -> bool:
        """Whether a product is kept."""
        entry = self._entry(x)
        asked = None if entry is None else entry.find(key, beside)
        return asked is not None and asked.product is not None

    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            entries = list(self._entries.values())
        products = [asked.product for entry in entries for asked in list(entry.asked.values())]
        return sum(entry.nonzeros_bytes for entry in entries) + sum(p.nbytes for p in products if p is not None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def _entry(self, x: Tensor) -> _Entry | None:
        """What is known of x as it is now; None where nothing made of it may be kept."""
        look = settled(x)
        entry = self._entries.get(id(x))
        if look is None:
            if entry is not None:
                self._entries.pop(id(x), None)
            return None
        if entry is None or entry.ref() is not x or entry.look != look:
            number = id(x)
            entry = _Entry(popped_from(self._entries, number, x), look)
            with self._lock:
                self._entries[number] = entry
        return entry


@torch.no_grad()
def _compressed(x: Tensor) -> Nonzeros | None:
    """The nonzeros of x, or None if there are too many or x holds what a product with 0 would spread."""
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
