"""Predicted, counted and measured, side by side: work, memory, communication and time of what can run here."""

from __future__ import annotations

import copy
import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import autograd

from stretto import memory
from stretto.analyze import machine_file
from stretto.analyze.clock import call_clock
from stretto.analyze.graph_stats import Partition, Partitioner
from stretto.analyze.kept import kept
from stretto.analyze.look import memory_here
from stretto.analyze.predict import shares, step_seconds
from stretto.analyze.strategies import OVERLAPPED, STALE, strategies
from stretto.analyze.strategy import Strategy
from stretto.analyze.trace import Trace
from stretto.analyze.workload import Workload, unpooled
from stretto.bench.memory import card_peak_bytes
from stretto.bench.run import threads as limited
from stretto.compile.choose import MOST_STEPS
from stretto.dist.layers import why_not
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.analyze.report import Report


PULL = "partition + halo, pull"
ENGINE = (OVERLAPPED, STALE)  # strategies that stretto.dist runs
REPRICED = "as workers run here"


def _row(
    what: str, unit: str, predicted: Any, counted: Any = None, measured: Any = None, *, note: str = ""
) -> dict[str, Any]:
    """note: why there is nothing counted or measured, or what the prediction is."""
    known = next((v for v in (measured, counted) if v is not None), None)
    ratio = float(predicted) / float(known) if known and predicted is not None else None
    return {
        "what": what,
        "unit": unit,
        "predicted": predicted,
        "counted": counted,
        "measured": measured,
        "ratio": ratio,
        "note": note,
    }


@contextmanager
def memory_as(keeps: bool) -> Iterator[None]:
    """The allocator as a process has it that keeps freed memory, or does not; as it was at the end."""
    before = memory.is_kept()
    memory.switch(keeps)
    try:
        yield
    finally:
        memory.switch(before)


def peak_memory(workload: Workload) -> int | None:
    """Bytes that torch's allocator holds for one step at its highest; None where torch does not say.

    The growth of the process would be another number: it has the allocator's slack in it, and pages kept from before.
    """
    if not hasattr(autograd, "_enable_profiler_legacy"):
        return None
    workload.run()  # caches and lazy parameters are not the step's
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    if workload.device.type == "cuda":
        most = card_peak_bytes(workload.run)
        workload.model.zero_grad(set_to_none=True)
        return most
    plain = (False, True, False, False, False)  # shapes, memory, stack, flops, modules
    setting = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *plain, torch._C._profiler._ExperimentalConfig())
    with unpooled():
        autograd._enable_profiler_legacy(setting)
        try:
            workload.run()
        finally:
            threads = autograd._disable_profiler_legacy()
    live = most = 0
    for event in (e for events in threads for e in events):
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage()
            most = max(most, live)
    workload.model.zero_grad(set_to_none=True)
    return most


def seconds(workload: Workload, repeats: int) -> float:
    """Median time of a plain step."""
    clock = call_clock(workload.device)
    workload.run()
    return statistics.median(clock(workload.run) for _ in range(repeats))


def counted_rows(splitter: Partitioner, parts: int, method: str) -> int:
    """Rows that a halo exchange sends, found by listing what every part lacks, one part after the other."""
    owner = splitter.assign(parts, method)
    total = 0
    for part in range(parts):
        needed = splitter.source[owner[splitter.target] == part]
        total += np.unique(needed[owner[needed] != part]).size
    return total


def plans(workload: Workload) -> dict[str, Workload]:
    """The same step as stock and, where the plug-in takes the model, accelerated."""
    from stretto import accelerate
    from stretto.nn.classes import fast_of

    found = {"as given": workload}
    if any(fast_of(type(module)) is not None for module in workload.model.modules()):
        fast = accelerate(copy.deepcopy(workload.model))
        found["accelerated"] = Workload(fast, workload.data, workload.mode, workload.step)
    return found


def validate(report: Report, *, repeats: int = 5, workers: int = 2) -> list[dict[str, Any]]:
    """One row per quantity; ratio is predicted over the best known truth. The model is left as it was.

    What is predicted is what the report says. workers: processes in which the partitioned step runs, if it can; 0:
    none. What cannot run has a note that says why.
    """
    with kept(report.workload.model), memory_as(memory.is_kept()):
        splitter = Partitioner(report.given.edge_index, report.graph.num_nodes)
        rows = _work(report) + _halos(report, splitter) + _steps(report, repeats)
        if workers > 1:
            rows += partitioned(report, splitter, workers, repeats)
            for name in ENGINE:
                rows += by_engine(report, splitter, name, workers, repeats)
        return rows


def too_large(report: Report, need: float) -> str:
    """Why a run that takes so many bytes on this machine is not tried; empty: it is."""
    room = min(report.machine.memory, memory_here(report.workload.device))
    return "" if need < room else f"not run: it needs {need / 1e9:.3g} GB, and there are {room / 1e9:.3g} GB"


def _work(report: Report) -> list[dict[str, Any]]:
    workload, peak = report.workload, float(report.trace.peak_bytes)
    why = too_large(report, report.memory["total"])
    names = (("flops", "flop", report.work), ("compulsory bytes", "B", report.bytes))
    if why:
        return [_row(*known, note=why) for known in (*names, ("peak memory of the step", "B", peak))]
    with memory_as(report.memory_kept):
        counted: Trace = workload.trace()
        taken = peak_memory(workload)
    known = (float(counted.flops), float(counted.bytes))
    rows = [_row(*name, value) for name, value in zip(names, known, strict=True)]
    return [*rows, _row("peak memory of the step", "B", peak, float(counted.peak_bytes), taken)]


def _halos(report: Report, splitter: Partitioner) -> list[dict[str, Any]]:
    return [
        _row(f"halo rows, {p.parts} parts", "rows", sum(p.halo), counted_rows(splitter, p.parts, p.method))
        for p in report.partitions
        if 1 < p.parts <= 8
    ]


def _steps(report: Report, repeats: int) -> list[dict[str, Any]]:
    """The step as it was given, in a process as it was then; and accelerated, as a process that accelerates is."""
    why = too_large(report, report.memory["total"])
    if why:
        return [_row("step, as given", "s", report.seconds, note=why)]
    with memory_as(report.memory_kept):
        rows = [_row("step, as given", "s", report.seconds, None, seconds(report.workload, repeats))]
    fast = plans(report.workload).get("accelerated")  # from here on memory is kept, where accelerating keeps it
    if fast is not None:
        for _ in range(MOST_STEPS):
            fast.run()
        predicted = step_seconds(fast.trace(), report.machine)
        rows.append(_row("step, accelerated", "s", predicted, None, seconds(fast, repeats)))
    return rows


def partitioned(report: Report, splitter: Partitioner, workers: int, repeats: int) -> list[dict[str, Any]]:
    """The step on `workers` processes that pull halo rows: predicted beside counted in torch.distributed's calls."""
    from stretto.analyze.workers import run_pull

    part = splitter.best(workers)
    plan = _plan(report, part, PULL)
    paths = [layer.path for layer in report.layers]

    def run() -> dict[str, Any]:
        return run_pull(report.workload, paths, splitter, workers, part.method, repeats=repeats)

    found = _tried(report, plan, _why_not_split(report), run)
    if isinstance(found, str):
        return [_row(f"step, {plan.name}, {workers} workers", "s", plan.seconds, note=found)]
    held = dataclasses.replace(part, edges=edges_held(splitter, part)) if found["degrees"] else part
    return [*_side_by_side(report, plan, found), _repriced(report, held, PULL, found)]


def _tried(report: Report, plan: Strategy, reason: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    """What the run found, or why there is none."""
    reason = f"not run: {reason}" if reason else too_large(report, plan.memory * plan.workers)
    if reason:
        return reason
    try:
        return run()
    except StrettoError as error:
        return f"failed: {error}"


def edges_held(splitter: Partitioner, part: Partition) -> tuple[int, ...]:
    """Edges of each part where its halo rows have all theirs too, for layers that count degrees."""
    owner = splitter.assign(part.parts, part.method)
    degree = np.bincount(splitter.target, minlength=splitter.num_nodes)
    found = []
    for number, own in enumerate(part.edges):
        needed = np.unique(splitter.source[owner[splitter.target] == number])
        found.append(own + int(degree[needed[owner[needed] != number]].sum()))
    return tuple(found)


def by_engine(report: Report, splitter: Partitioner, name: str, workers: int, repeats: int) -> list[dict[str, Any]]:
    """The step by the engine of stretto.dist, as the strategy sets it: overlapped, or with rows of the step before."""
    from stretto.analyze.workers import run_engine

    part = splitter.best(workers)
    plan = _plan(report, part, name)
    setting = plan.staleness
    assert setting is not None
    owner = torch.from_numpy(splitter.assign(workers, part.method))

    def run() -> dict[str, Any]:
        return run_engine(report.workload, owner, staleness=setting, schedule=plan.schedule, repeats=repeats)

    found = _tried(report, plan, _why_not_split(report) or _why_not_by_engine(report), run)
    if isinstance(found, str):
        return [_row(f"step, {plan.name}, {workers} workers", "s", plan.seconds, note=found)]
    rows = [*_side_by_side(report, plan, found), _repriced(report, part, name, found)]
    if setting.remote.steps:
        oldest = max(reading.age.steps for reading in found["ages"])
        rows.append(_row(f"oldest rows, {plan.name}, {workers} workers", "steps", setting.remote.steps, oldest))
    return rows


def _why_not_by_engine(report: Report) -> str:
    """Why the engine cannot run the step; empty: it can."""
    y, model = getattr(report.workload.data, "y", None), report.workload.model
    if not isinstance(y, torch.Tensor) or y.dim() != 1 or y.is_floating_point():
        return "the engine's loss is cross entropy, and the data has no labels of classes"
    return why_not(model)


def _why_not_split(report: Report) -> str:
    """Why the step cannot run on several workers; empty: it can."""
    layers, workload = report.layers, report.workload
    reason = ""
    if report.given.hetero or report.given.sizes.g or not report.given.whole:
        reason = "only one graph with nodes of one type can be split, not a batch"
    elif report.mode != "train" or workload.step is not None:
        reason = "only a default training step can be split"
    elif any(layer.hops > 1 for layer in layers) or not layers:
        reason = "a layer of several hops exchanges rows inside itself"
    elif any(type(module).__module__ == "__main__" for module in workload.model.modules()):
        reason = "the model's class is in the script itself, where workers cannot import it"
    elif not dist.is_available():
        reason = "this torch has no torch.distributed"
    return reason


def _plan(report: Report, part: Partition, name: str) -> Strategy:
    """The strategy as the report has it; priced in the same way where it was not asked for so many workers."""
    mine = (s for s in report.strategies if s.name == name and s.workers == part.parts)
    assert report.problem is not None
    return next(mine, None) or next(s for s in strategies(report.problem, [part]) if s.name == name)


def _repriced(report: Report, part: Partition, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Its step priced as it was run: workers have one thread each, keep freed memory, and talk as they do now."""
    from stretto.analyze.workers import link

    assert report.problem is not None
    machine = report.machine
    if machine.device == "cpu" and machine.threads > 1:
        with limited(1):
            machine = machine_file.get()
    here = dataclasses.replace(machine, **link())
    with memory_as(True):
        taken = shares(report.trace, here, report.on_edges)
    problem = dataclasses.replace(report.problem, machine=here, **taken)
    plan = next(s for s in strategies(problem, [part]) if s.name == name)
    what = f"step, {plan.name}, {plan.workers} workers, {REPRICED}"
    return _row(what, "s", plan.seconds, None, found["seconds"], note="not what the report says: priced again")


def _side_by_side(report: Report, plan: Strategy, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted, counted by the workers, and measured: tallied in torch.distributed's own calls."""
    name = f"{plan.name}, {plan.workers} workers"
    return [
        _row(f"bytes, {name}", "B", plan.bytes, found["bytes"], found["tallied bytes"]),
        _row(f"messages, {name}", "messages", plan.messages, found["messages"], found["tallied messages"]),
        _row(f"synchronisations, {name}", "waits", plan.syncs, found["syncs"]),
        _row(f"step, {name}", "s", plan.seconds, None, found["seconds"], note=_priced_otherwise(report)),
    ]


def _priced_otherwise(report: Report) -> str:
    """What a worker of the report has that those which ran have not."""
    threads = report.machine.threads
    one = "priced with " + ("a card" if report.machine.device == "cuda" else f"{threads} threads") + " a worker"
    return f"{one}, run with one thread" if threads > 1 or report.machine.device == "cuda" else ""


def kendall_tau(first: list[float], second: list[float]) -> float:
    """Rank correlation of two lists: the share of pairs in the same order less the share in the other."""
    pairs = [(i, j) for i in range(len(first)) for j in range(i)]
    signs = [np.sign((first[i] - first[j]) * (second[i] - second[j])) for i, j in pairs]
    return float(sum(signs) / len(pairs)) if pairs else 1.0
