"""bench grid: one layer, as in the middle of a net, in every cell of models x widths x graphs x training and inference.

A cell compares ours with the best of stock, and the plan that was chosen with the other plans, all in turns. What was
measured is kept in the CSV file, and a cell that is there of this machine and commit is not measured again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from benchmarks.suites import models, results
from stretto import datasets
from stretto.compile.choose import CHOOSER, MOST_STEPS, Decision
from stretto.layers.base import record_of
from stretto.machine import facts
from stretto.machine.timing import as_alone, measure, settle, timed
from stretto.page.terminal import console, progress

MODELS = ("gcn", "sage", "gin", "gat", "tag", "sgc")
WIDTHS = (32, 256, 1024)
GRAPHS = ("rmat:17:1200000", "grid:300", "er:50000:500000", "rmat:14:4000000")
ENOUGH = 0.95  # of the best stock
REGRET = 1.05  # of the fastest plan
STOCK_BYTES = 1 << 30  # an array of edges x channels beyond it: stock with an edge_index is not tried beside torch CSR
CANNOT_BYTES = 8 << 30  # and beyond this not at all: it makes several
ROUNDS = (5, 21)  # as many as fit into SECONDS, within these: the shorter a step, the more it takes to tell two apart
SECONDS = 4.0
LONG = 1.5  # seconds of a step; then three rounds will do
HOPELESS = 1.5  # times the fastest of its kind, in a first call
Cell = tuple[str, str, int, int, bool]  # graph, model, in, out, training


def cells(graphs: list[str], names: list[str], widths: list[int]) -> Iterator[Cell]:
    """Every cell, small first."""
    yield from sorted(
        product(graphs, names, widths, widths, (True, False)), key=lambda c: (graphs.index(c[0]), c[2] * c[3])
    )


def run(graph: str, model: str, i: int, o: int, train: bool, *, compiled: bool = False) -> results.Row:
    """One cell. compiled: torch.compile of stock is among the candidates."""
    data = datasets.load_graph(graph)
    torch.manual_seed(0)
    x = torch.randn(data.num_nodes, i)
    grad = torch.randn(data.num_nodes, o)
    first = models.LAYERS[model](i, o, False)
    errors: dict[str, float] = {}
    calls: dict[str, Callable[[], object]] = {}
    first_calls: dict[str, float] = {}
    truth: list[Tensor] | None = None
    ours: Any = None
    for name, (make, arguments, _) in models.candidates(model, data, x, compiled, False).items():
        if not _worth_it(name, model, data.edge_index.size(1), max(i, o)):
            continue
        net = make(copy.deepcopy(first))
        step = _step(net, arguments, grad, train)
        if name == models.COMPILED:
            torch.compiler.reset()  # what earlier cells compiled counts against a limit
            step()  # compiles: not a step to judge it by
        got, first_calls[name] = timed(step)
        truth = got if truth is None else truth
        errors[name] = max(models.relative(a, b) for a, b in zip(got, truth, strict=True))
        calls[name] = as_alone(step, ours=not name.startswith("stock"))
        ours = net if name == models.OURS else ours
    _settle(calls[models.OURS], ours)
    decision = _decision(ours)
    for number, plan in enumerate(_others(decision)):
        calls[f"plan {number}: {plan.name}"] = as_alone(_with_plan(decision, plan, calls[models.OURS]), ours=True)
    seconds = {name: _warm_up(call, first_calls.get(name, 0.0)) for name, call in calls.items()}
    rivals = _rivals(seconds)
    timings = measure({name: calls[name] for name in rivals}, repeats=_rounds([seconds[n] for n in rivals]), warmup=0)
    mine = [timing.median for name, timing in timings.items() if not name.startswith("stock")]
    more: dict[str, object] = {"plans": sum(not name.startswith("stock") for name in calls)}
    more |= {"regret": timings[models.OURS].median / min(mine), "error": errors[models.OURS]}
    return results.row(
        "grid", case_of((graph, model, i, o, train)), results.figures(timings), stock=models.STOCK,
        rivals=[name for name in timings if name.startswith("stock")], more=more,
        command=_command(graph, model, i, o) + " --compile" * compiled,
    )  # fmt: skip


def case_of(cell: Cell) -> dict[str, object]:
    """A cell as its row names it."""
    graph, model, i, o, train = cell
    return {"graph": graph, "model": model, "in": i, "out": o, "mode": "training" if train else "inference"}


def _command(graph: str, model: str, i: int, o: int) -> str:
    widths = str(i) if i == o else f"{i},{o}"
    return f"stretto bench grid --graph {graph} --model {model} --widths {widths}"


def _worth_it(name: str, model: str, edges: int, width: int) -> bool:
    """Whether a candidate is measured: stock on an edge_index where it may be the best, or is all there is."""
    nbytes = 4 * edges * width
    if name == models.OURS or name == "stock torch CSR":
        return True
    if name in (models.STOCK, models.COMPILED):
        return nbytes <= (CANNOT_BYTES if model in models.UNFUSED else STOCK_BYTES)
    return False  # EdgeIndex: never faster than the two others in any row of bench models


def _step(net: nn.Module, arguments: tuple[Any, ...], grad: Tensor, train: bool) -> Callable[[], list[Tensor]]:
    x = arguments[0].clone().requires_grad_()  # also in inference: a constant x would be aggregated once and kept
    parameters = list(net.parameters())

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(train):
            out = net(x, *arguments[1:])
        if not train:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, [x, *parameters], grad)]

    return step


def _decision(ours: Any) -> Decision | None:
    key = record_of(ours).key
    return None if key is None else CHOOSER.decision(key)


def _settle(call: Callable[[], object], ours: Any) -> None:
    """Until the plan is chosen, and the kernels where that takes no minute."""
    if timed(call)[1] <= LONG:
        settle(call, minimum=MOST_STEPS)
        return
    for _ in range(MOST_STEPS):
        decision = _decision(ours)
        if decision is None or decision.chosen is not None:
            return
        call()


def _warm_up(call: Callable[[], object], first: float) -> float:
    """Seconds of a call: of one more, unless the first took so long that it will do."""
    return first if first > LONG else timed(call)[1]


def _rivals(seconds: dict[str, float]) -> list[str]:
    """Ours, and of long steps of stock and of other plans only those that may yet be the fastest of their kind."""
    kept = []
    for name, took in seconds.items():
        kind = [s for n, s in seconds.items() if n.split()[0] == name.split()[0]]
        if took <= LONG or took <= HOPELESS * min(kind):
            kept.append(name)
    return kept


def _rounds(seconds: list[float]) -> int:
    """How many rounds, by what one takes."""
    least, most = ROUNDS
    return 3 if max(seconds) > LONG else max(least, min(most, int(SECONDS / sum(seconds))))


def _others(decision: Decision | None) -> list[Any]:
    """The plans that compete with the chosen one: the best few by prediction."""
    if decision is None:
        return []
    return [plan for _, plan in decision.ranking.predicted[:4] if plan != decision.chosen]


def _with_plan(decision: Any, plan: Any, call: Callable[[], object]) -> Callable[[], object]:
    def go() -> object:
        with decision.instead(plan):
            return call()

    return go


def show(out: Any, rows: list[results.Row]) -> None:
    """How many cells hold, and those that do not."""
    known = [row for row in rows if row["best_ratio"]]
    slower = [row for row in known if float(row["best_ratio"]) < ENOUGH]
    several = [row for row in rows if int(row["plans"]) > 1]
    sorry = [row for row in several if float(row["regret"]) > REGRET]
    out.print(
        f"{len(rows)} cells; stock runs in {len(known)}: ours is at least {ENOUGH}x of the best stock in "
        f"{len(known) - len(slower)}; several plans in {len(several)}: the chosen one is within "
        f"{REGRET - 1:.0%} of the fastest in {len(several) - len(sorry)}",
        soft_wrap=True,
        highlight=False,
    )
    table = Table(title="cells short of either", title_justify="left", title_style="bold")
    for column in ("cell", "ours ms", "best stock ms", "times stock", "regret"):
        table.add_column(column, justify="left" if column == "cell" else "right")
    for row in [r for r in rows if r in slower or r in sorry]:
        cell = f"{row['model']} {row['in']}-{row['out']} {row['graph']} {row['mode']}"
        table.add_row(escape(cell), *(row[column] for column in ("ours", "best", "best_ratio", "regret")))
    out.print(table)


def command(
    csv: Annotated[
        Path, typer.Option(help="rows are kept here; what it has of this machine and commit is not run again")
    ],
    graph: Annotated[str, typer.Option(help="comma-separated graphs")] = ",".join(GRAPHS),
    model: Annotated[str, typer.Option(help="comma-separated models")] = ",".join(MODELS),
    widths: Annotated[str, typer.Option(help="comma-separated widths, in and out")] = ",".join(map(str, WIDTHS)),
    compiled: Annotated[bool, typer.Option("--compile", help="time torch.compile of stock too")] = False,
    minutes: Annotated[float, typer.Option(help="no cell begins after so many minutes")] = 60.0,
) -> None:
    """One layer in every cell of models x widths x graphs: whether it is never slower, and its plan well chosen."""
    names = model.split(",")
    models.check_models(model)
    sizes = models.numbers("widths", widths)
    out = console()
    out.print(facts.headline(), style="dim")
    here = {name: str(value) for name, value in results.place().items() if name in ("machine", "threads", "commit")}
    rows = [row for row in results.load(csv) if here.items() <= row.items()]
    done = [results.case_of(row) for row in rows]
    wanted = {
        cell: {name: str(value) for name, value in case_of(cell).items()}
        for cell in cells(graph.split(","), names, sizes)
    }
    left = [cell for cell, case in wanted.items() if case not in done]
    start = time.perf_counter()
    with progress(len(left), "cells") as after:
        for cell in left:
            if time.perf_counter() - start > 60 * minutes:
                break
            rows.append(run(*cell, compiled=compiled))
            results.save(csv, rows[-1:])
            after(" ".join(map(str, cell[:4])))
    show(out, rows)
