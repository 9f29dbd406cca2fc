"""What the terminal and the page both say of advice and of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.page.text import duration


def advice_line(row: dict[str, Any]) -> str:
    """What to do at a call site, what it is predicted to save, and why."""
    gain = f", saves {duration(row['saves_ms'] / 1e3)} a step" if row["saves_ms"] > 0 else ""
    where = " of it" if row.get("in_step") else " alone"
    if gain and row.get("share"):  # alone a layer may find less free memory than in a step, and take longer
        gain = f", saves {row['share']:.0%} of a step ({duration(row['saves_ms'] / 1e3)}{where})"
    return f"{row['site']}, {row['now']}: {row['advice']}{gain}; {row['reason']}"


MOST_PLANS = 4  # of a layer
ALIKE = "predicted to be as the one that runs"  # how a plan is known of which there is no more to tell
PLANS = {"c2": "the plan that runs", "c5": "another plan"}


def plan_bars(advice: Sequence[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """(name, speed-up over stock, colour) of layers' plans: the one that runs, then the best of the others."""
    result = []
    for row in advice:
        known = [p for p in row.get("plans", ()) if p["speedup"] is not None]
        ordered = sorted(known, key=lambda p: (not p["runs"], -p["speedup"]))
        for p in ordered[:MOST_PLANS]:
            said = f"{row['site']}: {p['plan']}" if p["runs"] else f"{row['site']}, {p['by']}: {p['plan']}"
            result.append((said, p["speedup"], "c2" if p["runs"] else "c5"))
    return result


def plans_alike(advice: Sequence[dict[str, Any]]) -> str:
    """Plans without a bar, which would be that of the one that runs as if both were measured; "" where none is."""
    result = [(row["site"], [p["plan"] for p in row.get("plans", ()) if p["by"] == ALIKE]) for row in advice]
    told = [f"{site}: {', '.join(names)}" for site, names in result if names]
    return f"Not measured, and {ALIKE}: {'; '.join(told)}." if told else ""


REPLAY = "Replay with real and shuffled indices"
REPLAYS = ("op", "phase", "shapes", "in model ms", "real ms", "ratio", "shuffled ms", "shuffled ratio")


def replay_rows(replays: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a replay told, under REPLAYS."""
    rows = []
    for row in replays:
        real, other = row["real indices"], row.get("shuffled indices", {})
        shuffled = {"shuffled ms": other.get("median_ms"), "shuffled ratio": other.get("ratio")}
        rows.append({**row, "real ms": real["median_ms"], **shuffled})
    return rows
