"""The profile on a terminal. Names of modules, scripts and ops are the user's: a bracket in one is no style."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.page.terminal import ROOMY, cell
from stretto.page.text import duration, short
from stretto.profile.profiling import Group, Profile
from stretto.profile.words import advice_line


def show(out: Console, profile: Profile, share: float) -> None:
    """The hot ops on a terminal."""
    t = profile.trace
    out.print(
        f"{profile.model}: {duration(t.step_seconds)} a step, {t.launches} kernels, {t.attributed:.1%} attributed "
        f"({t.in_ops:.0%} inside ops), traced at {t.traced_seconds / t.step_seconds:.1f}x",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    for remark in profile.remarks:
        out.print(remark, soft_wrap=True, highlight=False, markup=False)
    hot = profile.hot(share)
    title = f"{len(hot)} of {len(profile.groups)} groups take {share:.0%} of the time inside ops"
    out.print(_hot(title, hot, out.width >= ROOMY))
    if t.unknown:
        out.print(f"no formula for: {', '.join(t.unknown)}", style="yellow", highlight=False, markup=False)


def _hot(title: str, hot: list[Group], wide: bool) -> Table:
    """Shapes and places below the name where it is narrow: a column for each would fold every one of them."""
    table = Table(title=title, title_justify="left")
    for column in ("op", "phase", "shapes", "where") if wide else ("op, shapes, where",):
        table.add_column(column, overflow="fold")
    for column in (*(("calls",) if wide else ()), "ms", "share", "bound", "attainable"):
        table.add_column(column, justify="right", no_wrap=True)
    for g in hot:
        calls = f" x{len(g.ops)}" if len(g.ops) > 1 else ""
        shapes = f"\n  {g.shapes}" if g.shapes else ""
        narrow = f"{_short_name(g.name)}{calls}{shapes}\n  {g.phase}, {_where(g)}"
        bound = g.bound if wide else g.bound.removeprefix("gather ")
        numbers = (f"{g.seconds * 1e3:.3f}", f"{g.share:.1%}", bound, f"{g.attainable:.0%}")
        words = (g.name, g.phase, g.shapes, _where(g)) if wide else (narrow,)
        _add(table, words, (str(len(g.ops)), *numbers) if wide else numbers)
    return table


def _replays(rows: list[dict[str, Any]], wide: bool) -> Table:
    """A column for each value; where it is narrow, phase and shapes below the name and ratios below the times."""
    table = Table(title="replay, ms", title_justify="left")
    for column in ("op", "phase", "shapes") if wide else ("op, shapes",):
        table.add_column(column, overflow="fold")
    sides = ("real indices", "ratio", "shuffled", "ratio") if wide else ("real,\nratio", "shuffled,\nratio")
    for column in ("in the\nmodel", *sides):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shapes = f"\n  {row['shapes']}" if row["shapes"] else ""
        narrow = f"{_short_name(row['op'])}{shapes}\n  {row['phase']}"
        taken = [row["real indices"], row.get("shuffled indices", {"median_ms": None, "ratio": None})]
        pairs = [(cell(side["median_ms"]), cell(side["ratio"])) for side in taken]
        cells = [text for pair in pairs for text in pair] if wide else ["\n".join(pair) for pair in pairs]
        words = (row["op"], row["phase"], row["shapes"]) if wide else (narrow,)
        _add(table, words, (short(row["in model ms"]), *cells))
    return table


def _add(table: Table, words: tuple[str, ...], numbers: tuple[str, ...]) -> None:
    table.add_row(*map(Text, (*words, *numbers)))


def _where(group: Group) -> str:
    return ", ".join(p or "model" for p in group.paths)


def _short_name(op: str) -> str:
    """Without the namespace that nearly all have."""
    return op.removeprefix("aten::")


def show_advice(out: Console, profile: Profile) -> None:
    """What to change, by call site."""
    for row in profile.advice:
        out.print(advice_line(row), soft_wrap=True, highlight=False, markup=False)


def show_replay(out: Console, profile: Profile) -> None:
    """In the model, alone, and alone with shuffled indices; ratios are to the time in the model."""
    out.print(_replays(profile.replays, out.width >= ROOMY))


def show_applied(out: Console, profile: Profile) -> None:
    """The realised gain beside the sum predicted."""
    done = profile.applied
    out.print(done["reason"], highlight=False, soft_wrap=True, markup=False)
    if done["applied"]:
        realised, predicted = (duration(done[key] / 1e3) for key in ("realised_ms", "predicted_ms"))
        out.print(f"realised gain {realised} a step, predicted {predicted}", highlight=False)
