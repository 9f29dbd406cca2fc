"""Exchanges that run beside the computation: a thread per rank sends and receives in the order they were posted.

All ranks post the same exchanges in the same order, so that none waits for one that another has yet to reach.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from stretto.dist.timeline import Timeline
from stretto.errors import fail
from stretto.machine.ranks import Rows, swap


@dataclass(frozen=True)
class Link:
    """A slower connection than this machine's, emulated: every exchange takes at least as long as it would there."""

    latency: float = 0.0  # seconds an exchange
    bandwidth: float = float("inf")  # bytes a second, into one rank

    def seconds(self, size: int) -> float:
        """Of an exchange that brings `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass
class Flight:
    """An exchange under way. Its tensors are its own until it has landed."""

    layer: int
    when: tuple[int, str]  # step and phase in which it was posted
    sends: Rows
    receives: Rows
    rows: Tensor  # what the receives fill
    posted: float = field(default_factory=time.monotonic)
    landed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether all rows have arrived and all were sent."""
        return self.landed.is_set() and self.error is None


class Exchange:
    """The exchanging thread of one rank. timeout: seconds that anything may take."""

    def __init__(self, group: dist.ProcessGroup, timeline: Timeline, *, link: Link | None, timeout: float) -> None:
        self.group, self.timeline, self.timeout = group, timeline, timeout
        self.link = link or Link()
        self._posted: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stretto exchange", daemon=True)
        self._thread.start()

    def post(self, flight: Flight) -> Flight:
        """Start an exchange as soon as those before it have landed."""
        self._posted.put(flight)
        return flight

    def wait(self, flight: Flight) -> Tensor:
        """The rows of a flight; raises what went wrong with it."""
        with self.timeline.span(flight.layer, "wait", "remote"):
            flight.landed.wait(self.timeout)
        step, phase = flight.when
        what = f"dist: rank {dist.get_rank()}: the exchange of layer {flight.layer}, step {step}, {phase},"
        if not flight.landed.is_set():
            fail(f"{what} did not end within {self.timeout:g} s")
        if flight.error is not None:
            fail(f"{what} failed: {flight.error}")
        return flight.rows

    def close(self) -> None:
        """Let all exchanges land and end the thread."""
        self._posted.put(None)
        self._thread.join(self.timeout)
        if self._error is not None or self._thread.is_alive():
            fail(f"dist: rank {dist.get_rank()}: the last exchanges did not end well: {self._error or 'still waiting'}")

    def _run(self) -> None:
        while (flight := self._posted.get()) is not None:
            try:
                if self._error is not None:  # the order is lost: what follows would meet the wrong messages
                    raise RuntimeError(f"an exchange before it failed: {self._error}")
                self._carry(flight)
            except (RuntimeError, ValueError) as error:
                flight.error, self._error = error, self._error or error
            flight.landed.set()

    def _carry(self, flight: Flight) -> None:
        if not flight.sends and not flight.receives:
            return
        begin = time.monotonic()
        swap(flight.sends, flight.receives, group=self.group, tag=2 * flight.layer + (flight.when[1] == "backward"))
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in flight.receives)
        time.sleep(max(0.0, begin + self.link.seconds(size) - time.monotonic()))
        self.timeline.add(flight.layer, "exchange", "remote", flight.posted, time.monotonic(), flight.when)
