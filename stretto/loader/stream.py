"""Stream: the batches of a loader, submitted to the engine ahead of their reader and across the end of an epoch.

A loader has one stream, which an iterator borrows for a pass and gives back, so that what was prepared for the next
epoch is still there. A pass that ends early, or data that changed since, throws the prepared batches away.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stretto.loader.engine import Engine
from stretto.loader.native_sampler import NativeSampler
from stretto.loader.slot import Slot
from stretto.loader.transfer import Transfer


@dataclass
class Task:
    """One batch to be: its seeds by node type, and what of it does not come from sampling."""

    seeds: list[Tensor | None]
    times: list[Tensor | None]
    metadata: Any
    key: int  # with the seed and the epoch, what its randomness depends on
    num_pos: int = 0  # disjoint link batches: tree t belongs to example t % num_pos


_Submitted = tuple[int, Task]  # of which epoch


class Stream:
    """An engine and what was submitted to it. `tasks(seed, epoch)` gives the tasks of an epoch, lazily."""

    def __init__(
        self,
        native: NativeSampler,
        *,
        threads: int,
        memory: int,
        ahead: int,
        across: bool,
        tasks: Callable[[int, int], Iterator[Task]],
        transfer: Transfer | None = None,
        pin: tuple[Any, Any] = (None, None),
    ) -> None:
        self.engine = Engine(native, threads=threads, memory=memory, pin=pin[0], unpin=pin[1])
        self.ahead, self.across, self.transfer = ahead, across, transfer
        self.process = os.getpid()
        self._tasks = tasks
        self._submitted: deque[_Submitted] = deque()
        self._arriving: tuple[Slot, Any, _Submitted] | None = None
        self._feed: Iterator[Task] | None = None
        self._seed = self._feeding = self._epoch = 0

    def begin(self, seed: int, epoch: int) -> None:
        """Start a pass; batches already prepared for it are kept."""
        first = self._first()
        prepared = first is not None and first[0] == epoch and seed == self._seed and self.across
        if not prepared:
            self.cancel()
            self._seed, self._feeding = seed, epoch
            self._feed = self._tasks(seed, epoch)
        self._epoch = epoch
        self._fill()

    def next(self) -> tuple[Slot, Task] | None:
        """The next batch of this pass; None at its end."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            if not self._submitted or self._submitted[0][0] != self._epoch:
                return None
            head = self._submitted.popleft()
            slot, event = self.engine.next(), None
            if self.transfer is not None:
                slot, event = self.transfer.start(slot)
        elif arriving[2][0] != self._epoch:
            self._arriving = arriving
            return None
        else:
            slot, event, head = arriving
        self._fill()
        if self.transfer is not None:
            slot = self.transfer.arrive(slot, event)
            # The copy of the batch after this one overlaps with whatever is done with this one.
            if self._submitted and (following := self.engine.poll()) is not None:
                self._arriving = (*self.transfer.start(following), self._submitted.popleft())
        return slot, head[1]

    def cancel(self) -> None:
        if self.engine.alive:  # at the end of the interpreter an iterator may outlive the engine
            self.engine.cancel()
        self._submitted.clear()
        self._arriving = self._feed = None

    @property
    def at_end(self) -> bool:
        """Whether nothing of this pass is left; what remains belongs to the next."""
        left = self._first()
        return left is None or left[0] != self._epoch

    def _first(self) -> _Submitted | None:
        """What is read next, of this pass or of the one after it."""
        return self._arriving[2] if self._arriving else self._submitted[0] if self._submitted else None

    def _fill(self) -> None:
        """Keep `ahead` batches submitted, going on into the next epoch where its order is ours to choose."""
        while len(self._submitted) < self.ahead:
            if self._feed is None:
                if not self.across or self._feeding > self._epoch:
                    return
                self._feeding += 1
                self._feed = self._tasks(self._seed, self._feeding)
            task = next(self._feed, None)
            if task is None:
                self._feed = None
                continue
            self.engine.submit(self._seed, self._feeding, task.key, task.seeds, task.times)
            self._submitted.append((self._feeding, task))
