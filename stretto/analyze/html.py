"""The two reports as pages: why a step is slow, and whether more hardware would help."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stretto.analyze import facts, peaks
from stretto.analyze.machine_file import Machine
from stretto.analyze.page import card, grid, items, numbers, page, table
from stretto.analyze.svg import COLOURS, bars, duration, lines, roofline, short

if TYPE_CHECKING:
    from stretto.analyze.report import Report
    from stretto.profile.profiling import Profile

TOP = 12
LIMIT = "limit: work / workers"
HOST = "limit: Python of a worker"  # every worker runs the code around all ops
NEAR = 0.2  # of the fastest step: a limit below that would only make the picture flat
# Columns of the sweep: what was measured, of what and where, at which point.
SWEEP = ("op", "candidate", "axis", "speedup", "median_ms", "ci_ms", "shapes", "phase", "site", "reason", "q20_ms",
         "q80_ms", "repeats", "gb_per_s", "gflop_per_s", "width", "dtype", "index", "order", "law", "sparsity",
         "density", "edges", "nodes", "aligned", "direction", "threads", "cache", "compiled", "reduce", "prepared",
         "flops", "bytes", "peak_bytes", "error")  # fmt: skip
LARGE = float(1 << 26)  # bytes that no cache near a core holds


def _roofs(machine: Machine) -> tuple[float, dict[str, float]]:
    """The ceilings that no op exceeds: flop/s, and byte/s by where the bytes come from."""
    return peaks.flop_rate(machine), {
        "from a cache": peaks.stream_rate(machine, 0.0),
        "from memory": peaks.stream_rate(machine, LARGE),
        "random rows of 256 bytes": peaks.gather_rate(machine, 256, LARGE),
    }


def _threads(machine: Machine) -> str:
    return f"{machine.threads} thread{'s' if machine.threads != 1 else ''}"


def _short_op(name: str, shapes: str) -> str:
    return f"{name.partition('::')[2]} [{shapes}]" if shapes else name.partition("::")[2]


def _on_roofline(ops: list[dict[str, Any]]) -> dict[str, Any]:
    """Points and moves of a roofline. ops: op, shapes, flops, bytes, seconds, bound, share."""
    timed = [op for op in ops if op["seconds"] > 0 and op["bytes"] > 0]
    return {
        "points": [
            (
                _short_op(o["op"], o["shapes"]),
                o["flops"] / o["bytes"],
                o["flops"] / o["seconds"],
                o["bound"],
                o["share"],
            )
            for o in timed
            if o["flops"] > 0
        ],
        "moves": [
            (_short_op(o["op"], o["shapes"]), o["bytes"] / o["seconds"], o["bound"], o["share"])
            for o in timed
            if not o["flops"] > 0
        ],
    }


def analysis_page(report: Report) -> str:
    """The page of stretto.analyze."""
    rows = report.rows()
    g = report.graph
    peak, widths = _roofs(report.machine)
    total = sum(row["ms"] for row in rows) or 1.0
    plotted = _on_roofline([{**r, "seconds": r["ms"] / 1e3, "share": r["ms"] / total} for r in rows])
    by_layer: dict[str, float] = {}
    for row in rows:
        by_layer[row["module"] or "model"] = by_layer.get(row["module"] or "model", 0.0) + row["ms"]
    parts = [
        numbers(
            {
                "predicted step": duration(report.seconds),
                "work": f"{short(report.work)}flop",
                "compulsory traffic": f"{short(report.bytes)}B",
                "depth": f"{report.depth.steps:.0f} steps",
                "parallelism": short(report.parallelism),
                "dependent kernels": f"{report.depth.launches} of {report.trace.launches}",
                "memory": f"{short(report.memory['total'])}B, {'fits' if report.memory['fits'] else 'does not fit'}",
            }
        ),
        card("In words", items(report.explain().splitlines())),
        grid(
            [
                card(
                    "Roofline, predicted",
                    roofline(peak=peak, bandwidths=widths, label="roofline of the ops", **plotted),
                ),
                card(
                    "Predicted time by op",
                    bars(
                        [(_short_op(r["op"], r["shapes"]), r["ms"], COLOURS[r["bound"]]) for r in rows[:TOP]],
                        "time by op",
                        "ms",
                    ),
                ),
                card(
                    "Predicted time by layer",
                    bars(
                        [(k, v, "c1") for k, v in sorted(by_layer.items(), key=lambda i: -i[1])[:TOP]],
                        "time by layer",
                        "ms",
                    ),
                ),
                card(
                    "Work and traffic by plan",
                    bars(_plans(report), "work by plan", "flop", log=True)
                    + bars(_traffic_of_plans(report), "traffic by plan", "B", log=True),
                ),
                card(
                    "Scaling",
                    lines(_scaling(report), "step time against workers", "workers", "ms a step", limits=[LIMIT, HOST]),
                ),
                card("Communication by strategy", bars(_traffic(report), "bytes by strategy", "B", log=True)),
            ]
        ),
        card(
            "Strategies, fastest first",
            table(
                "strategies",
                [facts.strategy_row(s, report.seconds) for s in report.strategies],
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
            ),
        ),
        card("Strategies that do not apply", items(facts.refusal_lines(report))),
        card(
            "Layers",
            table(
                "layers",
                [facts.layer_row(c) for c in report.costs],
                (
                    "layer",
                    "module",
                    "class",
                    "published row",
                    "found by",
                    "flops",
                    "best flops",
                    "bytes",
                    "best bytes",
                    "rewrites",
                ),
            ),
        ),
        *_facts(report),
        card(
            "Forms of parallelism",
            table(
                "forms",
                [{**asdict(f), "W/D": f.parallelism} for f in report.forms],
                ("level", "form", "available", "degree", "W/D", "reason"),
            ),
        ),
        card(
            "Staleness plan (stretto.dist)",
            table(
                "staleness",
                [facts.staleness_row(plan) for plan in report.staleness],
                ("workers", "setting", "stale reads", "expected age", "amplification by layer", "bound"),
            ),
        ),
        card(
            "Published bound and what runs",
            table(
                "bounds",
                report.inconsistencies,
                ("key", "where", "published bound", "as implemented", "published", "implemented", "reason"),
            ),
        ),
        card(
            "Partitions",
            table(
                "parts",
                [facts.part_row(p) for p in report.partitions],
                (
                    "parts",
                    "method",
                    "halo rows",
                    "push rows",
                    "cut edges",
                    "uneven rows",
                    "uneven edges",
                    "uneven halo",
                ),
            ),
        ),
        card(
            "Predicted, counted, measured",
            table("checks", report.checks, ("what", "unit", "predicted", "counted", "measured", "ratio", "note"))
            if report.checks
            else "<p>call validate() to run and compare</p>",
        ),
        card(
            "Ops",
            table("ops", rows, ("op", "ms", "bound", "module", "phase", "shapes", "calls", "flops", "bytes", "W/D")),
        ),
    ]
    subtitle = (
        f"{g.num_nodes:,} nodes, {g.num_edges:,} edges, largest degree {g.max_degree:,}; {report.mode}; "
        f"{report.machine.name}, {_threads(report.machine)}. {report.verdict()}."
    )
    return page(f"Would more hardware help? {report.model}", subtitle, parts)


def _facts(report: Report) -> list[str]:
    """Cards of work and depth by layer, bounds, graph and memory."""
    forms = [row for c in report.costs for row in c.rows()]
    brent = ("workers", "T_P at least", "T_P at most", "speed-up at least", "speed-up at most")
    return [
        card("Work and depth by layer", table("depths", forms, ("layer", "class", "form", "work", "flops", "depth",
                                                                "steps"))),
        card("Brent's bounds, in flops of one processor", table("brent", facts.brent_rows(report), brent)),
        card("Graph", table("graph", facts.graph_rows(report), ("of the graph", "value"))),
        card("Memory", table("memory", facts.memory_rows(report), ("memory", "bytes", "note"))),
        card("Sparse and dense work", table("split", facts.split_rows(report), ("work", "flops", "bytes"))),
    ]  # fmt: skip


def _plans(report: Report) -> list[tuple[str, float, str]]:
    known: list[Any] = [c.published.get("work here", 0.0) for c in report.costs]
    return [
        ("published bound", float(sum(known)), "c5"),
        ("as it runs", sum(c.flops for c in report.costs), "c1"),
        ("best re-association", sum(c.best_flops for c in report.costs), "c2"),
    ]


def _traffic_of_plans(report: Report) -> list[tuple[str, float, str]]:
    return [
        ("as it runs", sum(c.bytes for c in report.costs), "c1"),
        ("best re-association", sum(c.best_bytes for c in report.costs), "c2"),
    ]


def _scaling(report: Report) -> dict[str, list[tuple[float, float]]]:
    one = report.seconds * 1e3
    found: dict[str, list[tuple[float, float]]] = {}
    for s in report.strategies:
        if s.workers > 1:
            found.setdefault(s.name, [(1.0, one)]).append((float(s.workers), s.seconds * 1e3))
    host = 0.0 if report.problem is None else report.problem.around * 1e3
    if host > NEAR * min((ms for points in found.values() for _, ms in points), default=math.inf):
        found[HOST] = [(b["workers"], host) for b in report.brent]
    found[LIMIT] = [(b["workers"], one * b["at least"] / max(report.work, 1.0)) for b in report.brent]
    return found


def _traffic(report: Report) -> list[tuple[str, float, str]]:
    most = max((s.workers for s in report.strategies), default=1)
    return [
        (f"{s.name}, {s.workers} workers", s.bytes, "c3" if s.exact else "c4")
        for s in report.strategies
        if s.workers == most
    ]


def profile_page(profile: Profile) -> str:
    """The page of stretto.profile."""
    trace, found = profile.trace, profile.to_dict()
    peak, widths = _roofs(profile.machine)
    groups = found["groups"]
    plotted = _on_roofline([{**g, "seconds": g["ms"] / 1e3} for g in groups])
    hot = profile.hot()
    saved = [r for r in profile.advice if r["saves_ms"] > 0]
    charts = [
        card("Roofline, measured", roofline(peak=peak, bandwidths=widths, label="roofline of the ops", **plotted)),
        card(
            "Time by op",
            bars(
                [(_short_op(g.name, g.shapes), g.seconds * 1e3, COLOURS.get(g.bound, "c5")) for g in hot[:TOP]],
                "time by op",
                "ms",
            ),
        ),
        card(
            "Time by layer",
            bars(
                [(k or "outside layers", v * 1e3, "c1") for k, v in list(found["layers"].items())[:TOP]],
                "time by layer",
                "ms",
            ),
        ),
    ]
    if saved:
        charts.append(
            card(
                "Speed-up by site",
                bars([(_advised(r), r["speedup"][0], "c2") for r in saved], "speed-up", "x"),
            )
        )
    plans = facts.plan_bars(profile.advice)
    if plans:
        charts.append(card("Speed-up by plan, over stock", bars(plans, "speed-up by plan", "x")))
    if profile.applied.get("applied"):
        gain = [
            ("predicted", profile.applied["predicted_ms"], "c5"),
            ("realised", profile.applied["realised_ms"], "c2"),
        ]
        charts.append(card("Gain of the step", bars(gain, "gain", "ms")))
    advice = [f"{facts.advice_line(r)}." for r in profile.advice]
    if profile.applied:
        done = "Applied: " if profile.applied["applied"] else ""
        advice.append(f"{done}{profile.applied['reason']}.")
    parts = [
        numbers(
            {
                "a step": duration(trace.step_seconds),
                "kernels": str(trace.launches),
                "attributed": f"{trace.attributed:.1%}",
                "inside ops": f"{trace.in_ops:.0%}",
                "hot groups": f"{len(hot)} of {len(groups)}",
                "work": f"{short(float(trace.flops))}flop",
                "peak memory": f"{short(float(trace.peak_bytes))}B",
            }
        ),
        grid(charts),
        card("Advice", items(advice) if advice else "<p>call recommend() for advice</p>"),
        card(
            "Ops",
            table(
                "ops",
                [{**g, "modules": ", ".join(m or "model" for m in g["modules"])} for g in groups],
                (
                    "op",
                    "ms",
                    "share",
                    "bound",
                    "attainable",
                    "phase",
                    "shapes",
                    "modules",
                    "calls",
                    "flops",
                    "bytes",
                    "dtypes",
                    "strides",
                ),
            ),
        ),
        card(
            "Replay with real and shuffled indices",
            table(
                "replays",
                [_replay(r) for r in profile.replays],
                ("op", "phase", "shapes", "in model ms", "real ms", "ratio", "itself", "shuffled ms", "shuffled ratio"),
            ),
        ),
        card(
            "Sweep",
            table("sweep", [_swept(row) for row in profile.sweeps], SWEEP),
        ),
    ]
    subtitle = ". ".join([f"{found['mode']}; {profile.machine.name}, {_threads(profile.machine)}", *profile.remarks])
    return page(f"Why is it slow? {profile.model}", subtitle, parts)


def _advised(row: dict[str, Any]) -> str:
    op = f", {row['now'].partition('::')[2]}" if row["kind"] == "op" else ""
    return f"{row['site']}{op}: {row['best']}"


def _swept(row: dict[str, Any]) -> dict[str, Any]:
    ends = row.get("ci_ms")
    return {**row, "ci_ms": tuple(ends) if ends else None, "speedup": row.get("speedup", (None,))[0]}


def _replay(row: dict[str, Any]) -> dict[str, Any]:
    real, other = row["real indices"], row.get("shuffled indices", {})
    shuffled = {"shuffled ms": other.get("median_ms"), "shuffled ratio": other.get("ratio")}
    return {**row, "real ms": real["median_ms"], **shuffled}
