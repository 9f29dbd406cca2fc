"""What the terminal and the page both show of a report, as rows of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stretto.analyze.svg import duration

if TYPE_CHECKING:
    from stretto.analyze.report import Report
    from stretto.analyze.strategy import Strategy

MOST = 12  # of the fastest strategies


def graph_rows(report: Report) -> list[dict[str, Any]]:
    """Statistics of the graph, one a row."""
    g = report.graph
    degrees = ", ".join(f"{name} {value:g}" for name, value in g.degree_quantiles.items())
    most = "not connected" if g.diameter_at_most is None else f"at most {g.diameter_at_most}"
    far = (
        "no row is used twice"
        if g.reuse_distance == float("inf")
        else f"{g.reuse_distance:g} edge{'s' * (g.reuse_distance != 1)}"
    )
    return [
        {"of the graph": name, "value": value}
        for name, value in {
            "nodes": f"{g.num_nodes:,}, {g.isolated:,} of them isolated",
            "edges": f"{g.num_edges:,}, {g.self_loops:,} of them self-loops",
            "in-degree": f"{degrees}; mean {g.mean_degree:.3g}",
            "skew": f"{g.skew:.3g} (largest over mean)",
            "density": f"{g.density:.3g}",
            "diameter": f"at least {g.diameter_at_least}, {most}",
            "reuse distance of a row": far,
            "order of the edges": "by destination" if g.sorted_by_destination else "not by destination",
        }.items()
    ]


def memory_rows(report: Report) -> list[dict[str, Any]]:
    """What memory is taken by, in bytes."""
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


def split_rows(report: Report) -> list[dict[str, Any]]:
    """Sparse and dense work."""
    said = {"sparse": "ops over edges", "dense": "all others"}
    return [{"work": f"{name}: {said[name]}", **values} for name, values in report.split.items()]


def brent_rows(report: Report) -> list[dict[str, Any]]:
    """max(W / P, D) <= T_P <= W / P + D."""
    names = {"T_P at least": "at least", "T_P at most": "at most", "speed-up at least": "speedup at least",
             "speed-up at most": "speedup at most"}  # fmt: skip
    return [{"workers": int(b["workers"]), **{n: b[key] for n, key in names.items()}} for b in report.brent]


def place(strategy: Strategy) -> str:
    """Where it can run."""
    return "here" if strategy.here else "elsewhere"


def shown(report: Report) -> list[Strategy]:
    """The fastest strategies, the best of each kind, and one worker: always there to compare with."""
    kinds: dict[str, Strategy] = {}
    for s in report.strategies:
        kinds.setdefault(s.name, s)
    wanted = {id(s) for s in (*report.strategies[:MOST], *kinds.values())}
    return [s for s in report.strategies if id(s) in wanted]


def refusal_lines(report: Report) -> list[str]:
    """Strategies that do not apply: the same reason of several P on one line."""
    found: dict[tuple[str, str], list[int]] = {}
    for r in report.refusals:
        reason = r.reason.replace(f"{r.workers} workers", "so many workers").replace(f"to {r.workers} ", "to so many ")
        found.setdefault((r.name, reason), []).append(r.workers)
    return [f"{name} on {', '.join(map(str, workers))}: {reason}" for (name, reason), workers in found.items()]


def strategy_row(s: Any, one: float) -> dict[str, Any]:
    """As the page shows it. one: seconds of a step on one worker."""
    shown = {"strategy": s.name, "ms": s.seconds * 1e3, "exact": "yes" if s.exact else "no"}
    return {**s.to_dict(), **shown, "where": place(s), "speed-up": one / max(s.seconds, 1e-12)}


def layer_row(c: Any) -> dict[str, Any]:
    """Work of a layer as it runs and at best."""
    return {
        "layer": c.path or "model",
        "module": c.module,
        "class": c.name,
        "published row": c.published.get("row", "-"),
        "found by": c.published.get("found by", "no row has this class and type"),
        "rewrites": ", ".join(c.rewrites),
        "flops": c.flops,
        "best flops": c.best_flops,
        "bytes": c.bytes,
        "best bytes": c.best_bytes,
    }


def staleness_row(plan: Any) -> dict[str, Any]:
    """What is not synchronous, and what it may cost."""
    raised = [f"{name} = {value}" for name, value in plan.setting.vector().items() if value != int(name[0] == "L")]
    factors = ", ".join(f"{c:.3g}" for c in plan.amplification) or plan.reason
    shown = {"setting": ", ".join(raised), "amplification by layer": factors}
    return {**plan.to_dict(), **shown}


def part_row(p: Any) -> dict[str, Any]:
    """A partition."""
    return {
        "parts": p.parts,
        "method": p.method,
        "halo rows": sum(p.halo),
        "push rows": sum(p.push),
        "cut edges": p.cut,
        "uneven rows": p.imbalance["rows"],
        "uneven edges": p.imbalance["edges"],
        "uneven halo": p.imbalance["halo"],
    }


def advice_line(row: dict[str, Any]) -> str:
    """What to do at a call site, what it is predicted to save, and why."""
    gain = f", saves {duration(row['saves_ms'] / 1e3)} a step" if row["saves_ms"] > 0 else ""
    where = " of it" if row.get("in_step") else " alone"
    if gain and row.get("share"):  # alone a layer may find less free memory than in a step, and take longer
        gain = f", saves {row['share']:.0%} of a step ({duration(row['saves_ms'] / 1e3)}{where})"
    order = row.get("reorder", "")
    order = "" if order in ("", "no", "not measured") else f"; with its index {order}"
    which = f" [{row['shapes']}] {row['phase']}" if "shapes" in row else ""  # of an op
    return f"{row['site']}, {row['now']}{which}: {row['advice']}{gain}; {row['reason']}{order}"


MOST_PLANS = 4  # of a layer
ALIKE = "predicted to be as the one that runs"  # how a plan is known of which there is no more to tell
PLANS = {"c2": "the plan that runs", "c5": "another plan"}


def plan_bars(advice: Sequence[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """(name, speed-up over stock, colour) of layers' plans: the one that runs, then the best of the others."""
    found = []
    for row in advice:
        known = [p for p in row.get("plans", ()) if p["speedup"] is not None]
        ordered = sorted(known, key=lambda p: (not p["runs"], -p["speedup"]))
        for p in ordered[:MOST_PLANS]:
            said = f"{row['site']}: {p['plan']}" if p["runs"] else f"{row['site']}, {p['by']}: {p['plan']}"
            found.append((said, p["speedup"], "c2" if p["runs"] else "c5"))
    return found


def plans_alike(advice: Sequence[dict[str, Any]]) -> str:
    """Plans without a bar, which would be that of the one that runs as if both were measured; "" where none is."""
    found = [(row["site"], [p["plan"] for p in row.get("plans", ()) if p["by"] == ALIKE]) for row in advice]
    told = [f"{site}: {', '.join(names)}" for site, names in found if names]
    return f"Not measured, and {ALIKE}: {'; '.join(told)}." if told else ""
