"""Predicted, counted and measured, side by side: work, memory, communication and time of what can run here."""

from __future__ import annotations

import copy
import statistics
from typing import TYPE_CHECKING, Any

import torch

from stretto import dist
from stretto.analyze.graph_stats import Partitioner
from stretto.analyze.strategies import OVERLAPPED, PULL, STALE, strategies
from stretto.analyze.strategy import Strategy
from stretto.compile.choose import MOST_STEPS
from stretto.dist.layers import why_not
from stretto.errors import StrettoError, fail
from stretto.kernels import has_own_memory
from stretto.machine.timing import call_clock, memory_as, repeated
from stretto.memory import allocator
from stretto.observe.agreement import difference
from stretto.observe.look import memory_here
from stretto.observe.peak_memory import card_peak_bytes, peak_bytes
from stretto.observe.predict import step_seconds
from stretto.observe.put_back import put_back
from stretto.observe.workload import Workload, train_mask

if TYPE_CHECKING:
    from stretto.analyze.report import Report

RUN = (PULL, OVERLAPPED, STALE)  # strategies that stretto.dist runs
WARMUP = 3  # steps until a rank has the memory that it needs
LIMIT = 240.0  # seconds until ranks that do not answer are ended

Row = dict[str, Any]


def _row(what: str, unit: str, predicted: Any, counted: Any = None, measured: Any = None, *, note: str = "") -> Row:
    """One row. note: why nothing was counted or measured, or what the prediction stands for."""
    truth = next((v for v in (measured, counted) if v is not None), None)
    ratio = float(predicted) / float(truth) if truth and predicted is not None else None
    return {
        "what": what, "unit": unit, "predicted": predicted, "counted": counted, "measured": measured, "ratio": ratio,
        "note": note,
    }  # fmt: skip


def validate(report: Report, *, repeats: int = 5, workers: int = 2) -> list[Row]:
    """One row per quantity; ratio is predicted over the best known truth. The model is left as it was.

    What is predicted is what the report says. workers: processes in which the partitioned step runs, if it can; 0:
    none. What cannot run has a note that says why.
    """
    with put_back(report.workload.model), memory_as(allocator.is_kept()):
        rows = _work(report) + _steps(report, repeats)
        return rows + [row for name in RUN if workers > 1 for row in partitioned(report, name, workers, repeats)]


def too_large(report: Report, need: float) -> str:
    """Why a run that needs so many bytes is not tried on this machine; empty where it is tried."""
    room = min(report.machine.memory, memory_here(report.workload.device))
    return "" if need < room else f"not run: it needs {need / 1e9:.3g} GB, and there are {room / 1e9:.3g} GB"


# ---- the step of one worker ----


def peak_memory(workload: Workload) -> int:
    """Bytes that torch's allocator holds for one step at its highest."""

    def step() -> None:
        workload.run()
        workload.model.zero_grad(set_to_none=True)

    return card_peak_bytes(step) if has_own_memory(workload.device) else peak_bytes(step)


def seconds(workload: Workload, repeats: int) -> float:
    """Median time of a plain step."""
    return repeated(workload.run, least=repeats, clock=call_clock(workload.device)).median


def accelerated(workload: Workload) -> Workload | None:
    """The same step accelerated; None where the plug-in takes none of its layers."""
    from stretto import accelerate
    from stretto.plug.classes import fast_of

    if all(fast_of(type(module)) is None for module in workload.model.modules()):
        return None
    return Workload(accelerate(copy.deepcopy(workload.model)), workload.data, workload.mode, workload.step)


def _work(report: Report) -> list[Row]:
    workload, peak = report.workload, ("peak memory of the step", "B", float(report.trace.peak_bytes))
    why = too_large(report, report.memory["total"])
    work = (("flops", "flop", report.work), ("compulsory bytes", "B", report.bytes))
    if why:
        return [_row(*known, note=why) for known in (*work, peak)]
    with memory_as(report.memory_kept):
        trace = workload.trace()
        taken = peak_memory(workload)
    counted = (float(trace.flops), float(trace.bytes))
    rows = [_row(*known, value) for known, value in zip(work, counted, strict=True)]
    return [*rows, _row(*peak, float(trace.peak_bytes), taken)]


def _steps(report: Report, repeats: int) -> list[Row]:
    """The step as it was given, in a process as it was then; and accelerated, as a process that accelerates is."""
    why = too_large(report, report.memory["total"])
    if why:
        return [_row("step, as given", "s", report.seconds, note=why)]
    with memory_as(report.memory_kept):
        rows = [_row("step, as given", "s", report.seconds, None, seconds(report.workload, repeats))]
    fast = accelerated(report.workload)  # from here on memory is kept, where accelerating keeps it
    if fast is not None:
        for _ in range(MOST_STEPS):
            fast.run()
        predicted = step_seconds(fast.trace(), report.machine)
        rows.append(_row("step, accelerated", "s", predicted, None, seconds(fast, repeats)))
    return rows


# ---- the step of several workers ----


def partitioned(report: Report, name: str, workers: int, repeats: int) -> list[Row]:
    """The step on several processes of stretto.dist, as the strategy sets it: predicted beside counted."""
    plan, owner = _plan(report, name, workers)
    what = f"{name}, {workers} workers"
    reason = _why_not(report)
    reason = f"not run: {reason}" if reason else too_large(report, plan.memory * workers)
    try:
        run = None if reason else _run(report.workload, plan, owner, repeats)
    except StrettoError as error:
        run, reason = None, f"failed: {error}"
    if run is None:
        return [_row(f"step, {what}", "s", plan.seconds, note=reason)]
    sent = run.sent()
    return [
        _row(f"bytes, {what}", "B", plan.bytes, sent["bytes"]),
        _row(f"messages, {what}", "messages", plan.messages, sent["messages"]),
        _row(f"synchronisations, {what}", "waits", plan.syncs, sent["syncs"]),
        _row(f"step, {what}", "s", plan.seconds, None, statistics.median(run.seconds[-repeats:]), note=_priced(report)),
    ]


def _plan(report: Report, name: str, workers: int) -> tuple[Strategy, torch.Tensor]:
    """The strategy as the report has it, or priced in the same way where it was not asked for so many workers; and who
    has which node."""
    splitter = Partitioner(report.inputs.edge_index, report.graph.num_nodes)
    part = splitter.best(workers)
    mine = (s for s in report.strategies if s.name == name and s.workers == workers)
    plan = next(mine, None) or next(s for s in strategies(report.problem, [part]) if s.name == name)
    return plan, torch.from_numpy(splitter.assign(workers, part.method))


def _run(workload: Workload, plan: Strategy, owner: torch.Tensor, repeats: int) -> dist.Run:
    """The steps of stretto.dist, whose weights stay. Fails where the model in parts gives another result."""
    assert plan.staleness is not None
    model, data, steps = workload.model, workload.data, WARMUP + plan.staleness.memory_steps + repeats
    run = dist.train(model, data, owner, steps=steps, staleness=plan.staleness, schedule=plan.schedule, limit=LIMIT)
    with put_back(model), torch.no_grad():
        wrong = difference([model.eval()(data.x, data.edge_index)], [run.predictions])
    if wrong:
        fail(f"validate: {wrong} between {plan.workers} workers and one process")
    return run


def _why_not(report: Report) -> str:
    """Why the step cannot run on several workers; empty where it can."""
    workload, y = report.workload, getattr(report.workload.data, "y", None)
    if report.inputs.hetero or report.inputs.sizes.g or not report.inputs.whole:
        return "only one graph with nodes of one type can be split, not a batch"
    if report.mode != "train" or workload.step is not None:
        return "only a default training step can be split"
    if any(type(module).__module__ == "__main__" for module in workload.model.modules()):
        return "the model's class is in the script itself, where workers cannot import it"
    if not torch.distributed.is_available():
        return "this torch has no torch.distributed"
    if not isinstance(y, torch.Tensor) or y.dim() != 1 or y.is_floating_point():
        return "the loss of stretto.dist is cross entropy, and the data has no labels of classes"
    if getattr(workload.data, "train_mask", None) is not None and train_mask(workload.data) is None:
        return "stretto.dist wants a mask over the nodes, and 'train_mask' is none"
    return why_not(workload.model)


def _priced(report: Report) -> str:
    """A note where the report priced workers with more threads than those that ran, or with a card."""
    threads = report.machine.threads
    one = "priced with " + ("a card" if report.machine.device == "cuda" else f"{threads} threads") + " a worker"
    return f"{one}, run with one thread" if threads > 1 or report.machine.device == "cuda" else ""
