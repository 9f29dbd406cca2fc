"""Profile a script as it is, and run it again with its layers accelerated; it is stopped when enough is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from stretto.errors import StrettoError, expect, fail, told_by
from stretto.machine.file import Machine
from stretto.machine.timing import Timing
from stretto.memory import allocator
from stretto.observe import this_machine
from stretto.observe.agreement import difference, worst
from stretto.observe.put_back import put_back
from stretto.observe.trace import Recorder, Trace
from stretto.observe.workload import Workload, merge_times, same_ops
from stretto.plug.accelerate import restore
from stretto.profile import in_step
from stretto.profile.profiling import Profile, make
from stretto.profile.recommend import (
    NOTHING,
    REPEATS,
    SETTLE,
    accelerate_sites,
    layer_advice,
    outputs,
    realised,
    set_shares,
    unchanged,
)
from stretto.profile.rounds import Signature
from stretto.profile.script_steps import WARMUP, Enough, Steps, Watched, run
from stretto.profile.surroundings import anomaly_remarks
from stretto.profile.watcher import Watcher

FEWEST = 3  # pairs of steps without which nothing is said of a gain
COMPILED = (
    "torch.compile: the step is timed as it runs, compiled; its ops are those of the model before it is compiled, "
    "since a step that is watched op by op is not compiled"
)
IN_COMPILE = "inside torch.compile a layer is stock's code, compiled as a whole"


class _Script(Workload):
    """A step that only the script itself can run; what it asks of its models can run alone."""

    def __init__(self, alone: Watched | None, mode: str) -> None:
        super().__init__(torch.nn.Identity(), None, mode)
        self.alone = alone
        self.rounds: tuple[Signature, ...] = ()  # optimizers that a step is a round of
        self.imported: frozenset[str] = frozenset()  # modules that the script has taken from its own folder
        self.grouped = False  # whether it has left a process group behind, which its models may need

    def run(self, recorder: Recorder | None = None) -> None:
        raise StrettoError("profile: the step of a script cannot be run again here; use stretto.profile(model, data)")


def _run_until_it_fails(script: str, arguments: list[str], steps: Steps) -> BaseException | None:
    """Run the script; what ended it before its time. What was seen until then is worth telling."""
    try:
        run(script, arguments, steps)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return error
    return None


def compiled_paths(model: nn.Module) -> list[str]:
    """Paths of the modules that torch.compile has in hand, by either of its doors."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
    ]


def _advise(profile: Profile, watcher: Watcher, train: bool, budget: float) -> None:
    compiled = compiled_paths(watcher.model)
    if compiled:
        profile.remarks.append(COMPILED)
    often = watcher.closures(profile.trace)
    sites = {path: site._replace(calls=site.calls * often) for path, site in watcher.sites.items()}
    free = {
        path: site
        for path, site in sites.items()
        if not any(path == above or not above or path.startswith(f"{above}.") for above in compiled)
    }
    # Where a layer alone says little, what the step asks of the models is timed with it accelerated, too.
    step = watcher.workload if in_step.hidden(watcher.device) and not compiled else None
    with put_back(watcher.model):
        try:
            profile.advice = layer_advice(free, train, REPEATS, budget, step)
        except torch.OutOfMemoryError as error:  # beside what the script still holds
            if step is None:
                raise
            profile.remarks.append(f"layers were timed alone: with the step, {named(error).splitlines()[0]}")
            profile.advice = layer_advice(free, train, REPEATS, budget)
    profile.advice += [unchanged(path, site, IN_COMPILE) for path, site in sites.items() if path not in free]
    set_shares(profile.advice, profile.trace.step_seconds)


def _grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def named(error: BaseException) -> str:
    """The error in one line: its class, and its message if it has one."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _remarks(watcher: Watcher, trace: Trace, failure: BaseException | None) -> list[str]:
    """What one must know before believing the numbers."""
    said = []
    if failure is not None:
        said.append(
            f"the script ended with {named(failure)} after {watcher.steps} {watcher.unit}: this was seen until then"
        )
    makeup = next(made for made, full in watcher.fulls if full.trace is trace)
    if len(makeup) > 1:
        said.append(f"a step is a round: {len(makeup)} steps of {len(set(makeup))} optimizers")
    return [*said, *anomaly_remarks(trace)]


@told_by("profile", "analyze")
def profile_script(
    script: str, arguments: list[str], machine: Machine | str, *, repeats: int = 5, budget: float = 30.0
) -> Profile:
    """Profile the steps of a script, then its layers alone. budget: seconds for each layer."""
    expect(Path(script).is_file(), f"profile: no script {script!r}")
    watcher = Watcher(repeats)
    grouped = _grouped()
    failure = _run_until_it_fails(script, arguments, watcher)
    trace, passes, plain = watcher.seen() if watcher.fulls else (None, [], [])
    if trace is None or not passes:
        if failure is not None:
            raise failure
        wanted = WARMUP + 2 + 2 * repeats
        fail(f"profile: {script} took {watcher.steps} {watcher.unit}, wanted at least {wanted}")
    if watcher.has_closures and not any(same_ops(trace, one) for one in passes):
        fail(
            f"profile: the steps of {script} run other ops each time, wanted some that are alike: LBFGS has more to do "
            "with each step until its history is full; a smaller history_size is sooner, and max_iter without a line "
            "search keeps the number of calls of its closure"
        )
    merge_times(trace, passes, plain or [trace.traced_seconds])
    alone = watcher.workload
    train = watcher.by_optimizer if alone is None else alone.mode == "train"
    computer = this_machine.get(machine, device=watcher.device)
    workload = _Script(alone, "train" if train else "infer")
    workload.rounds, workload.imported = watcher.rounds.kinds, watcher.imported
    workload.grouped = _grouped() and not grouped
    result = make(workload, trace, computer, Path(script).name)
    result.failure = failure
    result.remarks = _remarks(watcher, trace, failure)
    if not isinstance(failure, KeyboardInterrupt):
        _advise(result, watcher, train, budget)
    return result


def alone(profile: Profile, *, repeats: int = 5) -> Profile:
    """What a script's step asks of its models, profiled for itself: it can be replayed."""
    workload = profile.workload.alone if isinstance(profile.workload, _Script) else None
    if workload is None:
        fail(f"profile: {profile.model} calls no model, so that there is nothing to replay")
    with put_back(workload.model):
        trace = workload.timed(repeats=repeats)
    return make(workload, trace, profile.machine, f"{profile.model}, its models alone")


class _Turns(Steps):
    """Stock and accelerated steps in turns, after the outputs were seen to be equal."""

    def __init__(
        self, chosen: list[dict[str, Any]], known: tuple[Signature, ...] = (), imported: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(known, imported)
        self.chosen = chosen
        self.problem = ""
        self.error = 0.0
        self.samples: dict[str, list[float]] = {"stock": [], "accelerated": []}
        self._classes: list[tuple[torch.nn.Module, type, type]] = []
        self._coming: list[str] = []  # sides of the steps to come
        self._side = ""
        self._kept = allocator.is_kept()

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
        allocator.switch(fast)  # each with the allocator that it would have alone

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
        allocator.switch(self._kept)


def apply_script(profile: Profile, script: str, arguments: list[str]) -> dict[str, Any]:
    """Run the script once more, its steps stock and accelerated in turns where that was advised; the gain of one."""
    chosen = [row for row in profile.advice if row["advice"] == "accelerate"]
    if not chosen:
        return dict(NOTHING)
    workload = profile.workload
    assert isinstance(workload, _Script)

    def unapplied(reason: str) -> dict[str, Any]:
        predicted = sum(row["saves_ms"] for row in chosen)
        return {"applied": False, "reason": f"not applied: {reason}", "predicted_ms": predicted}

    if profile.failure is not None:
        return unapplied(f"the script ended with {type(profile.failure).__name__}")
    if workload.grouped and _grouped():
        torch.distributed.destroy_process_group()  # the script will make its own again
    turns = _Turns(chosen, workload.rounds, workload.imported)
    failure = _run_until_it_fails(script, arguments, turns)
    if turns.problem:
        return unapplied(turns.problem)
    if failure is not None:
        profile.failure = failure
        return unapplied(f"run again, the script ended with {named(failure)}")
    pairs = min(len(samples) for samples in turns.samples.values())
    if pairs < FEWEST:
        wanted = WARMUP + 1 + SETTLE + 2 * FEWEST
        fail(f"profile: {script} took {turns.steps} {turns.unit}, wanted at least {wanted} to compare them")
    done = realised({side: Timing(tuple(taken[:pairs])) for side, taken in turns.samples.items()}, chosen)
    if done["applied"]:
        done["reason"] += "; stretto.accelerate(model) in the script keeps it so"
    return {**done, "error": turns.error}
