"""The analysis on a terminal."""

from __future__ import annotations

from rich.console import Console

from stretto.analyze import tables
from stretto.analyze.report import Report
from stretto.errors import StrettoError
from stretto.page.terminal import say, show

WIDE = 44  # characters of a formula
SHOWN = ("strategy", "workers", "ms", "bytes", "messages", "syncs", "memory", "fits", "where", "reason")


def show_analysis(out: Console, report: Report) -> None:
    """Words first, then what they are made of."""
    say(out, report.explain())
    for table in tables.DETAILS:
        show(out, table.title, [_short(row) for row in table.rows(report)], table.columns)
    rows = tables.fastest(report)
    left = len(report.strategies) - len(rows)
    title = tables.STRATEGIES.title + (f"; {left} slower ones of the same kinds are in the JSON" if left else "")
    show(out, title, rows, SHOWN, below=("reason",), roomy=("messages", "syncs"))
    refusals = tables.refusal_lines(report)
    if refusals:
        say(out, "Not applicable:\n  " + "\n  ".join(refusals))
    if report.checks:
        show(out, tables.CHECKS.title, tables.CHECKS.rows(report), tables.CHECKS.columns)


def _short(row: tables.Row) -> tables.Row:
    """Long formulas are cut: the page and the JSON have them whole."""
    cut = {k: v[: WIDE - 1] + "…" for k, v in row.items() if k in ("work", "depth") and len(str(v)) > WIDE}
    return {**row, **cut}


def show_schemes(out: Console, report: Report) -> None:
    """Work of an epoch by training scheme, counted from real batches."""
    try:
        rows = report.schemes()
    except StrettoError as error:
        say(out, str(error), style="yellow")
        return
    rows = [row | {"scheme": row["name"], "of full batch": row["flops"] / rows[0]["flops"]} for row in rows]
    show(out, "An epoch by training scheme", rows, ("scheme", "batches", "nodes", "edges", "flops", "of full batch"))
