"""Hot ops over every axis, within a budget: every site's own point first, then a point of each axis, of the hottest.

What follows an op's name in a row: the axis that was moved, the candidate, the point, and what was measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from stretto.errors import expect
from stretto.machine import facts as machine
from stretto.profile.axes import DTYPES, Point, points
from stretto.profile.contest import REPEATS, Pace, empty_row, forget_buffer
from stretto.profile.row_sites import RowSite, row_sites
from stretto.profile.sparse_sites import SparseSite, sparse_sites

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

TIE = 1.05  # a winner leads by more than this, at the lower end of its interval
COMPILING = 15.0  # seconds that torch.compile may take: with less left it is not begun
CALLS = 66  # of an op at one point at least: half a dozen candidates, checked, warmed up and timed a few times
FEWEST = 512  # rows that are not cut any further
TICKS = 0.2  # seconds between two words about the time left
SKIPPED = "none"  # the axis of a row that says why an op was not swept

Site = RowSite | SparseSite


def sites(profile: Profile, share: float) -> tuple[list[Site], list[tuple[Group, str]]]:
    """The hot ops that have candidates, the slowest first; and those that have none, with the reason."""
    result: list[Site] = []
    left: list[tuple[Group, str]] = []
    for find in (row_sites, sparse_sites):
        some, others = find(profile, share)
        result += some
        left += others
    known = {id(s.group) for s in result} | {id(group) for group, _ in left}
    left += [(g, f"no candidates for the family {g.family!r}") for g in profile.hot(share) if id(g) not in known]
    return sorted(result, key=lambda s: -s.group.seconds), left


def cut(seconds: float, size: int, a_part: float) -> int:
    """Of an op that takes so long on `size` rows: the part of them, a power of two, that a point has time for."""
    times = 1
    while seconds / times * CALLS > a_part and size // times > FEWEST:
        times *= 2
    return times


def schedule(queues: list[tuple[Site, list[Point]]], axes: list[list[str]]) -> Iterator[tuple[Site, Point, int]]:
    """(site, point, how many points are still promised): what to run, in this order, for as long as there is time.

    Every site's own point; one point of every axis, of the hottest site that has it; that of the others; then what is
    left, in turns. queues: points of each site, the hottest first: its own, one for each of its `axes`, then others.
    """
    own = [(site, cells[0]) for site, cells in queues if cells]
    first: list[tuple[Site, Point]] = []
    second: list[list[tuple[Site, Point]]] = []
    seen: set[str] = set()
    for (site, cells), names in zip(queues, axes, strict=True):
        pairs = list(zip(names, cells[1:], strict=False))
        first += [(site, cell) for name, cell in pairs if name not in seen]
        second.append([(site, cell) for name, cell in pairs if name in seen])
        seen.update(names)
    promised = [*own, *first]
    for done, (site, cell) in enumerate(promised):
        yield site, cell, len(promised) - done
    details = [[(s, c) for c in cells[1 + len(n) :]] for (s, cells), n in zip(queues, axes, strict=True)]
    for rounds in (second, details):
        for turn in zip_longest(*rounds):
            yield from ((*pair, 1) for pair in turn if pair is not None)


def sweep(
    profile: Profile,
    *,
    budget: float = 60.0,
    share: float = 0.9,
    repeats: int = REPEATS,
    progress: Callable[[str, float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    rows: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Rows of every point and candidate of the hot ops, until the budget (seconds by the clock) is spent.

    They are added to `rows`, where that is given, as they come.

    progress(what, seconds left) is called before each point and now and then within it. An op without candidates has
    one row that says why.
    """
    fine = isinstance(budget, (int, float)) and budget > 0
    expect(fine, f"sweep: 'budget' is {budget!r}, wanted more than 0 seconds")
    end = clock() + budget
    result, left_out = sites(profile, share)
    cores, device = machine.cores(), profile.workload.device.type
    start = Point(width=1, threads=torch.get_num_threads(), device=device)
    queues: list[tuple[Site, list[Point]]] = []
    axes: list[list[str]] = []
    bases: dict[int, Point] = {}
    a_part = budget / max(1, len(result) + len({axis for site in result for axis in site.axes}))
    for site in result:
        slowest = max(profile.trace.ops[i].seconds for i in site.group.ops)
        part = 1 / cut(slowest, site.size, a_part)
        base = bases[id(site)] = replace(start, width=site.width, dtype=_word(site.group), edges=part)
        cells = [p for p in points(base, cores) if p.moved(base) in site.axes]
        queues.append((site, cells))
        axes.append(list(dict.fromkeys(p.moved(base) for p in cells[1:])))
    rows = [] if rows is None else rows
    try:
        for site, point, promised in schedule(queues, axes) if queues else ():
            left = end - clock()
            if left <= 0:
                break
            axis = point.moved(bases[id(site)])
            if point.compiled and left < COMPILING:
                reason = "compiling may take longer than what is left of the budget"
                rows.append(
                    {**_label(site.group, axis), **empty_row(site.group.family, "torch.compile", point, reason)}
                )
                continue
            tick = _teller(progress, f"{site.group.name}, {axis}", end, clock)
            pace = Pace(repeats, left / promised, min(left, 2 * left / promised), tick)
            # Who is not to be had is told once.
            told = [row for row in site.run(point, pace) if axis == "base" or not row.get("missing")]
            rows += [{**_label(site.group, axis), **row} for row in told]
    finally:
        forget_buffer()
    for group, reason in left_out:
        row = empty_row(group.family, "", replace(start, dtype=_word(group)), reason)
        rows.append({**_label(group, SKIPPED), **row})
    return rows


def _teller(
    progress: Callable[[str, float], None] | None, what: str, end: float, clock: Callable[[], float]
) -> Callable[[], None] | None:
    """Says at once, and when called again some time later, what is being done and how much time is left."""
    if progress is None:
        return None
    last = float("-inf")

    def tell() -> None:
        nonlocal last
        now = clock()
        if now - last >= TICKS and end > now:
            last = now
            progress(what, end - now)

    tell()
    return tell


def _label(group: Group, axis: str) -> dict[str, Any]:
    where = {"site": ", ".join(path or "model" for path in group.paths), "layout": group.layout}
    return {"op": group.name, "phase": group.phase, "shapes": group.shapes, **where, "axis": axis}


def _word(group: Group) -> str:
    words = {str(dtype).removeprefix("torch."): word for word, dtype in DTYPES.items()}
    return next((words[d] for d in group.dtypes.split(", ") if d in words), "f32")
