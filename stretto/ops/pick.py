"""pick: signature -> variant. From memory, then from disk, then by timing real calls.

A signature not yet known is explored inside the user's own steps: every variant gives a valid result, so trying one
costs only the difference between it and the best. A variant clearly behind is dropped; the rest are called until each
has TRIES timings or that difference has grown too large, the fastest wins, and the default keeps its place unless it is
beaten by a margin.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from stretto import settings
from stretto.machine import facts as machine
from stretto.machine import store
from stretto.machine.timing import timed
from stretto.ops.variants import Variant
from stretto.recording import unsettled

R = TypeVar("R")
logger = logging.getLogger("stretto")

WARM = 3  # calls that are not timed: they pay for page faults, and the third moves its input into large pages
TRIES = 5
DROP = (2.0, 1.5)  # a variant is dropped that is so many times behind the best after one timing, or after more
MARGIN = 0.95  # the default is replaced only by something at least this much faster: timings scatter by as much
BUDGET = 0.2  # seconds that trying once more what is not dropped may cost, beside what the best would have taken
MOST_CALLS = 2.0  # and at most as long as so many of the best calls: 2 % of a run of 100


@dataclass
class _Exploration:
    variants: list[Variant]
    default: Variant
    times: dict[str, list[float]] = field(default_factory=dict)
    warm: int = 0

    @property
    def best(self) -> float:
        """Seconds of the fastest call so far."""
        return min(min(t) for t in self.times.values())

    @property
    def too_dear(self) -> bool:
        """Whether trials have cost as much as they may; slow calls of a fast variant are noise of the machine."""
        tried = [self.times[v.name] for v in self.variants]
        excess = sum(len(t) * (min(t) - self.best) for t in tried)
        return excess > min(BUDGET, MOST_CALLS * self.best)


class Picker:
    """The choices of one process, per signature."""

    def __init__(self, kind: str = "kernels") -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._decided: dict[Hashable, Variant] = {}
        self._exploring: dict[Hashable, _Exploration] = {}
        self._from_disk: dict[str, Any] | None = None
        self._facts: dict[str, object] = {}
        self._threads = 0

    def run(
        self,
        key: Hashable,
        variants: tuple[Variant, ...],
        call: Callable[[Variant], R],
        *,
        wait: Callable[[], None] | None = None,
    ) -> R:
        """call(variant) with the variant for this signature; explores while it is not yet known.

        wait: waits for a device, so that what is timed is the work and not its launch.
        """
        if torch.are_deterministic_algorithms_enabled():  # the same kernel in every run, whatever was measured
            return call(variants[0])
        if torch.get_num_threads() != self._threads:  # choices hold for a number of threads
            self.forget()
            self._threads = torch.get_num_threads()
        decided = self._decided.get(key)
        if decided is not None:
            return call(decided)
        if len(variants) == 1 or not settings.tuning():
            return call(variants[0])
        if wait is not None:
            if torch.cuda.is_current_stream_capturing():  # nothing may wait, nor be tried, inside a captured graph
                return call(variants[0])
            return self._explore(key, variants, lambda variant: _waited(call, variant, wait), wait)
        return self._explore(key, variants, call, None)

    def offer(self, key: Hashable, variants: tuple[Variant, ...]) -> tuple[Variant, bool]:
        """The variant to run now by a caller that takes the time itself (over a forward and a backward pass, say), and
        whether `told` waits for that time."""
        result = self.known(key)
        if result is not None:
            return result, False
        if len(variants) == 1 or torch.are_deterministic_algorithms_enabled() or not settings.tuning():
            return variants[0], False
        result = self.recall(key, variants)
        if result is not None:
            return result, False
        unsettled()
        with self._lock:
            state = self._exploring.setdefault(key, _Exploration(list(variants), variants[0]))
            return min(state.variants, key=lambda v: len(state.times.get(v.name, ()))), True

    def told(self, key: Hashable, variant: Variant, seconds: float) -> None:
        """How long a variant took that `offer` wanted timed."""
        state = self._exploring.get(key)
        if state is None:  # settled meanwhile
            return
        if state.warm < WARM:
            state.warm += 1
            return
        self._record(key, state, variant, seconds)

    def known(self, key: Hashable) -> Variant | None:
        """The variant that `run` would call without trying anything; None: ask `run`."""
        if torch.get_num_threads() != self._threads or torch.are_deterministic_algorithms_enabled():
            return None
        return self._decided.get(key)

    def recall(self, key: Hashable, variants: tuple[Variant, ...]) -> Variant | None:
        """What was chosen for a signature, in this process or in an earlier one on this machine."""
        if torch.get_num_threads() != self._threads:
            self.forget()
            self._threads = torch.get_num_threads()
        with self._lock:
            kept = self._load().get(_text(key))
            result = next((v for v in variants if isinstance(kept, dict) and v.name == kept.get("variant")), None)
            if result is not None:
                self._decided[key] = result
            return result

    def decided(self, key: Hashable) -> Variant | None:
        """What was chosen for a signature, if it was."""
        return self._decided.get(key)

    def choices(self) -> list[tuple[Any, Variant]]:
        """Every signature decided so far, and its variant."""
        with self._lock:
            return list(self._decided.items())

    def decide(self, key: Hashable, variant: Variant, milliseconds: float) -> None:
        """Fix the choice for a signature, in memory and on disk."""
        with self._lock:
            self._decided[key] = variant
            self._exploring.pop(key, None)
        self._load()
        store.add(self._kind, self._facts, {_text(key): {"variant": variant.name, "ms": round(milliseconds, 4)}})

    def forget(self) -> None:
        """Drop what is held in memory; the disk is asked again."""
        with self._lock:
            self._decided.clear()
            self._exploring.clear()
            self._from_disk = None

    def _load(self) -> dict[str, Any]:
        if self._from_disk is None:
            self._facts = machine.describe()
            self._from_disk = store.read(self._kind, self._facts)
        return self._from_disk

    def _explore(
        self,
        key: Hashable,
        variants: tuple[Variant, ...],
        call: Callable[[Variant], R],
        wait: Callable[[], None] | None,
    ) -> R:
        unsettled()
        recalled = self.recall(key, variants)
        if recalled is not None:
            return call(recalled)
        with self._lock:
            state = self._exploring.setdefault(key, _Exploration(list(variants), variants[0]))
        if state.warm < WARM:
            state.warm += 1
            return call(state.default)
        variant = min(state.variants, key=lambda v: len(state.times.get(v.name, ())))
        try:
            if wait is not None and variant.name not in state.times:
                call(variant)  # a device may have to compile it first
            result, seconds = timed(lambda: call(variant))
        except RuntimeError as error:  # torch built without the library its kernel needs, say
            if variant is state.default:
                raise
            logger.info("stretto: %s is left out for %s: %s", variant.name, key, error)
            with self._lock:
                state.variants = [v for v in state.variants if v is not variant]
            return call(state.default)
        self._record(key, state, variant, seconds)
        return result

    def _record(self, key: Hashable, state: _Exploration, variant: Variant, seconds: float) -> None:
        with self._lock:
            own = state.times.setdefault(variant.name, [])
            own.append(seconds)
            if min(own) > DROP[len(own) > 1] * state.best and variant in state.variants:
                state.variants.remove(variant)
            done = all(len(state.times.get(v.name, ())) >= TRIES for v in state.variants)
            all_tried = all(v.name in state.times for v in state.variants)
            if not done and not (all_tried and state.too_dear):
                return
            fastest = min(state.variants, key=lambda v: min(state.times[v.name]))
            default_time, best_time = min(state.times[state.default.name]), min(state.times[fastest.name])
            chosen = fastest if best_time < MARGIN * default_time else state.default
        self.decide(key, chosen, min(state.times[chosen.name]) * 1e3)


def _waited(call: Callable[[Variant], R], variant: Variant, wait: Callable[[], None]) -> R:
    wait()
    result = call(variant)
    wait()
    return result


def _text(key: Hashable) -> str:
    return repr(key)


picker = Picker()
