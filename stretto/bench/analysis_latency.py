"""`stretto bench latency`: depth against a clock.

The chain of kernels that wait for one another, times the latency of a launch, is what a small graph waits for: a step's
time is fitted to chain length over models of 1, 2, ... layers on eight nodes, where there is no work. In such a stack
the chain grows with the number of all kernels, and no fit can tell which of them counts; models of as many layers side
by side, in branches, can. The depth of an aggregation, log d, holds for a machine with a processor per edge: on stars
of growing degree the time is fitted to log d and to d, and W / D says from how many processors on the former would be
seen.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from stretto import datasets
from stretto.analyze import machine_file
from stretto.analyze.analysis import analyze
from stretto.analyze.depth import depth
from stretto.analyze.machine_file import Machine
from stretto.analyze.models import as_data, make
from stretto.analyze.predict import step_seconds
from stretto.analyze.workload import Workload
from stretto.bench import report, results
from stretto.bench.run import threads as limited
from stretto.tune.timing import measure

LAYERS = (1, 2, 3, 4, 6, 8)
STARS = (17, 65, 257, 1025, 4097, 16385, 65537)  # nodes: the degree is one less
WIDTH = 8
STOCK = "stock"
SIDE_BY_SIDE = ((1, 8), (2, 4), (4, 2), (8, 1), (1, 4), (2, 2), (4, 1), (1, 2), (2, 1), (1, 1))  # branches, layers each


class Branches(nn.Module):
    """Stacks that wait for nothing of each other, and the sum of what they give."""

    def __init__(self, stacks: list[nn.Module]) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(stacks)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return sum((stack(x, edge_index) for stack in self.stacks[1:]), self.stacks[0](x, edge_index))


def line(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Least squares: y = a + b x. -> a, b and the share of the variance that the line explains"""
    slope, start = np.polyfit(x, y, 1)
    rest = np.array(y) - (start + slope * np.array(x))
    spread = float(((np.array(y) - np.mean(y)) ** 2).sum())
    return float(start), float(slope), 1 - float((rest**2).sum()) / spread if spread else 1.0


def plane(rows: list[dict[str, Any]], columns: tuple[str, ...], of: str) -> tuple[list[float], float]:
    """Least squares in several columns at once. -> start and slopes, and the share of the variance they explain"""
    x = np.array([[1.0, *(row[column] for column in columns)] for row in rows])
    y = np.array([row[of] for row in rows])
    found = np.linalg.lstsq(x, y, rcond=None)[0]
    return found.tolist(), 1 - float(((y - x @ found) ** 2).sum()) / float(((y - y.mean()) ** 2).sum())


def branches(model: str, repeats: int) -> list[dict[str, Any]]:
    """One row per number of branches and layers: kernels in all and in the longest chain, seconds measured."""
    data = as_data(datasets.load_graph("star:8"), width=WIDTH)
    stacks = {
        f"{count} x {layers}": Branches([make(model, WIDTH, WIDTH, WIDTH, layers) for _ in range(count)])
        for count, layers in SIDE_BY_SIDE
    }
    work = {name: Workload(stack, data, "infer") for name, stack in stacks.items()}
    traces = {name: one.trace() for name, one in work.items()}
    taken = measure({name: one.run for name, one in work.items()}, repeats=repeats, warmup=3)
    return [
        {"model": model, "branches": name, "kernels": trace.launches, "chain": depth(trace, 7).launches,
         "measured": taken[name].median, "figure": results.figure(taken[name], 1e6)}
        for name, trace in traces.items()
    ]  # fmt: skip


def tell_apart(out: Console, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Print what a kernel costs, and what it costs more if it is one of the chain."""
    (start, each, chained), fit = plane(rows, ("kernels", "chain"), "measured")
    verdict = "time follows the chain" if chained > each else "every kernel waits for the one before it"
    out.print(
        f"side by side in branches: measured = {start * 1e6:.0f} us + {each * 1e6:.1f} us per kernel of all "
        f"+ {chained * 1e6:.1f} us if it is of the chain, R2 {fit:.3f}: {verdict}",
        highlight=False,
    )
    return {"model": rows[0]["model"], "fit": "both", "start": start, "per kernel": each,
            "more in the chain": chained, "r2": fit}  # fmt: skip


def launches(model: str, repeats: int, computer: Machine) -> list[dict[str, Any]]:
    """One row per number of layers: kernels in all and in the longest chain, seconds predicted and measured."""
    data = as_data(datasets.load_graph("star:8"), width=WIDTH)
    work = {layers: Workload(make(model, WIDTH, WIDTH, WIDTH, layers), data, "infer") for layers in LAYERS}
    traces = {layers: one.trace() for layers, one in work.items()}
    taken = measure({str(layers): one.run for layers, one in work.items()}, repeats=repeats, warmup=3)
    return [
        {"model": model, "layers": layers, "kernels": trace.launches, "chain": depth(trace, 7).launches,
         "predicted": step_seconds(trace, computer), "measured": taken[str(layers)].median,
         "figure": results.figure(taken[str(layers)], 1e6)}
        for layers, trace in traces.items()
    ]  # fmt: skip


def stars(repeats: int, computer: Machine) -> list[dict[str, Any]]:
    """One row per degree: depth of one GCN layer, W / D, seconds measured."""
    rows: list[dict[str, Any]] = []
    calls = {}
    for size in STARS:
        data = as_data(datasets.load_graph(f"star:{size}"), width=WIDTH)
        model = make("gcn", WIDTH, WIDTH, WIDTH, 1)
        found = analyze(model, data, machine=computer, procs=[1], mode="infer")
        calls[str(size)] = Workload(model, data, "infer").run
        ideal = float(found.work) / found.depth.steps
        rows.append({"degree": size - 1, "log d": float(np.log2(size - 1)), "depth": found.depth.steps, "W/D": ideal})
    taken = measure(calls, repeats=repeats, warmup=3)
    return [
        row | {"measured": taken[str(size)].median, "figure": results.figure(taken[str(size)], 1e6)}
        for row, size in zip(rows, STARS, strict=True)
    ]


def to_row(found: dict[str, Any], repeats: int) -> results.Row:
    """A step on eight nodes or on a star, as it is written down; the fits follow from these rows."""
    if "degree" in found:
        kind, shape = "star", f"degree {found['degree']}"
    elif "branches" in found:
        kind, shape = "side by side", found["branches"]
    else:
        kind, shape = "stack", f"1 x {found['layers']}"
    case = {"model": found.get("model", "gcn"), "kind": kind, "shape": shape}
    more = {name: found.get(name) for name in ("kernels", "chain", "depth", "W/D")}
    more["predicted"] = found["predicted"] * 1e6 if "predicted" in found else None
    command = f"stretto bench latency --models {case['model']} --repeats {repeats}"
    return results.row(
        "latency", case, {STOCK: found["figure"]}, command=command, stock=STOCK, rivals=(), unit="us", more=more
    )


def command(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = "gcn,sage,gat",
    repeats: Annotated[int, typer.Option(help="Steps of each to time.")] = 50,
    csv: Annotated[Path | None, typer.Option(help="Put the rows into this file.")] = None,
) -> None:
    """Latency of a launch fitted to chains of kernels, and the time of an aggregation to its degree."""
    out = report.console()
    rows: list[dict[str, Any]] = []
    with limited(1):
        computer = machine_file.get()
        for model in models.split(","):
            mine = launches(model, repeats, computer)
            rows += mine
            table = Table(title=f"{model}, eight nodes, inference", title_justify="left")
            for column in ("layers", "kernels", "chain", "predicted us", "measured us"):
                table.add_column(column, justify="right")
            for row in mine:
                times = (f"{row[key] * 1e6:.0f}" for key in ("predicted", "measured"))
                table.add_row(*(str(row[key]) for key in ("layers", "kernels", "chain")), *times)
            out.print(table)
            for what in ("chain", "kernels"):
                start, slope, fit = line([row[what] for row in mine], [row["measured"] for row in mine])
                text = f"measured = {start * 1e6:.0f} us + {slope * 1e6:.1f} us per kernel of the {what}, R2 {fit:.3f}"
                out.print(text if what == "chain" else text.replace("of the kernels", "of all"), highlight=False)
                rows.append({"model": model, "fit": what, "start": start, "per kernel": slope, "r2": fit})
            beside = branches(model, repeats)
            rows += [*beside, tell_apart(out, beside)]
            _, slope, _ = line([row["kernels"] for row in mine], [row["predicted"] for row in mine])
            out.print(f"the machine file says {slope * 1e6:.1f} us per kernel", highlight=False)
        found = stars(repeats, computer)
    rows += found
    table = Table(title="one GCN layer on stars", title_justify="left")
    for column in ("degree", "depth", "W/D", "measured us"):
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(str(row["degree"]), f"{row['depth']:.1f}", f"{row['W/D']:.0f}", f"{row['measured'] * 1e6:.0f}")
    out.print(table)
    for what, words in (
        ("depth", "doubling of d"),
        ("log d", "doubling of d"),
        ("degree", "edge"),
    ):
        y = [row["depth"] if what == "depth" else row["measured"] * 1e6 for row in found]
        start, slope, fit = line([row["degree" if what == "degree" else "log d"] for row in found], y)
        unit = "levels" if what == "depth" else "us"
        out.print(
            f"{'depth' if what == 'depth' else 'time'} = {start:.1f} {unit} + {slope:.3g} per {words}, R2 {fit:.3f}"
        )
        rows.append({"star": what, "start": start, "slope": slope, "r2": fit})
    results.save(csv, [to_row(row, repeats) for row in rows if "measured" in row])
