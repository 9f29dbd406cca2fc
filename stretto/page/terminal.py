"""Tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.page.text import short

ROOMY = 110  # columns of a terminal: with fewer, reasons would be a column of broken words


def console() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=140)


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
