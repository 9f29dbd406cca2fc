"""What the terminal and the page both show of a report, as tables of plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.analyze.report import Report

FASTEST = 12  # strategies that a terminal shows

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of the report: its title, its name on the page, its columns, and its rows."""

    title: str
    name: str
    columns: Sequence[str]
    rows: Callable[[Report], list[Row]]


def _graph(report: Report) -> list[Row]:
    g = report.graph
    degrees = ", ".join(f"{name} {value:g}" for name, value in g.degree_quantiles.items())
    diameter = "not connected" if g.diameter_at_most is None else f"at most {g.diameter_at_most}"
    edges = f"{g.reuse_distance:g} edge{'s' * (g.reuse_distance != 1)}"
    values = {
        "nodes": f"{g.num_nodes:,}, {g.isolated:,} of them isolated",
        "edges": f"{g.num_edges:,}, {g.self_loops:,} of them self-loops",
        "in-degree": f"{degrees}; mean {g.mean_degree:.3g}",
        "skew": f"{g.skew:.3g} (largest over mean)",
        "density": f"{g.density:.3g}",
        "diameter": f"at least {g.diameter_at_least}, {diameter}",
        "reuse distance of a row": "no row is used twice" if g.reuse_distance == float("inf") else edges,
        "order of the edges": "by destination" if g.sorted_by_destination else "not by destination",
    }
    return [{"of the graph": name, "value": value} for name, value in values.items()]


def _memory(report: Report) -> list[Row]:
    notes = {
        "gradients": "inside the activations: the step makes them",
        "edge tensors made": "in the course of the step, not all at once",
        "activations": "at the highest point of the step",
        "total": "fits" if report.memory["fits"] else f"does not fit into {report.machine.memory / 1e9:.3g} GB",
    }
    return [
        {"memory": name, "bytes": value, "note": notes.get(name, "")}
        for name, value in report.memory.items()
        if name != "fits"
    ]


def _split(report: Report) -> list[Row]:
    words = {"sparse": "ops over edges", "dense": "all others"}
    return [{"work": f"{name}: {words[name]}", **values} for name, values in report.split.items()]


def _parts(report: Report) -> list[Row]:
    return [
        {
            "parts": p.parts,
            "method": p.method,
            "halo rows": sum(p.halo),
            "push rows": sum(p.push),
            "cut edges": p.cut,
            **{f"uneven {what}": ratio for what, ratio in p.imbalance.items()},
        }
        for p in report.partitions
    ]


def _strategies(report: Report) -> list[Row]:
    return [
        {
            **asdict(s),
            "strategy": s.name,
            "ms": s.seconds * 1e3,
            "where": "here" if s.here else "elsewhere",
            "speed-up": report.seconds / max(s.seconds, 1e-12),
        }
        for s in report.strategies
    ]


def _layers(report: Report) -> list[Row]:
    return [
        {
            "layer": c.path or "model",
            "module": c.module,
            "class": c.name,
            "rewrites": ", ".join(c.rewrites),
            "flops": c.flops,
            "best flops": c.best_flops,
            "bytes": c.bytes,
            "best bytes": c.best_bytes,
        }
        for c in report.costs
    ]


def _checks(report: Report) -> list[Row]:
    return [{**row, "predicted / true": row["ratio"]} for row in report.checks]


STRATEGIES = Table(
    "Strategies, fastest first",
    "strategies",
    (
        "strategy",
        "workers",
        "ms",
        "speed-up",
        "bytes",
        "messages",
        "syncs",
        "memory",
        "fits",
        "where",
        "exact",
        "reason",
    ),
    _strategies,
)
LAYERS = Table(
    "Layers",
    "layers",
    ("layer", "module", "class", "flops", "best flops", "bytes", "best bytes", "rewrites"),
    _layers,
)
DETAILS = (
    Table(
        "Work and depth by layer",
        "depths",
        ("layer", "class", "form", "work", "flops", "depth", "steps"),
        lambda report: [row for cost in report.costs for row in cost.rows()],
    ),
    Table("Graph", "graph", ("of the graph", "value"), _graph),
    Table("Memory", "memory", ("memory", "bytes", "note"), _memory),
    Table("Sparse and dense work", "split", ("work", "flops", "bytes"), _split),
    Table(
        "Partitions",
        "parts",
        ("parts", "method", "halo rows", "push rows", "cut edges", "uneven rows", "uneven edges", "uneven halo"),
        _parts,
    ),
)
CHECKS = Table(
    "Predicted, counted, measured",
    "checks",
    ("what", "unit", "predicted", "counted", "measured", "predicted / true", "note"),
    _checks,
)
OPS = Table(
    "Ops",
    "ops",
    ("op", "ms", "new memory ms", "bound", "module", "phase", "shapes", "calls", "flops", "bytes", "W/D"),
    lambda report: report.rows(),
)


def fastest(report: Report) -> list[Row]:
    """Rows of the fastest strategies, of the best of each kind, and of one worker: always there to compare with."""
    rows = STRATEGIES.rows(report)
    kinds: dict[str, Row] = {}
    for row in rows:
        kinds.setdefault(row["name"], row)
    wanted = {id(row) for row in (*rows[:FASTEST], *kinds.values())}
    return [row for row in rows if id(row) in wanted]


def refusal_lines(report: Report) -> list[str]:
    """Strategies that do not apply: the same reason of several P on one line."""
    lines: dict[tuple[str, str], list[int]] = {}
    for r in report.refusals:
        lines.setdefault((r.name, r.reason), []).append(r.workers)
    return [f"{name} on {', '.join(map(str, workers))}: {reason}" for (name, reason), workers in lines.items()]
