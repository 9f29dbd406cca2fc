"""Hot ops again, outside the model: with the very indices they had there, and with the same indices shuffled.

The time of an op that follows an index depends on the index: a replay with random ones would measure another op. It
also depends on what the op before has left in the caches and on the memory it is given, so the whole step is replayed,
and each op is timed in it (`chain.py`).
"""

from __future__ import annotations

import hashlib
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto.analyze.places import Place
from stretto.analyze.trace import Recorder, Trace
from stretto.analyze.workload import Workload
from stretto.errors import expect, fail
from stretto.kernels.attention import TENSORS, Attention
from stretto.profile.chain import Tape, mapped
from stretto.profile.chain_run import run
from stretto.tune.timing import Timing

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

logger = logging.getLogger("stretto")

REPEATS = 20
SECONDS = 5.0  # for more turns than these: where a result lands in memory is luck, and what an op finds in a cache too
MOST = 400  # turns
TAKEN, LARGEST = 12, 1 << 22  # blocks that are taken before a run, and bytes of the largest
STEPS = 7  # to learn the pauses between ops from
ATTEMPTS = 6  # at a chain that has the trace's ops: the tuner may still be trying plans
MODEL, AGAIN, REAL, SHUFFLED = "in the model", "in the model again", "real indices", "shuffled indices"
NEAR = 0.15  # ratios this far from 1 are met
SAME_PAGES, SAME_SHARE = 8, 0.05  # two amounts of new memory that count as the same


def capture(profile: Profile, groups: list[Group]) -> dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The inputs of each group's slowest call, taken from one more step. -> op index -> (function, args, kwargs)"""
    trace = profile.trace
    wanted = frozenset(max(group.ops, key=lambda i: trace.ops[i].seconds) for group in groups)
    recorder = Recorder(profile.workload.model, full=False, capture=wanted)
    with recorder.recording():
        profile.workload.run(recorder)
    profile.workload.model.zero_grad(set_to_none=True)
    return recorder.captured


def is_index(value: Any) -> bool:
    """Whether a value is a tensor of places."""
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() > 0


def shuffled(value: Any, generator: torch.Generator) -> Any:
    """The value with every index tensor inside in a random order; an expanded one stays expanded."""
    if is_index(value):
        return value[torch.randperm(value.size(0), generator=generator).to(value.device)] if value.stride(0) else value
    if isinstance(value, (list, tuple)):
        return type(value)(shuffled(v, generator) for v in value)
    return value


def fingerprint(index: Tensor, size: int | None = None) -> dict[str, Any]:
    """What decides the speed of an op that follows this index: sizes, counts, order, reuse. index [E]."""
    flat = index.detach().cpu().reshape(index.size(0), -1)[:, 0].numpy() if index.numel() else np.zeros(0, np.int64)
    first = min(0, int(flat.min())) if flat.size else 0
    flat = flat - first  # places counted from the end are as far from one another, whatever the end is
    rows = size if size is not None else (int(flat.max()) + 1 if flat.size else 0)
    counts = np.bincount(flat, minlength=rows) if flat.size else np.zeros(rows, np.int64)
    order = np.argsort(flat, kind="stable")
    gaps = np.diff(order)[np.diff(flat[order]) == 0] if flat.size else np.zeros(0)
    steps = np.diff(flat)
    return {
        "entries": int(flat.size),
        "rows": int(rows),
        "degrees": np.bincount(np.minimum(counts, 64)).tolist(),
        "sorted": float((steps >= 0).mean()) if steps.size else 1.0,
        "reuse": float(np.median(gaps)) if gaps.size else None,
        "bandwidth": float(np.abs(steps).mean()) if steps.size else 0.0,
        "hash": hashlib.sha256(flat.tobytes()).hexdigest()[:16],
    }


def regenerate(mark: dict[str, Any], *, seed: int = 0) -> Tensor:
    """An index like the one a fingerprint was taken of: the same counts of rows, as sorted as it was."""
    rng = np.random.default_rng(seed)
    degrees = np.repeat(np.arange(len(mark["degrees"])), mark["degrees"])
    degrees = degrees[rng.permutation(degrees.size)]
    rest = mark["entries"] - int(degrees.sum())
    if rest > 0:  # counts above 64 were merged: the largest rows take what is missing
        top = np.argsort(degrees)[-max(1, mark["degrees"][-1]) :]
        degrees[top] += rest // top.size
        degrees[top[0]] += rest % top.size
    index = np.repeat(np.arange(degrees.size), degrees)[: mark["entries"]]
    if mark["sorted"] < 1.0:
        loose = rng.random(index.size) < min(1.0, 2 * (1 - mark["sorted"]))
        index[loose] = rng.permutation(index[loose])
    return torch.from_numpy(index)


def operands(value: Any) -> list[Tensor]:
    """Every dense tensor inside a value, in the order in which a trace lists them."""
    if isinstance(value, Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, Attention):
        return [t for t in (getattr(value, name) for name in TENSORS) if t is not None]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for v in value for t in operands(v)] if isinstance(value, (list, tuple)) else []


Sample = tuple[float, int]  # seconds, and pages of memory that the system handed out meanwhile


def matched(inside: Sequence[Sample], alone: Sequence[Sample]) -> list[tuple[float, float]]:
    """Seconds in the model and outside it, by turn: of the turns in which the op got as much new memory in both.

    Which op of a step meets new memory is the allocator's luck: the same step may pay for 28,000 pages, then for none.
    Every turn, where they hardly ever met the same.
    """
    turns = list(zip(inside, alone, strict=True))
    same = [(a, b) for a, b in turns if abs(a[1] - b[1]) <= max(SAME_PAGES, SAME_SHARE * a[1])]
    return [(a[0], b[0]) for a, b in (same if 4 * len(same) >= len(turns) else turns)]


def shuffles(tape: Tape, trace: Trace) -> tuple[dict[int, tuple[Any, Any]], dict[int, Tensor]]:
    """Of every gather and scatter by an index: its arguments with the index in a random order, and the index itself.

    Taken from one run of the chain: an index that the step makes exists only while it runs.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[int, tuple[Any, Any]] = {}
    own: dict[int, Tensor] = {}
    wanted = {op.index for op in trace if op.cost.family in ("gather", "scatter")}

    def seen(place: int, args: Any, kwargs: Any) -> None:
        inputs = operands((args, kwargs))
        index = next((t for t in inputs if is_index(t)), None)
        if place in wanted and index is not None:
            own[place] = (index if index.dim() == 1 or not index.numel() else index.select(-1, 0)).clone()
            others = iter([shuffled(t, generator) if is_index(t) else None for t in inputs])
            swap = lambda kept: other if (other := next(others)) is not None else kept  # noqa: E731
            found[place] = (mapped(tape.calls[place].args, swap), mapped(tape.calls[place].kwargs, swap))

    run(tape, seen=seen)
    return found, own


def _that_run(
    tape: Tape, other: dict[int, Any], indices: dict[int, Tensor]
) -> tuple[dict[int, Any], dict[int, Tensor]]:
    """The same, or nothing where the step does not run with other indices: the sizes of what it makes follow them."""
    try:
        run(tape, instead=other)
    except (IndexError, RuntimeError) as error:
        logger.warning("stretto: the step does not run with shuffled indices (%s): real ones only", error)
        return {}, {}
    return other, indices


def recorded(profile: Profile) -> Tape:
    """The profile's step as a chain of the very ops that its trace has."""
    names = [op.name for op in profile.trace]
    for _ in range(ATTEMPTS):
        tape = Tape(profile.workload)
        profile.workload.model.zero_grad(set_to_none=True)
        if [call.name for call in tape.calls] == names:
            return tape
    fail(f"replay: the step runs other ops than its trace ({len(tape.calls)}, then {len(names)})")


def _elsewhere(run: Callable[[], Recorder], draw: random.Random) -> Recorder:
    """One run with some memory taken before it, so that its results come to lie elsewhere than in the run before.

    Where they lie decides how much of them is in a cache; the allocator would give a side the same places, lucky or
    not, for as long as the process lives.
    """
    taken = [torch.empty(draw.randrange(1 << 12, LARGEST) // 4) for _ in range(TAKEN)]
    kept = taken[::2]  # the others leave holes
    del taken
    done = run()
    del kept
    return done


def replay(
    profile: Profile, *, share: float = 0.9, repeats: int = REPEATS, seconds: float = SECONDS
) -> list[dict[str, Any]]:
    """One row per hot group: in the model, outside it with its own indices, and with shuffled ones, in milliseconds.

    Steps of the model and runs of its chain of ops take turns in a random order, so that each finds what any of them
    has left in caches and free memory, and samples of one turn are compared with one another: a machine that drifts
    slows both. The model has two turns each time, compared in the same way ("itself"): where these differ, nothing can
    be said of a replay. repeats: turns at least; more within `seconds`.
    """
    groups, trace, workload = profile.hot(share), profile.trace, profile.workload
    names = [op.name for op in trace]
    turns: dict[str, list[list[Sample]]] = {}
    order = random.Random(0)
    with torch.random.fork_rng(devices=[]):
        tape = recorded(profile)
        other, indices = _that_run(tape, *shuffles(tape, trace))
        pauses = _pauses(workload, names)
        places: list[list[Place]] = []  # of the model's last step

        def step() -> Recorder:
            found = _step(workload)
            places[:] = found.places if _names(found) == names else []
            return found

        step()
        sides: dict[str, Callable[[], Recorder]] = {MODEL: step, AGAIN: step}
        sides[REAL] = lambda: run(tape, pauses=pauses, places=places)
        sides[SHUFFLED] = lambda: run(tape, instead=other, pauses=pauses, places=places)
        turn, end = 0, time.perf_counter() + seconds
        while turn <= repeats or (time.perf_counter() < end and turn <= MOST):
            done = {side: _elsewhere(sides[side], order) for side in order.sample(list(sides), len(sides))}
            turn += 1
            if turn > 1 and all(_names(one) == names for one in done.values()):
                for side, one in done.items():
                    taken = [taken for _, taken, _ in one.times]
                    turns.setdefault(side, []).append(list(zip(taken, one.pages, strict=True)))
    expect(bool(turns), "replay: no step ran the ops of the trace")
    by_op = {side: list(zip(*found, strict=True)) for side, found in turns.items()}
    return [_row(group, indices, by_op) for group in groups]


def _names(recorder: Recorder) -> list[str]:
    return [name for name, _, _ in recorder.times]


def _step(workload: Workload) -> Recorder:
    """One step of the model. Its gradients go: the chain starts from the memory that a step starts from."""
    recorder = Recorder(workload.model, full=False, memory=True)
    with recorder.recording():
        workload.run(recorder)
    workload.model.zero_grad(set_to_none=True)
    return recorder


def _pauses(workload: Workload, names: list[str]) -> list[float]:
    """Seconds between the end of an op and the beginning of the next, in the model: the medians of a few steps."""
    steps = [_step(workload) for _ in range(STEPS)]
    same = [step.times for step in steps if _names(step) == names]
    return [statistics.median(pause for _, _, pause in op) for op in zip(*same, strict=True)]


def _row(group: Group, indices: dict[int, Tensor], by_op: dict[str, list[tuple[Sample, ...]]]) -> dict[str, Any]:
    pairs = [matched(by_op[MODEL][i], by_op[REAL][i]) for i in group.ops]
    inside = [statistics.median(a for a, _ in turns) for turns in pairs]
    again = [matched(by_op[MODEL][i], by_op[AGAIN][i]) for i in group.ops]
    row = {
        "op": group.name, "phase": group.phase, "shapes": group.shapes, "calls": len(group.ops),
        "in model ms": sum(inside) * 1e3, REAL: _numbers(pairs), "ratio": _ratio(pairs), "interval": _interval(pairs),
        "itself": _ratio(again), "itself interval": _interval(again), "index": None,
    }  # fmt: skip
    if group.ops[0] in indices:
        row[SHUFFLED] = _numbers([matched(by_op[MODEL][i], by_op[SHUFFLED][i]) for i in group.ops])
        row["index"] = fingerprint(indices[group.ops[0]])
    return row


def verdict(row: dict[str, Any]) -> str:
    """Of a row: "met", "missed", or "unsteady" where as many turns cannot even tell that the model is near itself."""
    if abs(row["ratio"] - 1) <= NEAR:
        return "met"
    return "missed" if all(abs(bound - 1) <= NEAR for bound in row["itself interval"]) else "unsteady"


Turns = list[tuple[float, float]]  # (seconds in the model, seconds outside it)


def _numbers(pairs: list[Turns]) -> dict[str, float]:
    """Calls of one group together; repeats of the one with the fewest."""
    quantiles = {"q20_ms": 0.2, "median_ms": 0.5, "q80_ms": 0.8}
    alone = [Timing(tuple(b for _, b in turns)) for turns in pairs]
    found = {name: 1e3 * sum(timing.quantile(q) for timing in alone) for name, q in quantiles.items()}
    return {**found, "ratio": _ratio(pairs), "repeats": min(len(turns) for turns in pairs)}


def _ratio(pairs: list[Turns]) -> float:
    """Outside over inside: the median over turns, calls weighed by their time."""
    inside = [statistics.median(a for a, _ in turns) for turns in pairs]
    ratios = [statistics.median(b / a for a, b in turns) for turns in pairs]
    return sum(a * r for a, r in zip(inside, ratios, strict=True)) / sum(inside)


def _interval(pairs: list[Turns], draws: int = 200) -> tuple[float, float]:
    """Where 95 % of the ratios lie when the turns are drawn anew."""
    rng = np.random.default_rng(0)
    total, weighed = np.zeros(draws), np.zeros(draws)
    for turns in pairs:
        inside, alone = np.array(turns).T
        chosen = rng.integers(len(turns), size=(draws, len(turns)))
        typical = np.median(inside[chosen], axis=1)
        total += typical
        weighed += typical * np.median((alone / inside)[chosen], axis=1)
    low, high = np.quantile(weighed / total, (0.025, 0.975))
    return float(low), float(high)
