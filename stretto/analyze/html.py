"""The two reports as pages: why a step is slow, and whether more hardware would help."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any

from stretto.analyze import charts, facts, peaks
from stretto.analyze.captions import told
from stretto.analyze.charts import BOUNDS, HOST, LIMIT, TOP
from stretto.analyze.machine_file import Machine
from stretto.analyze.page import card, grid, items, numbers, page, table
from stretto.analyze.svg import bars, duration, lines, roofline, short

if TYPE_CHECKING:
    from stretto.analyze.report import Report
    from stretto.profile.profiling import Profile

TOP_PLANNED = 4  # layers whose plans are drawn
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


OPS = ("op", "ms", "new memory ms", "bound", "module", "phase", "shapes", "calls", "flops", "bytes", "W/D")


def analysis_page(report: Report) -> str:
    """The page of stretto.analyze."""
    rows = report.rows()
    g = report.graph
    peak, widths = _roofs(report.machine)
    total = sum(row["ms"] for row in rows) or 1.0
    plotted = charts.on_roofline([{**r, "seconds": r["ms"] / 1e3, "share": r["ms"] / total} for r in rows])
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
                told(
                    "Roofline, predicted",
                    roofline(peak=peak, bandwidths=widths, label="roofline of the ops", **plotted),
                ),
                told(
                    "Predicted time by op", bars(charts.ops_predicted(report, rows), "time by op", "ms", legend=BOUNDS)
                ),
                told("Predicted time by layer", bars(charts.layers_predicted(report, rows), "time by layer", "ms")),
                told(
                    "Work and traffic by plan",
                    bars(charts.plans(report), "work by plan", "flop", log=True)
                    + bars(charts.traffic_of_plans(report), "traffic by plan", "B", log=True),
                ),
                told(
                    "Scaling",
                    lines(
                        charts.scaling(report),
                        "step time against workers",
                        "workers",
                        "ms a step",
                        limits=[LIMIT, HOST],
                    ),
                ),
                told(
                    "Communication by strategy",
                    bars(charts.traffic(report), "bytes by strategy", "B", log=True, legend=charts.EXACT),
                ),
            ]
        ),
        told(
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
        told(
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
        told(
            "Forms of parallelism",
            table(
                "forms",
                [{**asdict(f), "W/D": f.parallelism} for f in report.forms],
                ("level", "form", "available", "degree", "W/D", "reason"),
            ),
        ),
        told(
            "Staleness plan (stretto.dist)",
            table(
                "staleness",
                [facts.staleness_row(plan) for plan in report.staleness],
                ("workers", "setting", "stale reads", "expected age", "amplification by layer", "bound"),
            ),
        ),
        told(
            "Published bound and what runs",
            table(
                "bounds",
                report.inconsistencies,
                ("key", "where", "published bound", "as implemented", "published", "implemented", "reason"),
            ),
        ),
        told(
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
        told(
            "Predicted, counted, measured",
            table("checks", report.checks, ("what", "unit", "predicted", "counted", "measured", "ratio", "note"))
            if report.checks
            else "<p>call validate() to run and compare</p>",
        ),
        told(
            "Ops",
            table("ops", rows, OPS),
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
        told("Work and depth by layer", table("depths", forms, ("layer", "class", "form", "work", "flops", "depth",
                                                                "steps"))),
        told("Brent's bounds, in flops of one processor", table("brent", facts.brent_rows(report), brent)),
        told("Graph", table("graph", facts.graph_rows(report), ("of the graph", "value"))),
        told("Memory", table("memory", facts.memory_rows(report), ("memory", "bytes", "note"))),
        told("Sparse and dense work", table("split", facts.split_rows(report), ("work", "flops", "bytes"))),
    ]  # fmt: skip


def profile_page(profile: Profile) -> str:
    """The page of stretto.profile."""
    trace, found = profile.trace, profile.to_dict()
    peak, widths = _roofs(profile.machine)
    groups = found["groups"]
    plotted = charts.on_roofline([{**g, "seconds": g["ms"] / 1e3} for g in groups])
    hot = profile.hot()
    pictures = [
        told("Roofline, measured", roofline(peak=peak, bandwidths=widths, label="roofline of the ops", **plotted)),
        told("Time by op", bars(charts.ops_timed(profile), "time by op", "ms", legend=BOUNDS)),
        told("Time by layer", bars(charts.layers_timed(profile), "time by layer", "ms")),
    ]
    ordered = charts.largest_first(profile.advice)
    saved = [row for row in ordered if row["saves_ms"] > 0]
    if saved:
        shown = [(charts.advised(r), r["speedup"][0], "c2") for r in saved[:TOP]]
        pictures.append(told("Speed-up by site", bars(shown, "speed-up", "x") + _more(len(saved) - TOP)))
    planned = [row for row in ordered if row.get("plans")]
    plans = facts.plan_bars(planned[:TOP_PLANNED])
    if plans:
        drawn = bars(plans, "speed-up by plan", "x", legend=facts.PLANS)
        drawn += _note(facts.plans_alike(planned[:TOP_PLANNED])) + _more(len(planned) - TOP_PLANNED)
        pictures.append(told("Speed-up by plan, over stock", drawn))
    if profile.applied.get("applied"):
        gain = [
            ("predicted", profile.applied["predicted_ms"], "c5"),
            ("realised", profile.applied["realised_ms"], "c2"),
        ]
        pictures.append(told("Gain of the step", bars(gain, "gain", "ms")))
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
                f"groups take {profile.share:.0%}": f"{len(hot)} of {len(groups)}",
                "work": f"{short(float(trace.flops))}flop",
                "peak memory": f"{short(float(trace.peak_bytes))}B",
            }
        ),
        grid(pictures),
        card("Advice", items(advice) if advice else "<p>call recommend() for advice</p>"),
        told(
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
        told(
            "Replay with real and shuffled indices",
            table(
                "replays",
                [_replay(r) for r in profile.replays],
                ("op", "phase", "shapes", "in model ms", "real ms", "ratio", "itself", "shuffled ms", "shuffled ratio"),
            ),
        ),
        told(
            "Sweep",
            table("sweep", [_swept(row) for row in profile.sweeps], SWEEP),
        ),
    ]
    subtitle = ". ".join([f"{found['mode']}; {profile.machine.name}, {_threads(profile.machine)}", *profile.remarks])
    return page(f"Why is it slow? {profile.model}", subtitle, parts)


def _note(text: str) -> str:
    return f'<p class="dim caption">{escape(text)}</p>' if text else ""


def _more(count: int) -> str:
    return _note(f"{count} more, which save less, are in the advice." if count > 0 else "")


def _swept(row: dict[str, Any]) -> dict[str, Any]:
    ends = row.get("ci_ms")
    return {**row, "ci_ms": tuple(ends) if ends else None, "speedup": row.get("speedup", (None,))[0]}


def _replay(row: dict[str, Any]) -> dict[str, Any]:
    real, other = row["real indices"], row.get("shuffled indices", {})
    shuffled = {"shuffled ms": other.get("median_ms"), "shuffled ratio": other.get("ratio")}
    return {**row, "real ms": real["median_ms"], **shuffled}
