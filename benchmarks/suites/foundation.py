"""The targets of the foundation: what the ops must reach on two cores, each beside what they reach here.

`stretto bench ops --suite foundation [--only TEXT]`. Cells that serve several targets are measured once, each in a
process of its own, as the command that repeats it does: what earlier cells have left free in the heap spares torch the
page faults of its results, which halves its time in one cell and not in the next. "reading alone" is the ratio of a
kernel that reads the same rows in the same order, adds them up and stores nothing.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.suites import report, results
from benchmarks.suites.case import OURS, Spec
from benchmarks.suites.cases import build
from benchmarks.suites.run import SHORT, Result, run
from stretto.errors import fail
from stretto.machine import facts
from stretto.machine.timing import Timing, measure, ratio, settle, threads
from stretto.page.terminal import progress

ONE_THREAD = "one thread"
CSR, REDUCE, SCATTER, GATHER = "torch csr", "torch.sparse.mm reduce", "PyG scatter", "gather + index_add_"
# What gathers every message is many times slower on a large graph: timed only where a target asks for it.
SLOW = (GATHER, "gather + scatter_reduce_", SCATTER)
SCALING_ROUNDS = 41  # one thread beside two: whoever else wants the second core shows
HUB = "hub:400000:1000000"  # 300,000 of the edges in one row
TINY = "er:10:20"


@dataclass(frozen=True)
class Target:
    """One line of the table. kind: how `bound` is meant, a key of KINDS."""

    label: str
    spec: Spec
    kind: str
    bound: float
    against: str = ""


def _faster(spec: Spec, against: str, bound: float) -> Target:
    words = [spec.op] * (spec.op != "spmm") + [spec.reduce, spec.dtype] + [spec.weight] * (spec.weight != "none")
    words += [f"width {spec.width}"] + ["forward + backward"] * (spec.direction == "both")
    return Target(f"{' '.join(words)} vs {against}", spec, "speedup", bound, against)


TARGETS = (
    *(_faster(Spec(width=k), CSR, r) for k, r in ((16, 1.8), (32, 2.4), (64, 2.0), (128, 2.5), (256, 2.4))),
    *(_faster(Spec(width=k), CSR, 2.4) for k in (47, 100, 602)),
    *(_faster(Spec(width=k, weight=w), CSR, 2.0) for w in ("edge", "scales") for k in (32, 64, 128, 256)),
    *(_faster(Spec(width=64, reduce=r), REDUCE, 1.8) for r in ("mean", "max")),
    *(_faster(Spec(width=k, direction="both"), CSR, r) for k, r in ((32, 11.0), (256, 3.5))),
    _faster(Spec(width=256, dtype="bf16"), f"{CSR} in f32", 3.6),
    _faster(Spec(width=64), GATHER, 10.0),
    *(_faster(Spec(op="segment_reduce", width=64, reduce=r, direction="both"), SCATTER, 2.0) for r in ("sum", "max")),
    Target("30% of the edges in one row, width 64, 2 threads vs 1", Spec(graph=HUB, width=64), "scaling", 1.7),
    *(
        Target(f"share of the random-row gather ceiling, width {k}", Spec(width=k), "share", 0.8, "random gather")
        for k in (64, 128, 256)
    ),
    Target("spmm call on 10 nodes, microseconds", Spec(graph=TINY, width=16), "overhead", 25.0),
)

Interval = tuple[float, float, float]


def _speedup(target: Target, result: Result) -> Interval | None:
    return result.speedup(target.against)


def _share(target: Target, result: Result) -> Interval | None:
    share = result.shares().get(target.against)
    return None if share is None else (share, share, share)


def _overhead(target: Target, result: Result) -> Interval | None:
    timing = result.ours
    return None if timing is None else results.figure(timing, 1e6)


# kind -> (how it is read off a result, how it is written, whether the bound is the least or the most allowed)
KINDS: dict[str, tuple[Callable[[Target, Result], Interval | None], str, bool]] = {
    "speedup": (_speedup, "{:.2f}x", True),
    "share": (_share, "{:.0%}", True),
    "overhead": (_overhead, "{:.1f}", False),
    "scaling": (_speedup, "{:.2f}x", True),
}


def scaling(spec: Spec, repeats: int) -> dict[str, Timing]:
    """Ours with spec.threads threads, and with one thread, in turns."""
    case = build(spec)
    ours = next(c for c in case.candidates if c.name == OURS)

    def call(count: int) -> Callable[[], object]:
        def go() -> object:
            torch.set_num_threads(count)
            return ours.forward(*case.inputs)

        return go

    calls = {ONE_THREAD: call(1), OURS: call(spec.threads)}
    with threads(spec.threads):
        # The tuner chooses for a number of threads, and reads its choices again whenever that changes.
        for go in calls.values():
            settle(go)
        return measure(calls, repeats=max(repeats, SCALING_ROUNDS), sample_seconds=SHORT, lead_in=True)


@dataclass(frozen=True)
class Judged:
    """What a target says of the measurements, as it is shown and written down."""

    wanted: str
    measured: str
    interval: str
    met: bool
    reading_alone: str  # what would be reached if reading the rows were all there is to do


def command(out: Console, *, threads: int, repeats: int, only: str = "") -> tuple[list[results.Row], bool]:
    """Measure every target whose label contains `only`.

    -> (a row of each, whether ours failed a check)
    """
    chosen = [replace(t, spec=replace(t.spec, threads=threads)) for t in TARGETS if only in t.label]
    if not chosen:
        fail(f"bench ops: '--only' is {only!r}, which no line of the suite contains")
    out.print(facts.headline(), soft_wrap=True, highlight=False)
    done, scalings = _measured(out, chosen, repeats)
    rows: list[results.Row] = []
    table = Table("measure", title=f"foundation, {threads} threads, median of {repeats}", title_justify="left")
    for column in ("wanted", "measured", "interval", "", "reading alone"):
        table.add_column(column, justify="right")
    for target in chosen:
        timings, result = scalings.get(target), done.get(target.spec)
        judged = _judged(target, timings, result)
        cells = (judged.wanted, judged.measured, judged.interval, "met" if judged.met else "MISSED")
        table.add_row(target.label, *cells, judged.reading_alone, style="" if judged.met else "bold")
        again = f"stretto bench ops --suite foundation --only {target.label!r} --threads {threads} --repeats {repeats}"
        figures = results.figures(timings) if timings else done[target.spec].figures()
        row = results.row(
            "foundation", {"measure": target.label}, figures, command=again, threads=threads,
            stock=ONE_THREAD if timings else target.against, more=vars(judged),
        )  # fmt: skip
        rows.append(row)
    out.print(table)
    out.print(_worst(done), soft_wrap=True)
    same = [f"width {spec.width} {s['gather']:.0%}" for spec, r in done.items() if "gather" in (s := r.shares())]
    if same:
        out.print(f"share of the speed at which the very same rows can be read: {', '.join(same)}", soft_wrap=True)
    return rows, any(result.failed for result in done.values())


def _measured(
    out: Console, chosen: list[Target], repeats: int
) -> tuple[dict[Spec, Result], dict[Target, dict[str, Timing]]]:
    """The result of every cell, and of targets of scaling their timings, each measured in a process of its own."""
    specs = list(dict.fromkeys(t.spec for t in chosen if t.kind != "scaling"))
    done: dict[Spec, Result] = {}
    fresh = multiprocessing.get_context("spawn")
    with progress(len(specs), "cells") as step, fresh.Pool(1, maxtasksperchild=1) as process:
        for spec in specs:
            mine = [t for t in chosen if t.spec == spec]
            without = () if any(t.against in SLOW for t in mine) or spec.graph == TINY else SLOW
            with_ceilings = ("gather", "random gather") if any(t.kind == "share" for t in mine) else ("gather",)
            options = {"repeats": repeats, "with_ceilings": with_ceilings, "without": without}
            done[spec] = process.apply(run, (spec,), options)
            step(f"{spec.op} {spec.reduce} {spec.width}")
            if spec.graph == TINY:
                report.show(out, done[spec])
            else:
                line = report.summary(done[spec]).splitlines()[0]
                out.print(f"{spec.command(repeats)}\n  {line}", soft_wrap=True, highlight=False)
        return done, {t: process.apply(scaling, (t.spec, repeats)) for t in chosen if t.kind == "scaling"}


def _judged(target: Target, timings: dict[str, Timing] | None, result: Result | None) -> Judged:
    """Whether a target is met by the timings of its scaling, or else by the result of its cell."""
    read, form, at_least = KINDS[target.kind]
    wanted = ("at least " if at_least else "at most ") + form.format(target.bound)
    if timings is not None:
        value: Interval | None = ratio(timings[ONE_THREAD], timings[OURS])
    else:
        value = None if result is None else read(target, result)
    attainable = result.attainable(target.against) if result is not None and target.kind == "speedup" else None
    ceiling = "" if attainable is None else form.format(attainable)
    if value is None:
        return Judged(wanted, "-", "-", False, ceiling)
    met = value[0] >= target.bound if at_least else value[0] <= target.bound
    middle, low, high = map(form.format, value)
    return Judged(wanted, middle, f"{low} - {high}", met, ceiling)


def _worst(done: dict[Spec, Result]) -> str:
    """The cell where the best other comes nearest."""
    known = [(s[0], result) for result in done.values() if (s := result.speedup()) is not None]
    if not known:
        return "no cell has another candidate"
    least, result = min(known, key=lambda pair: pair[0])
    best = result.best_other.candidate if result.best_other else ""
    cell = result.spec.command(result.repeats)
    return f"least ratio to the best other over {len(known)} cells: {least:.2f}x vs {best} ({cell})"
