"""Numbers as people read them, and as JSON takes them."""

from __future__ import annotations

import math
from typing import Any

FULL = 0.9995  # of a unit: what three digits round up to one


def short(value: float) -> str:
    """1234567 -> 1.23M."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "∞" if value > 0 else "-∞"
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= FULL * limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """0.0123 -> 12.3 ms, 1.76 -> 1.76 s."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= FULL * limit:
            return f"{short(seconds / limit)} {unit}"
    return short(seconds) if math.isnan(seconds) else f"{short(seconds * 1e6)} us"


def with_unit(value: float, unit: str) -> str:
    """1230000, "B" -> 1.23MB; 3.4, "ms" -> 3.4 ms; 3400, "ms" -> 3.4 s."""
    if unit == "ms":
        return duration(value * 1e-3)
    return f"{short(value)}{unit}" if unit in ("B", "x", "flop") else f"{short(value)} {unit}".strip()


SHARES = ("share", "attainable")  # columns that are shown in per cent


def shown(value: Any, column: str = "") -> str:
    """A value as a table has it, on a page and on a terminal; "" where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1%}" if column in SHARES else short(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 1e6 else short(value)
    if isinstance(value, tuple):  # from, to
        return "\u00a0to\u00a0".join(map(short, value))
    return str(value)


def finite(value: Any) -> Any:
    """The value with null for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value
