"""The page of stretto.analyze, which answers whether more hardware would help."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stretto.analyze import tables
from stretto.page.captions import told
from stretto.page.charts import BOUNDS, Bar, by_place, longest, on_roofline, short_op, threads
from stretto.page.frame import card, grid, items, numbers, page, table
from stretto.page.svg import COLOURS, bars, lines
from stretto.page.text import duration, short

if TYPE_CHECKING:
    from stretto.analyze.report import Report

LIMIT = "limit: work / workers, or depth"
HOST = "limit: Python of a worker"  # every worker runs the code around all ops
NEAR = 0.2  # of the fastest step: a limit below that would only make the picture flat
EXACT = {"c3": "exact", "c4": "stale rows or estimates"}


def analysis_page(report: Report) -> str:
    """The whole page."""
    g, memory = report.graph, report.memory
    facts = {
        "predicted step": duration(report.seconds),
        "work": f"{short(report.work)}flop",
        "compulsory traffic": f"{short(report.bytes)}B",
        "depth": f"{report.depth.steps:.0f} steps",
        "parallelism": short(report.parallelism),
        "dependent kernels": f"{report.depth.launches} of {report.trace.launches}",
        "memory": f"{short(memory['total'])}B, {'fits' if memory['fits'] else 'does not fit'}",
    }
    subtitle = (
        f"{g.num_nodes:,} nodes, {g.num_edges:,} edges, largest degree {g.max_degree:,}; {report.mode}; "
        f"{report.machine.name}, {threads(report.machine)}. {report.verdict()}."
    )
    parts = [
        numbers(facts),
        card("In words", items(report.explain().splitlines())),
        grid(_pictures(report)),
        _table(report, tables.STRATEGIES),
        card("Strategies that do not apply", items(tables.refusal_lines(report))),
        *(_table(report, one) for one in (tables.LAYERS, *tables.DETAILS)),
        _table(report, tables.CHECKS, "<p>call validate() to run and compare</p>"),
        _table(report, tables.OPS),
    ]
    return page(f"Would more hardware help? {report.model}", subtitle, parts)


def _table(report: Report, what: tables.Table, instead: str = "") -> str:
    rows = what.rows(report)
    return told(what.title, table(what.name, rows, what.columns) if rows or not instead else instead)


def _pictures(report: Report) -> list[str]:
    rows = report.rows()
    total = sum(row["ms"] for row in rows) or 1.0
    timed = [{**row, "seconds": row["ms"] / 1e3, "share": row["ms"] / total} for row in rows]
    maximum = max((s.workers for s in report.strategies), default=1)
    sent = [
        (f"{s.name}, {s.workers} workers", s.bytes, "c3" if s.exact else "c4")
        for s in report.strategies
        if s.workers == maximum
    ]
    return [
        told("Roofline, predicted", on_roofline(timed, report.machine)),
        told("Predicted time by op", bars(by_op(report), "time by op", "ms", legend=BOUNDS)),
        told("Predicted time by layer", bars(by_layer(report), "time by layer", "ms")),
        told(
            "Work and traffic by plan",
            bars(_work(report), "work by plan", "flop", log=True)
            + bars(_traffic(report), "traffic by plan", "B", log=True),
        ),
        told(
            "Scaling",
            lines(scaling(report), "step time against workers", "workers", "ms a step", limits=[LIMIT, HOST]),
        ),
        told("Communication by strategy", bars(sent, "bytes by strategy", "B", log=True, legend=EXACT)),
    ]


def by_op(report: Report) -> list[Bar]:
    """Predicted milliseconds by op."""
    rows = [(short_op(r["op"], r["shapes"]), r["ms"], COLOURS[r["bound"]]) for r in report.rows()]
    return longest(rows, report.seconds * 1e3, "views")


def by_layer(report: Report) -> list[Bar]:
    """Predicted milliseconds by layer."""
    return by_place(((r["module"] or "model", r["ms"]) for r in report.rows()), report.seconds * 1e3, "views")


def _work(report: Report) -> list[Bar]:
    return [
        ("as it runs", sum(c.flops for c in report.costs), "c1"),
        ("best re-association", sum(c.best_flops for c in report.costs), "c2"),
    ]


def _traffic(report: Report) -> list[Bar]:
    return [
        ("as it runs", sum(c.bytes for c in report.costs), "c1"),
        ("best re-association", sum(c.best_bytes for c in report.costs), "c2"),
    ]


def scaling(report: Report) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds a step against workers, by strategy, with what none can be faster than; nothing for one worker."""
    workers = [float(part.parts) for part in report.partitions]
    if len(workers) < 2:
        return {}
    one = report.seconds * 1e3
    series: dict[str, list[tuple[float, float]]] = {}
    for s in report.strategies:
        if s.workers > 1:
            series.setdefault(s.name, [(1.0, one)]).append((float(s.workers), s.seconds * 1e3))
    host = report.problem.around * 1e3
    if host > NEAR * min((ms for points in series.values() for _, ms in points), default=math.inf):
        series[HOST] = [(p, host) for p in workers]
    series[LIMIT] = [(p, one * max(1 / p, 1 / max(report.parallelism, 1.0))) for p in workers]
    return series
