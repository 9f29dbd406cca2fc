"""When each rank computed, exchanged and waited: events with a beginning and an end, on one clock per machine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

KEPT = 1 << 17  # events remembered
KINDS = ("graph op", "neural op", "exchange", "wait", "barrier", "sum")


@dataclass(frozen=True)
class Event:
    """One thing one rank did. Times are seconds of the machine's monotonic clock, the same for all its processes.

    Of the backward pass of a layer's rows one event is recorded, as "graph op": their neural op's is part of it.
    """

    rank: int
    step: int
    phase: str  # "forward" or "backward"
    layer: int  # from 1; 0: none
    kind: str
    rows: str  # "interior", "boundary", "all"; of an exchange or a wait: "remote"
    begin: float
    end: float

    def overlaps(self, other: Event) -> bool:
        """Whether some moment belongs to both."""
        return self.begin < other.end and other.begin < self.end

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Timeline:
    """The events of one rank, from two threads: the one that computes and the one that exchanges."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step, self.phase = rank, 0, "forward"
        self.recording = True
        self.events: deque[Event] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str], float] = {}

    def add(self, layer: int, kind: str, rows: str, begin: float, end: float, when: tuple[int, str]) -> None:
        """Note an event; when: the step and phase it belongs to."""
        if not self.recording:
            return
        with self._lock:
            self.events.append(Event(self.rank, when[0], when[1], layer, kind, rows, begin, end))

    @property
    def now(self) -> tuple[int, str]:
        """The step and phase under way."""
        return self.step, self.phase

    @contextmanager
    def span(self, layer: int, kind: str, rows: str) -> Iterator[None]:
        """An event around a block of the computing thread."""
        begin, when = time.monotonic(), self.now
        yield
        self.add(layer, kind, rows, begin, time.monotonic(), when)

    def backward_begins(self, layer: int, rows: str) -> None:
        """The gradient of these rows' result is there."""
        self._open[layer, rows] = time.monotonic()

    def backward_ends(self, layer: int, rows: str) -> None:
        """The gradient of their input is there too."""
        begin = self._open.pop((layer, rows), None)
        if begin is not None:
            self.add(layer, "graph op", rows, begin, time.monotonic(), (self.step, "backward"))

    def finish_backward(self) -> None:
        """End what has no input with a gradient: the first layer's backward pass."""
        for layer, rows in list(self._open):
            self.backward_ends(layer, rows)
