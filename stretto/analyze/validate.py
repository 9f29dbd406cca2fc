"""Predicted, counted and measured, side by side: work, memory, communication and time of what can run here."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from stretto.analyze.graph_stats import Partition, Partitioner
from stretto.analyze.strategies import OVERLAPPED, STALE, strategies
from stretto.analyze.strategy import Strategy
from stretto.compile.choose import MOST_STEPS
from stretto.dist import link as between
from stretto.dist.layers import why_not
from stretto.errors import StrettoError
from stretto.kernels import has_own_memory
from stretto.machine.timing import call_clock
from stretto.machine.timing import threads as limited
from stretto.memory import allocator
from stretto.observe import this_machine
from stretto.observe.look import memory_here
from stretto.observe.peak_memory import card_peak_bytes, peak_bytes
from stretto.observe.predict import shares, step_seconds
from stretto.observe.put_back import put_back
from stretto.observe.trace import Trace
from stretto.observe.workload import Workload, train_mask

if TYPE_CHECKING:
    from stretto.analyze.report import Report


PULL = "partition + halo, pull"
RUN = (PULL, OVERLAPPED, STALE)  # strategies that stretto.dist runs
REPRICED = "as workers run here"


def _row(
    what: str, unit: str, predicted: Any, counted: Any = None, measured: Any = None, *, note: str = ""
) -> dict[str, Any]:
    """One row. note: why nothing was counted or measured, or what the prediction stands for."""
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
    before = allocator.is_kept()
    allocator.switch(keeps)
    try:
        yield
    finally:
        allocator.switch(before)


def peak_memory(workload: Workload) -> int:
    """Bytes that torch's allocator holds for one step at its highest."""

    def step() -> None:
        workload.run()
        workload.model.zero_grad(set_to_none=True)

    return card_peak_bytes(step) if has_own_memory(workload.device) else peak_bytes(step)


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
    from stretto.plug.classes import fast_of

    result = {"as given": workload}
    if any(fast_of(type(module)) is not None for module in workload.model.modules()):
        fast = accelerate(copy.deepcopy(workload.model))
        result["accelerated"] = Workload(fast, workload.data, workload.mode, workload.step)
    return result


def validate(report: Report, *, repeats: int = 5, workers: int = 2) -> list[dict[str, Any]]:
    """One row per quantity; ratio is predicted over the best known truth. The model is left as it was.

    What is predicted is what the report says. workers: processes in which the partitioned step runs, if it can; 0:
    none. What cannot run has a note that says why.
    """
    with put_back(report.workload.model), memory_as(allocator.is_kept()):
        splitter = Partitioner(report.inputs.edge_index, report.graph.num_nodes)
        rows = _work(report) + _halos(report, splitter) + _steps(report, repeats)
        if workers > 1:
            for name in RUN:
                rows += partitioned(report, splitter, name, workers, repeats)
        return rows


def too_large(report: Report, need: float) -> str:
    """Why a run that needs so many bytes is not tried on this machine; empty where it is tried."""
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


def _tried(report: Report, plan: Strategy, reason: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    """What the run measured, or the reason why it was not run or failed."""
    reason = f"not run: {reason}" if reason else too_large(report, plan.memory * plan.workers)
    if reason:
        return reason
    try:
        return run()
    except StrettoError as error:
        return f"failed: {error}"


def partitioned(report: Report, splitter: Partitioner, name: str, workers: int, repeats: int) -> list[dict[str, Any]]:
    """The step on several processes of stretto.dist, as the strategy sets it: predicted beside counted."""
    from stretto.analyze.workers import run_engine

    part = splitter.best(workers)
    plan = _plan(report, part, name)
    setting = plan.staleness
    assert setting is not None
    owner = torch.from_numpy(splitter.assign(workers, part.method))

    def run() -> dict[str, Any]:
        return run_engine(report.workload, owner, staleness=setting, schedule=plan.schedule, repeats=repeats)

    result = _tried(report, plan, _why_not(report), run)
    if isinstance(result, str):
        return [_row(f"step, {plan.name}, {workers} workers", "s", plan.seconds, note=result)]
    rows = [*_side_by_side(report, plan, result), _repriced(report, part, name, result)]
    if setting.remote.steps:
        oldest = max(reading.age.steps for reading in result["ages"])
        rows.append(_row(f"oldest rows, {plan.name}, {workers} workers", "steps", setting.remote.steps, oldest))
    return rows


def _why_not(report: Report) -> str:
    """Why the step cannot run on several workers; empty where it can."""
    workload, y = report.workload, getattr(report.workload.data, "y", None)
    if report.inputs.hetero or report.inputs.sizes.g or not report.inputs.whole:
        return "only one graph with nodes of one type can be split, not a batch"
    if report.mode != "train" or workload.step is not None:
        return "only a default training step can be split"
    if any(type(module).__module__ == "__main__" for module in workload.model.modules()):
        return "the model's class is in the script itself, where workers cannot import it"
    if not dist.is_available():
        return "this torch has no torch.distributed"
    if not isinstance(y, torch.Tensor) or y.dim() != 1 or y.is_floating_point():
        return "the loss of stretto.dist is cross entropy, and the data has no labels of classes"
    if getattr(workload.data, "train_mask", None) is not None and train_mask(workload.data) is None:
        return "stretto.dist wants a mask over the nodes, and 'train_mask' is none"
    return why_not(workload.model)


def _plan(report: Report, part: Partition, name: str) -> Strategy:
    """The strategy as the report has it; priced in the same way where it was not asked for so many workers."""
    mine = (s for s in report.strategies if s.name == name and s.workers == part.parts)
    return next(mine, None) or next(s for s in strategies(report.problem, [part]) if s.name == name)


def _repriced(report: Report, part: Partition, name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Its step priced as it was run: workers have one thread each, keep freed memory, and talk as they do now."""
    machine = report.machine
    if machine.device == "cpu" and machine.threads > 1:
        with limited(1):
            machine = this_machine.get()
    here = dataclasses.replace(machine, **between.link())
    with memory_as(True):
        taken = shares(report.trace, here, report.on_edges)
    problem = dataclasses.replace(report.problem, machine=here, **taken)
    plan = next(s for s in strategies(problem, [part]) if s.name == name)
    what = f"step, {plan.name}, {plan.workers} workers, {REPRICED}"
    return _row(what, "s", plan.seconds, None, run["seconds"], note="not what the report says: priced again")


def _side_by_side(report: Report, plan: Strategy, run: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted, counted by the workers, and measured: tallied in torch.distributed's own calls."""
    name = f"{plan.name}, {plan.workers} workers"
    return [
        _row(f"bytes, {name}", "B", plan.bytes, run["bytes"], run["tallied bytes"]),
        _row(f"messages, {name}", "messages", plan.messages, run["messages"], run["tallied messages"]),
        _row(f"synchronisations, {name}", "waits", plan.syncs, run["syncs"]),
        _row(f"step, {name}", "s", plan.seconds, None, run["seconds"], note=_priced_otherwise(report)),
    ]


def _priced_otherwise(report: Report) -> str:
    """A note where the report priced workers with more threads than those that ran, or with a card."""
    threads = report.machine.threads
    one = "priced with " + ("a card" if report.machine.device == "cuda" else f"{threads} threads") + " a worker"
    return f"{one}, run with one thread" if threads > 1 or report.machine.device == "cuda" else ""
