"""`stretto bench tune`: the choices of the tuner, each found from scratch, beside the exhaustive best."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from benchmarks.suites import results
from benchmarks.suites.case import Spec
from benchmarks.suites.cases import load
from benchmarks.suites.models import numbers
from benchmarks.suites.run import SHORT
from stretto.cli.tune import WEIGHTS, inputs
from stretto.datasets import grammar
from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels import cpu, native, vendor
from stretto.machine.timing import SETTLE_CALLS, Timing, measure, threads
from stretto.ops.pick import Picker
from stretto.ops.variants import Variant, legal
from stretto.page.terminal import console, progress

ALLOWED = 1.10  # the choice may take this many times the exhaustive best


@dataclass(frozen=True)
class Verdict:
    """What the tuner chose for a cell, what is best, and how many times longer the choice takes."""

    spec: Spec
    chosen: str
    best: str
    ratio: float
    tries: int  # calls after which the choice stood
    variants: dict[str, Timing]

    def to_row(self, repeats: int) -> results.Row:
        """As it is written down: ours is what was chosen."""
        spec = self.spec
        case = {"op": spec.op, "graph": spec.graph, "width": spec.width, "dtype": spec.dtype, "weight": spec.weight}
        words = " ".join(f"--{name} {value}" for name, value in list(case.items())[1:])
        return results.row(
            "tuning", case, results.figures(self.variants), threads=spec.threads, ours=self.chosen, rivals=[self.best],
            command=f"stretto bench tune {words} --threads {spec.threads} --repeats {repeats}",
            more={"chosen": self.chosen, "regret": self.ratio, "tries": self.tries},
        )  # fmt: skip


class _Trial(Picker):
    """A picker that knows nothing and keeps nothing: it must find its choice by trying."""

    def _load(self) -> dict[str, Any]:
        return {}

    def decide(self, key: Any, variant: Variant, milliseconds: float) -> None:
        self._decided[key] = variant


def _call(graph: Graph, x: Tensor, weight: Tensor | None, variant: Variant) -> Callable[[], Tensor]:
    """One variant of a plain or weighted sum as a function of nothing."""
    csr = graph.csr if weight is None else graph.edge_csr
    options: Any = variant.options
    if variant.backend == "torch":
        return lambda: vendor.spmm(csr, x, weight)[0]
    return lambda: cpu.spmm(csr, x, weight, **options)[0]


def verify(spec: Spec, repeats: int) -> Verdict:
    """The tuner's choice for a cell, found from scratch, beside the time of every legal variant."""
    expect(native.library() is not None, f"tune: there is nothing to choose from: {native.why_not()}")
    graph, x, weight = inputs(load(spec.graph), spec.width, spec.dtype, spec.weight)
    variants = legal("spmm", "cpu", width=spec.width, plain=spec.dtype in ("f32", "f64"))
    calls = {v.name: _call(graph, x, weight, v) for v in variants}
    trial = _Trial()
    with threads(spec.threads):
        tries = 0
        while trial.decided("cell") is None and tries < 10 * SETTLE_CALLS:
            trial.run("cell", variants, lambda variant: calls[variant.name]())
            tries += 1
        timings = measure(calls, repeats=repeats, sample_seconds=SHORT, lead_in=True)
    chosen = trial.decided("cell")
    if chosen is None:
        fail("tune: the tuner did not choose; is STRETTO_TUNE off?")
    best = min(timings, key=lambda name: timings[name].median)
    ratio = timings[chosen.name].median / timings[best].median
    return Verdict(spec, chosen.name, best, ratio, tries, timings)


def show(out: Console, verdicts: list[Verdict]) -> None:
    """The verdicts as a table."""
    first = verdicts[0].spec
    title = f"spmm, {first.graph}, {first.dtype}, weight {first.weight}, {first.threads} threads"
    table = Table(title=escape(title), title_justify="left")
    for column in ("width", "chosen", "best of all", "chosen / best", "calls to decide"):
        table.add_column(column, justify="right")
    for v in verdicts:
        style = "" if v.ratio <= ALLOWED else "bold"
        table.add_row(str(v.spec.width), v.chosen, v.best, f"{v.ratio:.3f}", str(v.tries), style=style)
    out.print(table)
    good = sum(v.ratio <= ALLOWED for v in verdicts)
    out.print(f"{good} of {len(verdicts)} choices within {ALLOWED - 1:.0%} of the exhaustive best")


def command(
    graph: Annotated[str, typer.Option(help=f"cora, a path to .npz, {', '.join(grammar())}.")] = Spec.graph,
    width: Annotated[str, typer.Option(help="Widths, separated by commas.")] = "16,32,64,128,256",
    dtype: Annotated[str, typer.Option(help="f32, f64, bf16 or f16.")] = "f32",
    weight: Annotated[str, typer.Option(help="none, or edge: one weight each.")] = "none",
    number: Annotated[int, typer.Option("--threads", help="Threads; 0: as many as torch uses.")] = 0,
    repeats: Annotated[int, typer.Option(help="Samples of each variant.")] = 9,
    csv: Annotated[Path | None, typer.Option(help="Put a row of each width into this file.")] = None,
) -> None:
    """Compare each choice of the tuner with measuring every variant."""
    expect(weight in WEIGHTS, f"bench: '--weight' is {weight!r}, wanted one of {', '.join(WEIGHTS)}")
    count = number or torch.get_num_threads()
    specs = [Spec("spmm", graph, k, dtype, weight=weight, threads=count) for k in numbers("width", width)]
    verdicts: list[Verdict] = []
    with progress(len(specs), "tuning") as step:
        for spec in specs:
            verdicts.append(verify(spec, repeats))
            step(f"width {spec.width}")
    show(console(), verdicts)
    results.save(csv, [v.to_row(repeats) for v in verdicts])
    if any(v.ratio > ALLOWED for v in verdicts):
        raise typer.Exit(1)
