"""What a sweep says of single ops: who wins at the op's own point, and what to run at each call site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.profile.sweep import TIE

if TYPE_CHECKING:
    from stretto.profile.profiling import Profile

KEY = ("op", "phase", "shapes", "layout")  # of a swept op


def op_advice(profile: Profile) -> list[dict[str, Any]]:
    """The winner of each swept op at its own point, and whether another order of the index would pay."""
    rows: list[dict[str, Any]] = []
    sweeps = profile.sweeps
    for key in dict.fromkeys(tuple(r[k] for k in KEY) for r in sweeps):
        mine = [r for r in sweeps if tuple(r[k] for k in KEY) == key]
        base = [r for r in mine if r["axis"] == "base" and "median_ms" in r]
        if not base:
            continue
        best, native = min(base, key=lambda r: r["median_ms"]), base[0]["native"]
        row = {"site": best["site"], "kind": "op", "now": best["op"], "best": best["candidate"], "saves_ms": 0.0}
        row |= {name: best[name] for name in KEY[1:]}  # a module may run several of one name
        rows.append(row | {"reorder": _reorder(mine, best), "winners": _by_order(mine)})
        if "speedup" not in best:  # nothing to compare with
            rows[-1] |= {"advice": "nothing to gain", "reason": f"{native}, which runs, was not timed"}
            continue
        times, low, high = best["speedup"]
        better = low > TIE
        took = sum(g.seconds for g in profile.groups if (g.name, g.phase, g.shapes, g.layout) == key)
        said = f"{best['candidate']}: {times:.2f}x ({low:.2f}-{high:.2f}) the speed of {native}, which runs"
        said = f"{native}, which runs, is the fastest" if best["candidate"] == native else said + verdict(low, high)
        part = best["edges"]
        rows[-1] |= {
            "advice": f"use {best['candidate']}" if better else "nothing to gain",
            "speedup": (times, low, high),
            "saves_ms": took * 1e3 * (1 - 1 / times) if better else 0.0,
            "reason": said + (f" (on {part:.1%} of its rows)" if part < 1 else ""),
        }
    return rows


def winner(rows: list[dict[str, Any]]) -> str:
    """The fastest candidate; all those whose interval overlaps with its own, where the clock cannot tell them apart."""
    ordered = sorted(rows, key=lambda r: r["median_ms"])
    equal = [r["candidate"] for r in ordered if r["ci_ms"][0] <= ordered[0]["ci_ms"][1]]
    return equal[0] if len(equal) == 1 else "tie: " + ", ".join(sorted(equal))


def _by_order(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Order of the index -> the fastest candidate there."""
    timed = [r for r in rows if r["axis"] in ("base", "order") and "median_ms" in r]
    return {
        order: winner([r for r in timed if r["order"] == order]) for order in dict.fromkeys(r["order"] for r in timed)
    }


def _reorder(rows: list[dict[str, Any]], best: dict[str, Any]) -> str:
    other = [r for r in rows if r["axis"] == "order" and r["candidate"] == best["candidate"] and "median_ms" in r]
    if not other:
        return "not measured"
    first = min(other, key=lambda r: r["median_ms"])
    gain = best["median_ms"] / first["median_ms"]
    return f"{first['order']}: {gain:.2f}x" if gain > TIE else "no"


def dispatch_table(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Call site -> what to run there, from a sweep; a tie is called one, since another run may decide otherwise."""
    result: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["axis"] == "base" and "median_ms" in row:
            result.setdefault(f"{row['op']} [{row['shapes']}] {row['phase']}", []).append(row)
    return {site: winner(timed) for site, timed in result.items()}


def verdict(low: float, high: float) -> str:
    """What an interval of a ratio says, in words that follow it; "" for a gain."""
    if low > TIE:
        return ""
    return ": slower" if high < 1 else ": a tie" if low <= 1 else ": too little to count"
