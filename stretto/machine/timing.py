"""One way to time things, for the tuner and for the benchmarks: warm-up, interleaving, quantiles.

Candidates take turns, in an order shuffled anew each round, so that a machine that drifts or throttles slows all of
them alike. Compare within one call of `measure`; samples of one round belong together and are compared as pairs.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from stretto.errors import expect
from stretto.memory import allocator

R = TypeVar("R")


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample a round, in the order taken."""

    samples: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """The q-quantile, 0 <= q <= 1, linear between samples."""
        ordered = sorted(self.samples)
        place = q * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    @property
    def median(self) -> float:
        """The middle sample."""
        return self.quantile(0.5)

    @property
    def best(self) -> float:
        """The fastest sample."""
        return min(self.samples)

    def to_dict(self) -> dict[str, float | int]:
        """What a result row records, in milliseconds."""
        marks = {"q20": 0.2, "median": 0.5, "q80": 0.8, "min": 0.0, "max": 1.0}
        row: dict[str, float | int] = {f"{name}_ms": self.quantile(q) * 1e3 for name, q in marks.items()}
        return {**row, "repeats": len(self.samples)}


def measure(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 9,
    warmup: int = 1,
    device: torch.device | str = "cpu",
    budget: float | None = None,
    sample_seconds: float = 0.0,
    lead_in: bool = False,
    after: Callable[[str], None] | None = None,
) -> dict[str, Timing]:
    """Time the candidates round robin.

    repeats: samples of each, after `warmup` untimed rounds. budget: seconds after which no call starts; a candidate
    that had no time for a sample is then judged by its warm-up call, and one that never ran is missing from the
    result.
    sample_seconds: repeat calls inside one sample until it lasts about this long, for calls of microseconds.
    lead_in: an untimed call right before each sample, so that nobody starts from caches the one before has filled.
    after(name) follows every sample (a progress bar).
    """
    expect(len(candidates) > 0, "measure: 'candidates' is empty")
    expect(repeats >= 1 and warmup >= 0, f"measure: wanted repeats >= 1 and warmup >= 0, got {repeats} and {warmup}")
    expect(
        warmup >= 1 or not sample_seconds, "measure: 'sample_seconds' needs warmup >= 1, to learn how long a call is"
    )
    sync = waiter(device)
    deadline = None if budget is None else time.perf_counter() + budget
    order = random.Random(0)
    rough: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    calls = dict.fromkeys(candidates, 1)
    for turn in range(warmup + repeats):
        if turn == warmup and sample_seconds:
            calls = {name: max(1, round(sample_seconds / max(rough[name], 1e-7))) for name in rough}
        names = list(candidates)
        order.shuffle(names)
        for name in names:
            if deadline is not None and time.perf_counter() >= deadline:
                return _timings(candidates, rough, samples)
            if lead_in and turn >= warmup:
                candidates[name]()
            seconds = _seconds(candidates[name], calls[name], sync)
            if turn < warmup:
                rough[name] = min(seconds, rough.get(name, seconds))
            else:
                samples.setdefault(name, []).append(seconds)
            if after is not None:
                after(name)
    return _timings(candidates, rough, samples)


def _timings(names: Iterable[str], rough: Mapping[str, float], samples: Mapping[str, list[float]]) -> dict[str, Timing]:
    """What was learnt of each candidate that ran: its samples, or else its warm-up call."""
    known = {name: samples.get(name) or [rough[name]] for name in names if name in rough or name in samples}
    return {name: Timing(tuple(seconds)) for name, seconds in known.items()}


def _seconds(call: Callable[[], object], calls: int, sync: Callable[[], None] | None) -> float:
    """Mean seconds of one of `calls` calls in a row."""
    if sync is not None:
        sync()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if sync is not None:
        sync()
    return (time.perf_counter() - start) / calls


BUSY_CYCLES = 200_000  # of a card, about 0.1 ms: longer than a host needs to enqueue a call
IN_A_ROW = 1e-3  # seconds of calls in a row that make a sample on a card: one alone is mostly its launch


def waiter(device: torch.device | str) -> Callable[[], None] | None:
    """What waits until the device is idle; None where calls return when they are done."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else None


def in_a_row(device: torch.device | str) -> float:
    """`sample_seconds` for short calls on this device."""
    return IN_A_ROW if torch.device(device).type == "cuda" else 0.0


def on_card(call: Callable[[], object]) -> float:
    """Seconds that a card itself works on a call: it is kept busy while the host enqueues call and events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def timed(call: Callable[[], R]) -> tuple[R, float]:
    """What one call gives, and its seconds: for the tuner, which times calls the user makes anyway."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def ratio(slow: Timing, fast: Timing, *, level: float = 0.95, draws: int = 1000) -> tuple[float, float, float]:
    """How many times longer `slow` takes: ratio of medians, and its bootstrap interval over rounds.

    Both must come from one `measure`. Rounds are drawn as pairs, so that a drift common to both cancels.
    """
    point = slow.median / fast.median
    rounds = list(zip(slow.samples, fast.samples, strict=False))
    draw = random.Random(0)
    ratios = []
    for _ in range(draws):
        chosen = draw.choices(rounds, k=len(rounds))
        ratios.append(statistics.median(s for s, _ in chosen) / statistics.median(f for _, f in chosen))
    spread = Timing(tuple(ratios))
    return point, spread.quantile((1 - level) / 2), spread.quantile((1 + level) / 2)


# ---- clocks of one call ----

Clock = Callable[[Callable[[], Any]], float]
MOST_SAMPLES = 200


def by_wall(call: Callable[[], Any]) -> float:
    """Seconds until a call returns."""
    return timed(call)[1]


def until_idle(call: Callable[[], Any]) -> float:
    """Seconds until a card that had nothing to do has done a call: what a lone op takes there."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def work_clock(device: torch.device | str) -> Clock:
    """The clock for an op's own work on this device. A card has its own: the wall would count the host's part of a
    call, which in a step is hidden behind the calls before."""
    return on_card if torch.device(device).type == "cuda" else by_wall


def call_clock(device: torch.device | str) -> Clock:
    """The clock for an op from its call to its end, as a traced step has it."""
    return until_idle if torch.device(device).type == "cuda" else by_wall


def repeated(
    call: Callable[[], Any],
    *,
    least: int,
    seconds: float = 0.0,
    before: Callable[[], Any] | None = None,
    clock: Clock = by_wall,
) -> Timing:
    """Samples of one call alone, after one that does not count: at least so many, and more until the seconds are over.
    before: what runs between two calls, off the clock."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < least or (time.perf_counter() < end and len(samples) < MOST_SAMPLES):
        if before is not None:
            before()
        samples.append(clock(call))
    return Timing(tuple(samples))


# ---- what is done before something is timed, and set while it is ----

SETTLE_CALLS, SETTLE_SECONDS = 45, 4.0


def settle(call: Callable[[], object], *, minimum: int = 0) -> None:
    """Let the tuner finish: it tries its variants in the first calls. minimum: calls made in any case."""
    end = time.perf_counter() + SETTLE_SECONDS
    for number in range(SETTLE_CALLS):
        if number < minimum or time.perf_counter() < end:
            call()


THREAD_LIMIT = 1024  # threads: where the system refuses one of a hundred thousand, the whole process ends


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch.set_num_threads(count) for the length of the block."""
    expect(count >= 1, f"bench: '--threads' is {count}, wanted 1 or more")
    expect(count <= THREAD_LIMIT, f"bench: '--threads' is {count}, wanted at most {THREAD_LIMIT}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def memory_as(keeps: bool) -> Iterator[None]:
    """The allocator as a process has it that keeps freed memory, or does not; as it was at the end."""
    before = allocator.is_kept()
    allocator.switch(keeps)
    try:
        yield
    finally:
        allocator.switch(before)


def as_alone(call: Callable[[], object], *, ours: bool) -> Callable[[], object]:
    """The call with the allocator as a process has it: keeping freed memory for ours, as it always was for stock."""

    def go() -> object:
        allocator.switch(ours)
        return call()

    return go
