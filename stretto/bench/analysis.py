"""`stretto bench analysis`: how far the analyzer's predictions are from what is measured here.

Step time of {6 models} x {4 graphs} x {1, 2 threads} against the prediction, rank correlation over plans, regret of the
chosen one, peak memory, replay of hot ops against their time in the model, overhead of the profiler.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from stretto import datasets
from stretto.analyze import machine_file, validate
from stretto.analyze.machine_file import Machine
from stretto.analyze.models import as_data, make
from stretto.analyze.predict import step_seconds
from stretto.analyze.workload import Workload
from stretto.bench import machine, report
from stretto.bench.run import threads as limited
from stretto.profile.profiling import Profile
from stretto.profile.profiling import make as make_profile
from stretto.profile.replay import replay

MODELS = ("gcn", "sage", "gin", "gat", "sgc", "tag")
GRAPHS = ("cora", "er:20000:100000", "rmat:14:150000", "grid:120")
HIDDEN = 64


@dataclass
class Cell:
    """One model on one graph with one number of threads."""

    model: str
    graph: str
    threads: int
    rows: list[dict[str, Any]]  # plan, predicted and measured seconds

    @property
    def ratio(self) -> float:
        """Predicted over measured, of the stock plan."""
        return self.rows[0]["predicted"] / self.rows[0]["measured"]

    @property
    def regret(self) -> float:
        """How much longer the plan predicted to be fastest takes than the fastest one."""
        chosen = min(self.rows, key=lambda r: r["predicted"])
        return chosen["measured"] / min(r["measured"] for r in self.rows) - 1


def measure_cell(model: str, graph: str, count: int, computer: Machine, repeats: int) -> tuple[Cell, Workload]:
    """Predict, then run, every plan of one cell."""
    data = as_data(datasets.load_graph(graph), width=HIDDEN)
    made = make(model, data.x.size(1), HIDDEN, int(data.y.max()) + 1)
    workload = Workload(made, data)
    rows = []
    for name, plan in validate.plans(workload).items():
        for _ in range(3):
            plan.run()
        predicted = step_seconds(plan.trace(), computer)
        rows.append({"plan": name, "predicted": predicted, "measured": validate.seconds(plan, repeats)})
    return Cell(model, graph, count, rows), workload


def command(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    graphs: Annotated[str, typer.Option(help="Graphs, separated by commas.")] = ",".join(GRAPHS),
    repeats: Annotated[int, typer.Option(help="Steps of each plan to time.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Write the cells to this file.")] = None,
) -> None:
    """Predicted against measured: step time, order of plans, memory, replay, overhead."""
    out = report.console()
    cells: list[Cell] = []
    profiles: list[Profile] = []
    memory: list[float] = []
    counts = sorted({1, machine.cores()})
    names, places = models.split(","), graphs.split(",")
    with report.progress(len(counts) * len(names) * len(places), "analysis") as step:
        for count in counts:
            with limited(count):
                computer = machine_file.probe()
                for graph in places:
                    for model in names:
                        cell, workload = measure_cell(model, graph, count, computer, repeats)
                        cells.append(cell)
                        if count == counts[0]:
                            trace = workload.timed(repeats=3)
                            profiles.append(make_profile(workload, trace, computer, model))
                            taken = validate.peak_memory(workload)
                            memory += [trace.peak_bytes / taken] if taken else []
                        step(f"{model}, {graph}")
    show(out, cells, profiles, memory)
    if json is not None:
        report.write_json(json, [vars(cell) | {"ratio": cell.ratio, "regret": cell.regret} for cell in cells])


def show(out: Console, cells: list[Cell], profiles: list[Profile], memory: list[float]) -> None:
    """The cells, then every measure beside its target."""
    table = Table(title="step time, ms", title_justify="left")
    for column in ("model", "graph", "threads", "plan", "predicted", "measured", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "graph", "plan") else "right")
    for cell in cells:
        for row in cell.rows:
            times = (
                f"{row['predicted'] * 1e3:.3f}",
                f"{row['measured'] * 1e3:.3f}",
                f"{row['predicted'] / row['measured']:.2f}",
            )
            table.add_row(cell.model, cell.graph, str(cell.threads), row["plan"], *times)
    out.print(table)
    rows = [row for cell in cells for row in cell.rows]
    within = sum(0.5 <= cell.ratio <= 2 for cell in cells) / len(cells)
    tau = validate.kendall_tau([r["predicted"] for r in rows], [r["measured"] for r in rows])
    replays = [r["ratio"] for p in profiles[:4] for r in replay(p, share=0.5) if r["ratio"]]
    overhead = [p.trace.traced_seconds / p.trace.step_seconds for p in profiles]
    lines = {
        "cells whose step time is predicted within 2x": (f"{within:.0%}", "80%"),
        "Kendall tau of predicted and measured over plans": (f"{tau:.2f}", "0.8"),
        "largest regret of the plan predicted fastest": (f"{max(c.regret for c in cells):.0%}", "15%"),
        "peak memory, predicted over measured, median": (f"{median(memory):.2f}" if memory else "-", "0.85 to 1.15"),
        "replay over in-model time of hot ops, median": (f"{median(replays):.2f}" if replays else "-", "0.85 to 1.15"),
        "traced step over plain step, largest": (f"{max(overhead):.1f}x" if overhead else "-", "3x"),
        "least share of a step attributed": (
            f"{min(p.trace.attributed for p in profiles):.1%}" if profiles else "-",
            "95%",
        ),
    }
    for name, (value, target) in lines.items():
        out.print(f"{name}: {value} (target {target})", highlight=False)
    if torch.get_num_threads() > machine.cores():
        out.print("more threads than cores: times mean little", style="yellow")
