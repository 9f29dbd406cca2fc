"""The analysis on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.analyze import tables
from stretto.analyze.report import Report
from stretto.errors import StrettoError
from stretto.page.terminal import ROOMY, cell, table
from stretto.page.text import short

WIDE = 44  # characters of a formula


def show(out: Console, report: Report) -> None:
    """Words first, then what they are made of."""
    out.print(report.explain(), soft_wrap=True, highlight=False, markup=False)
    for what in (tables.GRAPH, tables.MEMORY, tables.SPLIT, tables.DEPTHS, tables.BRENT, tables.PARTS):
        out.print(table(what.on_terminal, [_short(row) for row in what.rows(report)], what.heads))
    _strategies(out, report)
    if report.checks:
        out.print(table(tables.CHECKS.on_terminal, tables.CHECKS.rows(report), tables.CHECKS.heads))


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Long formulas are cut: the page and the JSON have them whole."""
    cut = {k: v[: WIDE - 1] + "…" for k, v in row.items() if k in ("work", "depth") and len(str(v)) > WIDE}
    return {**row, **cut}


def _strategies(out: Console, report: Report) -> None:
    chosen = tables.shown(report)
    left = len(report.strategies) - len(chosen)
    title = "strategies, fastest first" + (f"; {left} slower ones of the same kinds are in the JSON" if left else "")
    wide = out.width >= ROOMY
    made = Table(title=title, title_justify="left")
    for column in ("strategy", "workers", "ms", "bytes", *(("messages", "syncs") if wide else ()), "memory"):
        made.add_column(column, justify="left" if column == "strategy" else "right")
    for column in ("fits", "where", *(("why",) if wide else ())):
        made.add_column(column)
    for s in chosen:
        counted = (str(s.messages), str(s.syncs)) if wide else ()
        cells = (short(s.seconds * 1e3), short(s.bytes), *counted, short(s.memory), cell(s.fits), tables.place(s))
        made.add_row(s.name, str(s.workers), *cells, *((s.reason,) if wide else ()))
    out.print(made)
    if not wide:
        reasons = [f"{s.name} on {s.workers}: {s.reason}" for s in chosen]
        out.print("Why:\n  " + "\n  ".join(reasons), soft_wrap=True, highlight=False, markup=False)
    lines = tables.refusal_lines(report)
    if lines:
        out.print("Not applicable:\n  " + "\n  ".join(lines), soft_wrap=True, highlight=False, markup=False)


def show_schemes(out: Console, report: Report) -> None:
    """Work of an epoch by training scheme, counted from real batches."""
    try:
        rows = report.schemes()
    except StrettoError as error:
        out.print(str(error), style="yellow", highlight=False, soft_wrap=True, markup=False)
        return
    first = rows[0]
    shown = [
        {
            "scheme": row["name"],
            **row,
            "of full batch": f"{row['flops'] / first['flops']:.2f}",
        }
        for row in rows
    ]
    heads = ("scheme", "batches", "nodes", "edges", "flops", "of full batch")
    out.print(table("an epoch by training scheme", shown, heads))
