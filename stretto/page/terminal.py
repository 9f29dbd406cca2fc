"""Tables, sentences and bars on a terminal. Names in them are the user's: a bracket in one is no style."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stretto.page.text import shown

Step = Callable[[str], None]
ROOMY = 110  # columns of a terminal: with fewer, a column of words would fold every one of them


def console() -> Console:
    """Standard output; wide enough for the tables where it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def say(out: Console, *sentences: str, style: str | None = None) -> None:
    """A line for each sentence, as long as it is."""
    for sentence in sentences:
        out.print(sentence, style=style, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def progress(total: int, what: str) -> Iterator[Step]:
    """A bar on standard error, on a terminal only; call what it yields with a word for each unit done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda word: bar.update(task, advance=1, description=f"{what}: {word}")


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
