"""`stretto tune`: settle the choices of the tuner for a graph; `--verify` compares them with the exhaustive best."""

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

from benchmarks.suites import report, results
from benchmarks.suites.case import Spec
from benchmarks.suites.cases import load
from benchmarks.suites.run import SETTLE_CALLS, SHORT
from benchmarks.suites.run import settle as settle_calls
from stretto import ops
from stretto.datasets import grammar
from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels import cpu, native, vendor
from stretto.machine import facts as machine
from stretto.machine import store
from stretto.machine.timing import Timing, measure, threads
from stretto.ops.pick import Picker
from stretto.ops.variants import Variant, legal
from stretto.page.terminal import console

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
            command=f"stretto tune {words} --threads {spec.threads} --repeats {repeats} --verify",
            more={"chosen": self.chosen, "regret": self.ratio, "tries": self.tries},
        )  # fmt: skip


class _Trial(Picker):
    """A picker that knows nothing and keeps nothing: it must find its choice by trying."""

    def _load(self) -> dict[str, Any]:
        return {}

    def decide(self, key: Any, variant: Variant, milliseconds: float) -> None:
        self._decided[key] = variant


def _tensors(spec: Spec) -> tuple[Graph, Tensor, Tensor | None]:
    data = load(spec.graph)
    x = torch.randn(data.num_nodes, spec.width).to(spec.torch_dtype)
    weight = torch.rand(data.num_edges, dtype=x.dtype) if spec.weight == "edge" else None
    return Graph.of(data.edge_index, data.num_nodes), x, weight


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
    graph, x, weight = _tensors(spec)
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


def settle(spec: Spec) -> None:
    """Call the op as training does until the tuner has made up its mind; the choice is kept on disk."""
    graph, x, weight = _tensors(spec)
    x.requires_grad_()

    def step() -> None:
        out = ops.spmm(graph, x, weight)
        torch.autograd.grad(out, x, out.detach())

    settle_calls(step)


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
    repeats: Annotated[int, typer.Option(help="Samples of each variant, with --verify.")] = 9,
    check: Annotated[bool, typer.Option("--verify", help="Compare each choice with measuring every variant.")] = False,
    csv: Annotated[Path | None, typer.Option(help="With --verify, put a row of each width into this file.")] = None,
) -> None:
    """Settle which kernel variants run on a graph and keep that on disk; --verify shows how good the choices are."""
    out = console()
    count = number or torch.get_num_threads()
    specs = [Spec("spmm", graph, int(k), dtype, weight=weight, threads=count) for k in width.split(",")]
    verdicts: list[Verdict] = []
    with report.progress(len(specs), "tuning") as step, threads(count):
        for spec in specs:
            if check:
                verdicts.append(verify(spec, repeats))
            else:
                settle(spec)
            step(f"width {spec.width}")
        facts = machine.describe()
    if not check:
        kept = store.read("kernels", facts)
        out.print(f"{len(kept)} choices for this machine in {store.path('kernels', facts)}", soft_wrap=True)
        return
    show(out, verdicts)
    results.save(csv, [v.to_row(repeats) for v in verdicts])
    if any(v.ratio > ALLOWED for v in verdicts):
        raise typer.Exit(1)
