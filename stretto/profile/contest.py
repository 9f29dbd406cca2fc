"""One point of the sweep: candidates agree with fp64 first, then take turns on the clock. One row each."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.machine import facts as machine
from stretto.machine.timing import Timing, in_a_row, measure, ratio, timed
from stretto.observe.agreement import LIMITS, relative_error
from stretto.observe.peak_memory import card_peak_bytes
from stretto.observe.trace import Recorder, Trace
from stretto.profile.axes import Point

REPEATS = 20
LEAST = 5  # samples without which a row tells nothing
FLUSH = 1 << 25  # values read between two samples with a cold cache
HOPELESS = 20.0  # times as long as the op that runs: such a candidate would eat the time of the others
SHORT = 5e-3  # seconds that anybody may take
DOUBLES = 6  # fp64 copies of the largest tensor that a check may hold, with the results of the candidates

Candidates = dict[str, Callable[..., Tensor]]


@dataclass(frozen=True)
class Pace:
    """How long a contest may take: samples of each candidate, seconds for all; tick() follows every sample.

    Where a few samples take longer than `seconds`, it may go on for `most` seconds to have them.
    """

    repeats: int = REPEATS
    seconds: float | None = None
    most: float = 0.0
    tick: Callable[[], None] | None = None


@dataclass(frozen=True)
class Trial:
    """What is compared: ways to compute the reference from the source, which of them the model runs, who is missing."""

    family: str
    table: Candidates
    reference: Callable[[Tensor], Tensor]
    source: Tensor
    native: str
    skipped: dict[str, str] = field(default_factory=dict)  # candidate -> why it is not in the table


def interval(timing: Timing, *, level: float = 0.95, draws: int = 400) -> tuple[float, float]:
    """Bootstrap interval of the median, in seconds."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.tensor(timing.samples, dtype=torch.float64)
    picks = torch.randint(len(samples), (draws, len(samples)), generator=generator)
    medians = samples[picks].median(1).values.sort().values
    edge = int(draws * (1 - level) / 2)
    return float(medians[edge]), float(medians[-1 - edge])


def too_large(values: int) -> str:
    """Why a point with a tensor of so many values is left out; "" if it fits."""
    need, free = DOUBLES * 8 * values, machine.memory_bytes("MemAvailable")
    return f"needs {need / 2**30:.1f} GiB to be checked" if need > free // 2 > 0 else ""


def empty_row(family: str, candidate: str, point: Point, reason: str = "") -> dict[str, Any]:
    """A row without a time."""
    return {"family": family, "candidate": candidate, **asdict(point), "error": None, "reason": reason}


def contest(trial: Trial, point: Point, pace: Pace) -> list[dict[str, Any]]:
    """Check the candidates against the reference in fp64, then time those that agree in turns. One row each.

    speedup: over the way that the model runs. flops, bytes, random_bytes: of that way, as a trace counts them.
    """
    started = time.perf_counter()
    table, native = trial.table, trial.native
    if point.compiled:
        table = {native: table[native], "torch.compile": torch.compile(table[native])}
    right, rows, once = _agree(trial, table, point)
    missing = {} if point.compiled else trial.skipped
    rows += [{**empty_row(trial.family, name, point, why), "missing": True} for name, why in missing.items()]
    if not right:
        return rows
    timings = _timed(right, point, pace, _left(pace, time.perf_counter() - started, once))
    counts = _counted(_traced(right[native])) if native in right else {}
    first = _enough(timings.get(native), pace)
    for row in rows:
        name = row["candidate"]
        if name in right:
            row |= _measured(_enough(timings.get(name), pace), first, native, counts)
        if "median_ms" in row:
            row["peak_bytes"] = _peak(right[name], point.device)
    return rows


def _left(pace: Pace, spent: float, once: float) -> float | None:
    """Seconds for the samples: enough for the fewest, where that is allowed. once: what a call of each takes."""
    return None if pace.seconds is None else max(pace.seconds - spent, min((LEAST + 2) * once, pace.most - spent))


def _timed(calls: dict[str, Callable[[], object]], point: Point, pace: Pace, budget: float | None) -> dict[str, Timing]:
    """The candidates in turns, each from cold caches where the point asks for it."""
    cold = point.cache == "cold"

    def after(name: str) -> None:
        if cold:
            _flush(point.device)
        if pace.tick is not None:
            pace.tick()

    row_of_calls = 0.0 if cold else in_a_row(point.device)
    return measure(
        calls,
        repeats=pace.repeats,
        warmup=1,
        device=point.device,
        budget=budget,
        sample_seconds=row_of_calls,
        after=after,
    )


def _measured(timing: Timing | None, first: Timing | None, native: str, counts: dict[str, float]) -> dict[str, Any]:
    """What a row says of a candidate's time. first: that of the way that runs; counts: its flops and bytes."""
    if timing is None:
        return {"reason": "the budget left no time for it"}
    low, high = interval(timing)
    row: dict[str, Any] = {**timing.to_dict(), "ci_ms": (low * 1e3, high * 1e3), "native": native, **counts}
    if counts:
        row["gb_per_s"] = counts["bytes"] / timing.median / 1e9
        row["gflop_per_s"] = counts["flops"] / timing.median / 1e9
    if first is not None:
        row["speedup"] = ratio(first, timing)
    return row


def _enough(timing: Timing | None, pace: Pace) -> Timing | None:
    return timing if timing is not None and len(timing.samples) >= min(LEAST, pace.repeats) else None


@functools.lru_cache(maxsize=2)
def _buffer(device: str) -> Tensor:
    return torch.ones(FLUSH, device=device)


def _flush(device: str) -> None:
    """Read more than any cache holds, so that the next call finds its inputs in memory."""
    _buffer(device).sum()


def forget_buffer() -> None:
    """Give the memory of cold caches back."""
    _buffer.cache_clear()


def _agree(
    trial: Trial, table: Candidates, point: Point
) -> tuple[dict[str, Callable[[], object]], list[dict[str, Any]], float]:
    """Those that are right, ready to be timed; a row for each; and the seconds that one call of all of them took."""
    both, source = point.direction == "both", trial.source
    wide = source.double().requires_grad_(both)
    expected = trial.reference(wide)
    wanted = [expected.detach()]
    if both:
        wanted.append(torch.autograd.grad(expected, wide, torch.ones_like(expected))[0])
    right: dict[str, Callable[[], object]] = {}
    rows: list[dict[str, Any]] = []
    once, usual = 0.0, math.inf
    first = sorted(table.items(), key=lambda item: item[0] != trial.native)  # what the others are held to
    for name, function in first:
        call = _both(function, source) if both else _once(function, source)
        row = empty_row(trial.family, name, point)
        rows.append(row)
        try:
            got, seconds = timed(call)
        except (RuntimeError, NotImplementedError, IndexError) as error:
            row["reason"] = f"raises: {str(error).splitlines()[0]}"
            continue
        row["error"] = max(relative_error(g, w) for g, w in zip(got, wanted, strict=True))
        if not row["error"] <= LIMITS[point.dtype]:
            row["reason"] = f"wrong: relative error {row['error']:.1e}, allowed {LIMITS[point.dtype]:.0e}"
            continue
        if name == trial.native:
            usual = max(SHORT, seconds)
        if seconds > HOPELESS * usual:
            seconds = timed(call)[1]  # the first call may have prepared something
        if seconds > HOPELESS * usual:
            row["reason"] = f"{seconds / usual:.0f} times as long as {trial.native} in one call: not timed"
            continue
        right[name] = call
        once += seconds
    return right, rows, once


def _once(function: Callable[..., Tensor], source: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (function(source),)


def _both(function: Callable[..., Tensor], source: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaf = source.detach().requires_grad_()

    def call() -> tuple[Tensor, ...]:
        out = function(leaf)
        return (out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0])

    return call


def _traced(call: Callable[[], object]) -> Trace:
    recorder = Recorder()
    with recorder.recording():
        call()
    return recorder.trace


def _peak(call: Callable[[], object], device: str) -> int:
    """Bytes that one call allocates at its highest, its result included."""
    return card_peak_bytes(call) if device == "cuda" else _traced(call).peak_bytes


def _counted(trace: Trace) -> dict[str, float]:
    """Flops and compulsory bytes of a call, those at places that an index decides apart."""
    result = {"flops": trace.flops, "bytes": trace.bytes, "random_bytes": sum(op.cost.random for op in trace)}
    return {name: float(value) for name, value in result.items()}
