"""Profile a script as it is, and run it again with its layers accelerated; it is stopped when enough is known."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from stretto import memory
from stretto.analyze import machine_file
from stretto.analyze.machine_file import Machine
from stretto.analyze.trace import Recorder
from stretto.analyze.workload import Workload, merge_times
from stretto.errors import StrettoError, expect, fail
from stretto.plugin import restore
from stretto.profile.profiling import Profile, make
from stretto.profile.recommend import (
    NOTHING,
    REPEATS,
    SETTLE,
    accelerate_sites,
    difference,
    layer_advice,
    outputs,
    realised,
    worst,
)
from stretto.profile.script_steps import WARMUP, Enough, Steps, Watched, run
from stretto.profile.untouched import untouched
from stretto.tune.timing import Timing

FEWEST = 3  # pairs of steps without which nothing is said of a gain


class _Script(Workload):
    """A step that only the script itself can run; what it asks of its models can run alone."""

    def __init__(self, alone: Watched | None, mode: str) -> None:
        super().__init__(torch.nn.Identity(), None, mode)
        self.alone = alone

    def run(self, recorder: Recorder | None = None) -> None:
        raise StrettoError("profile: the step of a script cannot be run again here; use stretto.profile(model, data)")


class _Watcher(Steps):
    """One step traced in full, then plain and timed ones in turns."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.plain: list[float] = []
        self.passes: list[Recorder] = []
        self.full: Recorder | None = None
        self.current: Recorder | None = None
        self._stack = ExitStack()

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super().before(optimizer, args, kwargs)
        if self.current is not None:
            self.current.phase = "optimizer"

    def ended(self, seconds: float) -> None:
        self._stack.close()
        if self.current is not None:
            if self.current.full:
                self.full = self.current
            else:
                self.passes.append(self.current)
        elif self.full is not None:
            self.plain.append(seconds)
        self.current = None

    def begins(self) -> None:
        if len(self.plain) >= self.repeats and len(self.passes) >= self.repeats:
            raise Enough
        if self.full is None or len(self.passes) < len(self.plain):
            self.current = Recorder(self.model, full=self.full is None, device=self.device)
            self._stack = ExitStack()
            self._stack.enter_context(self.current.recording())
            if not self.by_optimizer:  # the call of the first model is under way
                self.current._enter_module(self._roots[0], ())

    def close(self) -> None:
        self._stack.close()
        super().close()


def profile_script(
    script: str, arguments: list[str], machine: Machine | str, *, repeats: int = 5, budget: float = 30.0
) -> Profile:
    """Profile the steps of a script, then its layers alone. budget: seconds for each layer."""
    expect(Path(script).is_file(), f"profile: no script {script!r}")
    watcher = _Watcher(repeats)
    run(script, arguments, watcher)
    if watcher.full is None or not watcher.passes:
        wanted = WARMUP + 2 + 2 * repeats
        fail(f"profile: {script} took {watcher.steps} {watcher.unit}, wanted at least {wanted}")
    trace = watcher.full.trace
    merge_times(trace, watcher.passes, watcher.plain or [trace.traced_seconds])
    alone = watcher.workload
    train = watcher.by_optimizer if alone is None else alone.mode == "train"
    computer = machine_file.get(machine, device=watcher.device)
    found = make(_Script(alone, "train" if train else "infer"), trace, computer, Path(script).name)
    with untouched(watcher.model):
        found.advice = layer_advice(watcher.sites, train, REPEATS, budget)
    for row in found.advice:
        row["share"] = row["saves_ms"] / 1e3 / trace.step_seconds
    return found


def alone(profile: Profile, *, repeats: int = 5) -> Profile:
    """What a script's step asks of its models, profiled for itself: it can be replayed and swept."""
    workload = getattr(profile.workload, "alone", None)
    if workload is None:
        fail(f"profile: {profile.model} calls no model, so that there is nothing to replay or sweep")
    with untouched(workload.model):
        trace = workload.timed(repeats=repeats)
    return make(workload, trace, profile.machine, f"{profile.model}, its models alone")


class _Turns(Steps):
    """Stock and accelerated steps in turns, after the outputs were seen to be equal."""

    def __init__(self, chosen: list[dict[str, Any]]) -> None:
        super().__init__()
        self.chosen = chosen
        self.problem = ""
        self.error = 0.0
        self.samples: dict[str, list[float]] = {"stock": [], "accelerated": []}
        self._classes: list[tuple[torch.nn.Module, type, type]] = []
        self._coming: list[str] = []  # sides of the steps to come
        self._side = ""
        self._kept = memory.is_kept()

    def ended(self, seconds: float) -> None:
        if self._side:
            self.samples[self._side].append(seconds)

    def begins(self) -> None:
        if not self._classes:
            self._prepare()
        if not self._coming:
            raise Enough
        self._side = self._coming.pop(0)
        fast = self._side != "stock"  # the first steps of the tuner are accelerated, and not counted
        for module, slow_class, fast_class in self._classes:
            module.__class__ = fast_class if fast else slow_class
        memory.switch(fast)  # each with the allocator that it would have alone

    def _prepare(self) -> None:
        model, workload = self.model, self.workload
        before = [(module, type(module)) for module in model.modules()]
        stock = [] if workload is None else outputs(workload)
        missing = accelerate_sites(model, self.chosen)
        if missing:
            self.problem = f"this time the script has no layer {missing}"
            raise Enough
        fast = [] if workload is None else outputs(workload)
        self.problem = difference(stock, fast)
        if self.problem:
            raise Enough
        self.error = worst(stock, fast)
        self._classes = [(module, kind, type(module)) for module, kind in before if type(module) is not kind]
        draw = random.Random(0)
        self._coming = [""] * SETTLE
        for _ in range(REPEATS):
            self._coming += draw.sample(list(self.samples), 2)

    def close(self) -> None:
        super().close()
        for module, _, _ in self._classes:
            restore(module)
        memory.switch(self._kept)


def apply_script(profile: Profile, script: str, arguments: list[str]) -> dict[str, Any]:
    """Run the script once more, its steps stock and accelerated in turns where that was advised; the gain of one."""
    chosen = [row for row in profile.advice if row["advice"] == "accelerate"]
    if not chosen:
        return dict(NOTHING)
    turns = _Turns(chosen)
    run(script, arguments, turns)
    if turns.problem:
        predicted = sum(row["saves_ms"] for row in chosen)
        return {"applied": False, "reason": f"not applied: {turns.problem}", "predicted_ms": predicted}
    pairs = min(len(samples) for samples in turns.samples.values())
    if pairs < FEWEST:
        wanted = WARMUP + 1 + SETTLE + 2 * FEWEST
        fail(f"profile: {script} took {turns.steps} {turns.unit}, wanted at least {wanted} to compare them")
    done = realised({side: Timing(tuple(taken[:pairs])) for side, taken in turns.samples.items()}, chosen)
    if done["applied"]:
        done["reason"] += "; stretto.accelerate(model) in the script keeps it so"
    return {**done, "error": turns.error}
