"""`stretto bench analysis`: how far the analyzer's predictions are from what is measured here.

Step time of {6 models} x {4 graphs} x {1, 2 threads} against the prediction; rank correlation and regret over plans
(the model as given, accelerated, with other orders in its layers) and strategies (--workers 2: over two processes);
peak memory; replay of hot ops against their time in the model; overhead of the profiler.

Medians are compared with a machine file of medians; the fastest run stands beside, and its distance from the median and
the load before and after tell whether anything else was running. Each number of threads can be run on its own.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
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
from stretto.analyze.subject import usable, writable
from stretto.analyze.workload import Workload
from stretto.bench import analysis_plans, machine, report, results
from stretto.bench.analysis_replays import ALLOWED, HIDDEN, HOT, in_processes
from stretto.bench.run import threads as limited
from stretto.compile.choose import MOST_STEPS
from stretto.errors import expect
from stretto.profile.profiling import make as make_profile
from stretto.profile.replay import NEAR
from stretto.tune.timing import measure

MODELS = ("gcn", "sage", "gin", "gat", "sgc", "tag")
GRAPHS = ("cora", "er:8000:40000", "rmat:12:60000", "grid:90")
OURS, STOCK = "accelerated", "as given"  # of the ways to run a step
SAMPLE = 0.05  # seconds of one sample: a fast plan's caches are then its own and not those of the plan before


@dataclass
class Cell:
    """One model on one graph with one number of threads."""

    model: str
    graph: str
    threads: int
    rows: list[dict[str, Any]]  # plan, predicted, measured (median) and fastest seconds

    @property
    def ratio(self) -> float:
        """Predicted over measured, of the stock plan."""
        return self.rows[0]["predicted"] / self.rows[0]["measured"]

    @property
    def regret(self) -> float:
        """How much longer the plan predicted to be fastest takes than the fastest one."""
        chosen = min(self.rows, key=lambda r: r["predicted"])
        return chosen["measured"] / min(r["measured"] for r in self.rows) - 1


@dataclass
class Findings:
    """All that was measured."""

    cells: list[Cell] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)  # model, graph, plan, predicted and allocated bytes
    replays: list[dict[str, Any]] = field(default_factory=list)  # model, graph, plan, op, real and shuffled / in-model
    labels: list[dict[str, Any]] = field(default_factory=list)  # hot ops: is the op bound as it is labelled
    reached: list[dict[str, Any]] = field(default_factory=list)  # hot ops: ceiling over time; above 1 it is too low
    gains: list[dict[str, Any]] = field(default_factory=list)  # model, graph, gain of a step predicted and realised
    overhead: list[float] = field(default_factory=list)
    attributed: list[float] = field(default_factory=list)
    load: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0

    def to_rows(self, workers: int, replayed: bool, device: str) -> list[results.Row]:
        """A row of each cell; what is looked at with one number of threads alone stands in the rows of the least."""
        pairs = list(dict.fromkeys((cell.model, cell.graph) for cell in self.cells))
        least = min((cell.threads for cell in self.cells), default=0)
        rows = []
        for cell in self.cells:
            right, wrong = analysis_plans.order(cell.rows)
            predicted = {row["plan"]: row["predicted"] * 1e3 for row in cell.rows}
            taken = {row["plan"]: row.get("figure", (row["measured"] * 1e3,) * 3) for row in cell.rows}
            more: dict[str, object] = {
                "predicted_ours": predicted.get(OURS), "predicted_stock": predicted.get(STOCK),
                "pairs_in_order": right, "pairs": right + wrong, "regret": cell.regret,
                "ways": len(cell.rows),
                "ways_within_2x": sum(0.5 <= row["predicted"] / row["measured"] <= 2 for row in cell.rows),
            }  # fmt: skip
            if cell.threads == least:
                more |= self._looked_at(cell.model, cell.graph, pairs.index((cell.model, cell.graph)))
            case = {"model": cell.model, "graph": cell.graph, "workers": workers, "replays": replayed}
            command = f"stretto bench analysis --models {cell.model} --graphs {cell.graph}"
            command += f" --threads {cell.threads}" if device == "cpu" else f" --device {device}"
            command += f" --workers {workers}" * (workers > 0) + " --replays 0" * (not replayed)
            rows.append(
                results.row("analysis", case, taken, command=command, threads=cell.threads, device=device,
                            ours=OURS, stock=STOCK, more=more)
            )  # fmt: skip
        return rows

    def _looked_at(self, model: str, graph: str, number: int) -> dict[str, object]:
        """Memory, ceilings, replays, gains and labels of a model on a graph, the `number`-th that was measured."""

        def of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [row for row in rows if (row["model"], row["graph"]) == (model, graph)]

        memory = {row["plan"]: row["predicted"] / row["allocated"] for row in of(self.memory) if row["allocated"]}
        reached, labels = of(self.reached), of(self.labels)
        hot = {plan: [r for r in of(self.replays) if r["plan"] == plan and r["hot"]] for plan in (OURS, STOCK)}
        met = {plan: sum(row["verdict"] == "met" for row in rows) for plan, rows in hot.items()}
        return {
            "memory_ours": memory.get(OURS), "memory_stock": memory.get(STOCK),
            "above_ceiling": sum(row["reached"] > 1.1 for row in reached), "hot_ops": len(reached),
            "attributed": self.attributed[number], "traced": self.overhead[number],
            "replays_met_ours": met[OURS], "replays_ours": len(hot[OURS]),
            "replays_met_stock": met[STOCK], "replays_stock": len(hot[STOCK]),
            "gain_over_predicted": next((row["agreement"] for row in of(self.gains)), None),
            "labels_confirmed": sum(row["fits"] for row in labels), "labels": len(labels),
        }  # fmt: skip


def run_pair(
    found: Findings,
    model: str,
    graph: str,
    data: Any,
    computers: dict[int, Machine],
    *,
    repeats: int,
    budget: float,
    workers: int,
    replays: float,
    processes: int,
) -> None:
    """One model on one graph: every plan and number of threads, then memory and profile."""
    net = make(model, data.x.size(1), HIDDEN, int(data.y.max()) + 1).to(data.x.device)
    workload = Workload(net, data)
    plans = validate.plans(workload)
    for count, computer in computers.items():
        with limited(count):
            for plan in plans.values():
                for _ in range(MOST_STEPS):
                    plan.run()
            ways = plans | (analysis_plans.other_plans(plans["accelerated"]) if "accelerated" in plans else {})
            predicted = {name: step_seconds(plan.trace(), computer) for name, plan in ways.items()}
            timings = measure(
                {name: plan.run for name, plan in ways.items()},
                repeats=repeats, warmup=1, budget=budget * len(ways), sample_seconds=SAMPLE, device=data.x.device,
            )  # fmt: skip
            rows = [
                {"plan": name, "predicted": predicted[name], "measured": t.median, "fastest": t.best,
                 "figure": results.figure(t)}
                for name, t in timings.items()
            ]  # fmt: skip
            if workers > 1 and count == 1:
                rows += analysis_plans.strategies(workload, computer, workers)
            found.cells.append(Cell(model, graph, count, rows))
    with limited(min(computers)):
        for name, plan in plans.items():
            taken = validate.peak_memory(plan)
            row = {"model": model, "graph": graph, "plan": name, "allocated": taken}
            found.memory.append(row | {"predicted": plan.trace().peak_bytes})
        for name, plan in plans.items():
            trace = plan.timed(repeats=3, warmup=1)
            profile = make_profile(plan, trace, computers[min(computers)], model)
            if plan is workload:
                found.overhead.append(trace.traced_seconds / trace.step_seconds)
                found.attributed.append(trace.attributed)
                checked = profile.check_bounds(share=HOT) if replays else []
                found.labels += [{"model": model, "graph": graph} | row for row in checked]
            where = {"model": model, "graph": graph, "plan": name}
            found.reached += [
                {**where, "op": g.name, "phase": g.phase, "shapes": g.shapes, "bound": g.bound, "reached": g.reached}
                for g in profile.hot(HOT)
            ]
        if replays:
            told = in_processes(
                processes, model, graph, computers[min(computers)], min(computers), data.x.device.type, replays
            )
            found.replays += told.replays
            found.gains.append(told.gain)


def command(
    models: Annotated[str, typer.Option(help="Models, separated by commas.")] = ",".join(MODELS),
    graphs: Annotated[str, typer.Option(help="Graphs, separated by commas.")] = ",".join(GRAPHS),
    threads: Annotated[str, typer.Option(help="Numbers of threads; empty: one, and one per core.")] = "",
    repeats: Annotated[int, typer.Option(help="Steps of each plan to time.")] = 7,
    budget: Annotated[float, typer.Option(help="Seconds for the steps of one plan of one model on one graph.")] = 1.0,
    workers: Annotated[int, typer.Option(help="Also partition the step over so many processes; 0: not.")] = 0,
    replays: Annotated[float, typer.Option(help="Seconds to replay the ops beside each model; 0: not.")] = 4.0,
    processes: Annotated[
        int, typer.Option(help="Replay in so many processes; each ratio is their median. More where it is close.")
    ] = 3,
    device: Annotated[str, typer.Option(help="cpu, or cuda: the card instead of numbers of threads.")] = "cpu",
    kept: Annotated[bool, typer.Option(help="Use the machine file of an earlier run instead of probing now.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Put a row of each cell into this file.")] = None,
) -> None:
    """Predicted against measured: step time, order of plans, memory, replay, overhead."""
    out = report.console()
    found = Findings()
    start, before = time.perf_counter(), os.getloadavg()[0]
    names, places = models.split(","), graphs.split(",")
    words = threads.split(",") if threads else ["1", str(machine.cores())]
    expect(all(w.isdigit() and int(w) for w in words), f"bench analysis: '--threads' is {threads!r}, wanted 1 or more")
    expect(workers >= 0, f"bench analysis: '--workers' is {workers}, wanted 0 or more")
    writable(csv, "bench analysis: '--csv'")
    for name in names:  # before the machine is measured
        make(name, 1, 1, 2)
    for graph in places:
        datasets.load_graph(graph)
    computers = {}
    counts = {int(word) for word in words}
    for count in sorted(counts) if device == "cpu" else (torch.get_num_threads(),):
        with limited(count):
            computers[count] = machine_file.get(again=not kept, device=device)
    with report.progress(len(names) * len(places), "analysis") as step:
        for graph in places:
            data = as_data(datasets.load_graph(graph), width=HIDDEN).to(usable(device))
            for model in names:
                run_pair(
                    found, model, graph, data, computers,
                    repeats=repeats, budget=budget, workers=workers, replays=replays, processes=processes,
                )  # fmt: skip
                step(f"{model}, {graph}")
                results.save(csv, found.to_rows(workers, replays > 0, device))  # kept as they come
    found.load, found.seconds = (before, os.getloadavg()[0]), time.perf_counter() - start
    show(out, found)


def show(out: Console, found: Findings) -> None:
    """The cells, then every measure beside its target."""
    table = Table(title="step time, ms", title_justify="left")
    for column in ("model", "graph", "threads", "plan", "predicted", "measured", "fastest", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "graph", "plan") else "right")
    for cell in found.cells:
        for row in cell.rows:
            times = [f"{row[key] * 1e3:.3f}" for key in ("predicted", "measured", "fastest")]
            ratio = f"{row['predicted'] / row['measured']:.2f}"
            table.add_row(cell.model, cell.graph, str(cell.threads), row["plan"], *times, ratio)
    out.print(table)
    for name, (value, target) in summary(found).items():
        out.print(f"{name}: {value} (target {target})", highlight=False)
    out.print(f"{found.seconds:.0f} s; load {found.load[0]:.1f} before, {found.load[1]:.1f} after", highlight=False)
    disturbed = [c for c in found.cells if any(r["measured"] > 1.5 * r["fastest"] for r in c.rows)]
    if disturbed:
        text = f"{len(disturbed)} of {len(found.cells)} cells were disturbed: the median is over 1.5x the fastest run"
        out.print(text, style="yellow", highlight=False)


def _near(ratios: list[float], allowed: float = 0.15) -> str:
    """The share of ratios within the allowed distance of 1, and their median."""
    if not ratios:
        return "-"
    close = sum(1 - allowed <= r <= 1 + allowed for r in ratios)
    return f"{close} of {len(ratios)} within {allowed:.0%}, median {median(ratios):.2f}"


def _replays(rows: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """By plan, the hot ops and all of them."""
    table: dict[str, tuple[str, str]] = {}
    for plan in dict.fromkeys(row["plan"] for row in rows):
        for words, chosen in (
            (f"hot ops ({HOT:.0%} of the time)", [r for r in rows if r["plan"] == plan and r["hot"]]),
            ("all ops", [r for r in rows if r["plan"] == plan]),
        ):
            near = sum(r["ms"] for r in chosen if r["verdict"] == "met") / sum(r["ms"] for r in chosen)
            unsteady = sum(r["verdict"] == "unsteady" for r in chosen)
            text = f"{_near([r['real'] for r in chosen], NEAR)}; they take {near:.1%} of the time of these"
            text += f"; {unsteady} of the others unsteady in the model itself" if unsteady else ""
            table[f"{plan}: replay over in-model time, {words}"] = (text, "0.85 to 1.15")
    return table


def summary(found: Findings) -> dict[str, tuple[str, str]]:
    """Measure -> (value, target)."""
    by_threads: dict[str, tuple[str, str]] = {}
    for count in sorted({cell.threads for cell in found.cells}):
        cells = [cell for cell in found.cells if cell.threads == count]
        rows = [row for cell in cells for row in cell.rows]
        within = sum(0.5 <= cell.ratio <= 2 for cell in cells)
        tau = validate.kendall_tau([r["predicted"] for r in rows], [r["measured"] for r in rows])
        pairs = [analysis_plans.order(cell.rows) for cell in cells]
        taus = [t for t in (analysis_plans.tau(cell.rows) for cell in cells) if t is not None]
        worst = max(cells, key=lambda c: c.regret)
        words = f"{count} thread{'s' if count > 1 else ''}"
        by_threads |= {
            f"{words}: step time predicted within 2x": (f"{within} of {len(cells)} cells", "80%"),
            f"{words}: Kendall tau over plans and strategies of one model on one graph": (
                f"{mean(taus):.2f}, the mean of {len(taus)} cells (least {min(taus):.2f}); "
                f"{sum(right for right, _ in pairs)} of {sum(map(sum, pairs))} pairs in the order predicted"
                if taus
                else "-",
                "0.8",
            ),
            f"{words}: Kendall tau over all rows": (f"{tau:.2f}", "0.8"),
            f"{words}: largest regret of the plan predicted fastest": (
                f"{worst.regret:.0%} ({worst.model}, {worst.graph})",
                "15%",
            ),
        }
    memory = [row["predicted"] / row["allocated"] for row in found.memory if row["allocated"]]
    other = [row["shuffled"] / row["real"] for row in found.replays if row["hot"] and row["shuffled"]]
    differ = sum(abs(r - 1) > 0.15 for r in other)
    return by_threads | {
        "peak memory, predicted over allocated": (_near(memory), "0.85 to 1.15"),
        **_replays(found.replays),
        "replay with shuffled indices differs by over 15%": (f"{differ} of {len(other)} ops with an index", "some"),
        "gain of a step when the advice is applied, realised over predicted": (
            _near([row["agreement"] for row in found.gains if row["agreement"]], ALLOWED),
            "0.8 to 1.2",
        ),
        "hot ops over 10% faster than their ceiling": (
            f"{sum(r['reached'] > 1.1 for r in found.reached)} of {len(found.reached)}",
            "none",
        ),
        "labels that halving an op's rows confirms": (
            f"{sum(row['fits'] for row in found.labels)} of {len(found.labels)}",
            "all",
        ),
        "traced step over plain step, largest": (f"{max(found.overhead, default=0.0):.1f}x", "3x"),
        "least share of a step attributed": (f"{min(found.attributed, default=0.0):.1%}", "95%"),
    }
