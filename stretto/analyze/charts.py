"""What the charts of the two pages show: rows, points and lines with their names and colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stretto.analyze.svg import COLOURS

if TYPE_CHECKING:
    from stretto.analyze.report import Report
    from stretto.profile.profiling import Profile

Bar = tuple[str, float, str]  # name, value, colour

TOP = 12
BOUNDS = {colour: bound for bound, colour in COLOURS.items()}
LIMIT = "limit: work / workers, or depth"
HOST = "limit: Python of a worker"  # every worker runs the code around all ops
NEAR = 0.2  # of the fastest step: a limit below that would only make the picture flat


def longest(rows: Sequence[Bar], whole: float, rest: str) -> list[Bar]:
    """The first bars, all others as one, and what is left of the whole: together as long as it."""
    others, left = rows[TOP:], whole - sum(value for _, value, _ in rows)
    more = [(f"{len(others)} others", sum(value for _, value, _ in others), "c5")] if others else []
    return [*rows[:TOP], *more, *([(rest, left, "c5")] if left > 0 else [])]


def ops_predicted(report: Report, rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Predicted milliseconds by op."""
    found = [(short_op(r["op"], r["shapes"]), r["ms"], COLOURS[r["bound"]]) for r in rows]
    return longest(found, report.seconds * 1e3, "views")


def layers_predicted(report: Report, rows: Sequence[dict[str, Any]]) -> list[Bar]:
    """Predicted milliseconds by layer."""
    found: dict[str, float] = {}
    for row in rows:
        found[row["module"] or "model"] = found.get(row["module"] or "model", 0.0) + row["ms"]
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return longest([(shortened(name), ms, "c1") for name, ms in ordered], report.seconds * 1e3, "views")


def ops_timed(profile: Profile) -> list[Bar]:
    """Milliseconds by op. Views are in no group."""
    found = [(short_op(g.name, g.shapes), g.seconds * 1e3, COLOURS.get(g.bound, "c5")) for g in profile.groups]
    return longest(found, profile.trace.step_seconds * 1e3, "views, and between the ops: Python, autograd")


def layers_timed(profile: Profile) -> list[Bar]:
    """Milliseconds by layer inside ops. What lies between is told as one: a tracer makes it several times longer."""
    found: dict[str, float] = {}
    for op in profile.trace:
        found[op.path or "outside layers"] = found.get(op.path or "outside layers", 0.0) + op.seconds * 1e3
    ordered = sorted(found.items(), key=lambda item: -item[1])
    whole = profile.trace.step_seconds * 1e3
    return longest([(shortened(name), ms, "c1") for name, ms in ordered], whole, "between the ops: Python, autograd")


LONGEST = 46  # letters of a name that fit in any case


def shortened(path: str) -> str:
    """A module's path, without its middle where it is long: paths differ at their ends."""
    return path if len(path) <= LONGEST else f"{path[: LONGEST // 2]}…{path[-LONGEST // 2 :]}"


def short_op(name: str, shapes: str) -> str:
    """aten::mm of 5x6, 6x7 -> mm [5x6, 6x7]."""
    return f"{name.partition('::')[2]} [{shapes}]" if shapes else name.partition("::")[2]


def on_roofline(ops: list[dict[str, Any]]) -> dict[str, Any]:
    """Points and moves of a roofline. ops: op, shapes, flops, bytes, seconds, bound, share."""
    timed = [op for op in ops if op["seconds"] > 0 and op["bytes"] > 0]
    return {
        "points": [
            (
                short_op(o["op"], o["shapes"]),
                o["flops"] / o["bytes"],
                o["flops"] / o["seconds"],
                o["bound"],
                o["share"],
            )
            for o in timed
            if o["flops"] > 0
        ],
        "moves": [
            (short_op(o["op"], o["shapes"]), o["bytes"] / o["seconds"], o["bound"], o["share"])
            for o in timed
            if not o["flops"] > 0
        ],
    }


def plans(report: Report) -> list[Bar]:
    """Flops of all layers."""
    known: list[Any] = [c.published.get("work here", 0.0) for c in report.costs]
    return [
        ("published bound", float(sum(known)), "c5"),
        ("as it runs", sum(c.flops for c in report.costs), "c1"),
        ("best re-association", sum(c.best_flops for c in report.costs), "c2"),
    ]


def traffic_of_plans(report: Report) -> list[Bar]:
    return [
        ("as it runs", sum(c.bytes for c in report.costs), "c1"),
        ("best re-association", sum(c.best_bytes for c in report.costs), "c2"),
    ]


def scaling(report: Report) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds a step against workers, by strategy, with what none can be faster than; nothing for one worker."""
    if len(report.brent) < 2:
        return {}
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


EXACT = {"c3": "exact", "c4": "stale rows or estimates"}


def traffic(report: Report) -> list[Bar]:
    """Bytes by strategy, with the most workers there are."""
    most = max((s.workers for s in report.strategies), default=1)
    return [
        (f"{s.name}, {s.workers} workers", s.bytes, "c3" if s.exact else "c4")
        for s in report.strategies
        if s.workers == most
    ]


def largest_first(advice: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Advice in the order of what it saves."""
    return sorted(advice, key=lambda row: -row["saves_ms"])


def advised(row: dict[str, Any]) -> str:
    """A call site and what is best there."""
    op = f", {row['now'].partition('::')[2]} {row['phase']}" if row["kind"] == "op" else ""
    return f"{row['site']}{op}: {row['best']}"
