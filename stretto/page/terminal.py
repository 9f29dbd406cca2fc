"""Tables and bars on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stretto.page.text import short

Step = Callable[[str], None]
ROOMY = 110  # columns of a terminal: with fewer, reasons would be a column of broken words


def console() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=140)


@contextmanager
def progress(total: int, what: str) -> Iterator[Step]:
    """A bar on standard error, on a terminal only; call what it yields with a word for each unit done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda word: bar.update(task, advance=1, description=f"{what}: {word}")


def cell(value: Any) -> str:
    """A value as a table has it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return short(value) if isinstance(value, float) or value >= 1e4 else str(value)
    return str(value) or "-"


def table(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Table:
    """Rows under their columns; numbers to the right. A name with brackets is no style."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        numeric = all(type(row.get(column)) in (int, float, type(None)) for row in rows)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell(row.get(column))) for column in columns))
    return made
