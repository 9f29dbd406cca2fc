"""Tables and sentences on a terminal. Names in them are the user's: a bracket in one is no style."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.page.text import shown

ROOMY = 110  # columns of a terminal: with fewer, a column of words would fold every one of them


def console() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def say(out: Console, *sentences: str, style: str | None = None) -> None:
    """A line for each sentence, as long as it is."""
    for sentence in sentences:
        out.print(sentence, style=style, soft_wrap=True, highlight=False, markup=False)


def show(
    out: Console,
    title: str,
    rows: Sequence[dict[str, Any]],
    columns: Sequence[str],
    *,
    below: Sequence[str] = (),
    roomy: Sequence[str] = (),
) -> None:
    """Rows under their columns, numbers to the right. On a narrow terminal the columns `below` stand under the first
    one's value, and those in `roomy` are left out."""
    narrow = out.width < ROOMY
    below = below if narrow else ()
    columns = [c for c in columns if c not in below and not (narrow and c in roomy)]
    made = Table(title=title, title_justify="left")
    for column in columns:
        numeric = all(type(row.get(column)) in (int, float, type(None)) for row in rows)
        name = column.replace(" ", "\n") if numeric else column
        made.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    for row in rows:
        first, *others = (shown(row.get(column), column) or "-" for column in columns)
        more = [value for column in below if (value := shown(row.get(column), column))]
        first = first.removeprefix("aten::") if narrow else first  # the namespace that nearly all ops have
        made.add_row(*(Text(value) for value in ("\n  ".join([first, *more]), *others)))
    out.print(made)
