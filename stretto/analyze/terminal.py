"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.analyze import facts
from stretto.analyze.report import Report
from stretto.analyze.svg import short
from stretto.errors import StrettoError

WIDE = 44  # characters of a formula
ROOMY = 110  # columns of a terminal: with fewer, reasons would be a column of broken words


def _cell(value: Any) -> str:
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
        made.add_row(*(Text(_cell(row.get(column))) for column in columns))
    return made


def show(out: Console, report: Report) -> None:
    """Words first, then what they are made of."""
    out.print(report.explain(), soft_wrap=True, highlight=False, markup=False)
    out.print(table("graph", facts.graph_rows(report), ("of the graph", "value")))
    out.print(table("memory", facts.memory_rows(report), ("memory", "bytes", "note")))
    out.print(table("sparse and dense", facts.split_rows(report), ("work", "flops", "bytes")))
    layers = [_short(row) for cost in report.costs for row in cost.rows()]
    columns: tuple[str, ...] = ("layer", "class", "form", "work", "flops", "depth", "steps")
    out.print(table("work and depth by layer", layers, columns))
    columns = ("workers", "T_P at least", "T_P at most", "speed-up at least", "speed-up at most")
    out.print(table("Brent's bounds, in flops of one processor", facts.brent_rows(report), columns))
    forms = [{**form.to_dict(), "W/D": form.parallelism} for form in report.forms]
    out.print(table("forms of parallelism", forms, ("level", "form", "available", "degree", "W/D")))
    columns = ("parts", "method", "halo rows", "push rows", "cut edges", "uneven rows", "uneven edges", "uneven halo")
    out.print(table("partitions", [facts.part_row(p) for p in report.partitions], columns))
    _strategies(out, report)
    columns = ("key", "where", "published bound", "as implemented", "published", "implemented")
    rows = [{k: _readable(v) for k, v in row.items()} for row in report.inconsistencies]
    out.print(table("published bound and what runs", rows, columns))
    if report.checks:
        columns = ("what", "unit", "predicted", "counted", "measured", "predicted / true", "note")
        checks = [{**row, "predicted / true": row["ratio"]} for row in report.checks]
        out.print(table("predicted, counted, measured", checks, columns))


def _readable(value: Any) -> Any:
    return value.replace("**", "^").replace("*", " ") if isinstance(value, str) else value


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Long formulas are cut: the page and the JSON have them whole."""
    cut = {k: v[: WIDE - 1] + "…" for k, v in row.items() if isinstance(v, str) and len(v) > WIDE}
    return {**row, **cut}


def _strategies(out: Console, report: Report) -> None:
    chosen = facts.shown(report)
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
        cells = (short(s.seconds * 1e3), short(s.bytes), *counted, short(s.memory), _cell(s.fits), facts.place(s))
        made.add_row(s.name, str(s.workers), *cells, *((s.reason,) if wide else ()))
    out.print(made)
    if not wide:
        reasons = [f"{s.name} on {s.workers}: {s.reason}" for s in chosen]
        out.print("Why:\n  " + "\n  ".join(reasons), soft_wrap=True, highlight=False, markup=False)
    lines = facts.refusal_lines(report)
    if lines:
        out.print("Not applicable:\n  " + "\n  ".join(lines), soft_wrap=True, highlight=False, markup=False)


def show_schemes(out: Console, report: Report) -> None:
    """Work of an epoch by training scheme, counted from real batches."""
    try:
        rows = report.schemes()
    except StrettoError as error:
        out.print(str(error), style="yellow", highlight=False, soft_wrap=True, markup=False)
        return
    made = Table(title="an epoch by training scheme", title_justify="left")
    for column in ("scheme", "batches", "nodes", "edges", "flops", "of full batch", "bound", "of full batch "):
        made.add_column(column, justify="left" if column == "scheme" else "right")
    for row in rows:
        shares = (f"{row['flops'] / rows[0]['flops']:.2f}", f"{row['published'] / rows[0]['published']:.2f}")
        made.add_row(row["name"], str(row["batches"]), short(row["nodes"]), short(row["edges"]), short(row["flops"]),
                     shares[0], short(row["published"]), shares[1])  # fmt: skip
    out.print(made)
