"""What the pictures of a page have in common: bars that add up to a whole, names that fit, ops on a roofline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stretto.machine import ceilings
from stretto.machine.file import Machine
from stretto.page.svg import COLOURS, roofline

Bar = tuple[str, float, str]  # name, value, colour

TOP = 12
BOUNDS = {colour: bound for bound, colour in COLOURS.items()}
LONGEST = 46  # letters of a name that fit in any case
LARGE = float(1 << 26)  # bytes that no cache near a core holds


def longest(rows: Sequence[Bar], whole: float, rest: str) -> list[Bar]:
    """The first bars, all others as one, and what is left of the whole: together as long as it."""
    others, left = rows[TOP:], whole - sum(value for _, value, _ in rows)
    more = [(f"{len(others)} others", sum(value for _, value, _ in others), "c5")] if others else []
    return [*rows[:TOP], *more, *([(rest, left, "c5")] if left > 0 else [])]


def by_place(values: Iterable[tuple[str, float]], whole: float, rest: str) -> list[Bar]:
    """One bar for each place, the longest first; values of one place add up."""
    total: dict[str, float] = {}
    for place, value in values:
        total[place] = total.get(place, 0.0) + value
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return longest([(shortened(place), value, "c1") for place, value in ordered], whole, rest)


def shortened(path: str) -> str:
    """A module's path, without its middle where it is long: paths differ at their ends."""
    return path if len(path) <= LONGEST else f"{path[: LONGEST // 2]}…{path[-LONGEST // 2 :]}"


def short_op(name: str, shapes: str) -> str:
    """aten::mm of 5x6, 6x7 -> mm [5x6, 6x7]."""
    return f"{name.partition('::')[2]} [{shapes}]" if shapes else name.partition("::")[2]


def on_roofline(ops: Iterable[dict[str, Any]], machine: Machine) -> str:
    """The picture of ops below a machine's ceilings. ops: op, shapes, flops, bytes, seconds, bound, share."""
    timed = [(short_op(op["op"], op["shapes"]), op) for op in ops if op["seconds"] > 0 and op["bytes"] > 0]
    points = [
        (name, op["flops"] / op["bytes"], op["flops"] / op["seconds"], op["bound"], op["share"])
        for name, op in timed
        if op["flops"] > 0
    ]
    moves = [(name, op["bytes"] / op["seconds"], op["bound"], op["share"]) for name, op in timed if op["flops"] <= 0]
    rates = {
        "from a cache": ceilings.stream_rate(machine, 0.0),
        "from memory": ceilings.stream_rate(machine, LARGE),
        "random rows of 256 bytes": ceilings.gather_rate(machine, 256, LARGE),
    }
    return roofline(points, ceilings.flop_rate(machine), rates, "roofline of the ops", moves)


def threads(machine: Machine) -> str:
    """How many threads the machine was measured with."""
    return f"{machine.threads} thread{'s' if machine.threads != 1 else ''}"
