"""Who waits for whom inside a step: the four schedules {sync, async} micro x {sync, async} macro (Besta and Hoefler,
figure 14). A schedule never changes a result; how old the rows may be is what Staleness says.

micro  the stages of one layer. sync: no part starts its neural op before all parts have finished their graph op.
       async: a part goes on as soon as its own graph op is done.
macro  one layer after the other. sync: a part starts a layer's graph op when all rows it needs from others have come.
       async: it starts as soon as its own non-linearity is done: interior rows, which need no others, are aggregated
       while the rows for the boundary are under way. With both async their neural op runs in that time too.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import expect

WAYS = ("sync", "async")


@dataclass(frozen=True)
class Schedule:
    """micro, macro: "sync" or "async". The default waits for rows, and for nothing else."""

    micro: str = "async"
    macro: str = "sync"

    def __post_init__(self) -> None:
        for name, way in (("micro", self.micro), ("macro", self.macro)):
            expect(way in WAYS, f"Schedule: '{name}' is {way!r}, wanted 'sync' or 'async'")


SCHEDULES: dict[str, Schedule] = {
    f"{micro} micro, {macro} macro": Schedule(micro, macro) for micro in WAYS for macro in WAYS
}
