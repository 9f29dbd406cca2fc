"""Tables of the docs, made from the rows in benchmarks/results: `make tables`, or `python -m benchmarks.tables`.

A page says where a table stands and which rows it takes, and everything between is written here:

    <!-- table: models machine=AMD -->
    <!-- end -->

A word `column=value` keeps the rows that have this value; of `machine`, those that contain it. With --check nothing is
written, and the exit status is the number of pages that differ from their rows.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cells
from benchmarks.suites import results
from benchmarks.suites.results import Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACES = re.compile(r"(<!-- table: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """The suite whose rows it takes, the names of its columns, and its lines, of the rows that were asked for."""

    suite: str
    header: tuple[str, ...]
    lines: Callable[[list[Row]], Iterable[Sequence[str]]]


def plain(suite: str, **columns: Callable[[Row], str]) -> Table:
    """A line for every row. columns: name, with _ for a space -> what it says of a row."""
    header = tuple(name.replace("_", " ") for name in columns)
    return Table(suite, header, lambda rows: ([column(row) for column in columns.values()] for row in rows))


def several(suite: str, lines: Callable[[list[Row]], Iterable[Sequence[str]]], *header: str) -> Table:
    """Lines that are made of several rows, or of some."""
    return Table(suite, header, lines)


TABLES = {
    "foundation": plain(
        "foundation",
        measure=lambda row: row["measure"],
        ours_ms=cells.ours,
        measured=lambda row: row["measured"],
        interval=lambda row: row["interval"],
        reading_alone=lambda row: row["reading_alone"],
        wanted=lambda row: row["wanted"] if row["met"] == "yes" else f"**{row['wanted']}**",
    ),
    "models": plain(
        "models",
        model=cells.words("model", "widths"),
        graph=cells.words("graph"),
        ours_ms=cells.ours,
        over_stock_edge_index=cells.ratio("ratio"),
        over_best_stock=cells.named_ratio,
        over_torch_compile=cells.over("stock torch.compile ms"),
        memory_stock_over_ours=cells.quotient("stock_mib", "ours_mib"),
    ),
    "layers": plain(
        "layers",
        layer=cells.words("layer", "widths"),
        graph=cells.words("graph"),
        stock_ms=cells.stock,
        ours_ms=cells.ours,
        ratio=cells.ratio("ratio"),
        memory_stock_over_ours=cells.quotient("stock_mib", "ours_mib"),
    ),
    "compiled": several(
        "layers", cells.compiled, "layer", "graph", "machine", "stock ms", "torch.compile ms", "ours ms",
        "over torch.compile",
    ),
    "wide": several(
        "layers", cells.wide, "graph", "machine", "sum first ms", "projection first, ours", "ratio", "stock"
    ),
    "grid": several(
        "grid", cells.grid, "graph", "mode", "cells", "stock runs in", "least", "median", "largest",
        "plan within 5 % of the fastest",
    ),
    "loader": plain(
        "loader",
        measure=lambda row: row["measure"],
        ours=cells.amount,
        stock=cells.stock_amount,
        ratio=cells.ratio("ratio"),
        best_other=cells.named_ratio,
    ),
    "gpu-spmm": several(
        "gpu", cells.spmm, "graph", "width", "fp32 ms", "over cuSPARSE", "bf16 ms", "over cuSPARSE"
    ),
    "gpu-layers": plain(
        "gpu",
        layer=cells.words("name", "size"),
        ours_ms=cells.ours,
        over_stock_edge_index=cells.ratio("ratio"),
        over_torch_CSR=cells.over("stock torch CSR ms"),
        memory_ours_GiB=cells.words("stretto GiB"),
        memory_stock_over_ours=cells.quotient("stock edge_index GiB", "stretto GiB"),
    ),
    "gpu-large": plain(
        "gpu", layer=cells.words("name"), graph=cells.words("graph", "size"), ours_ms=cells.ours,
        memory_GiB=cells.words("stretto GiB"),
    ),
    "gpu-steps": plain(
        "gpu",
        net=cells.words("name", "size"),
        ours_ms=cells.ours,
        over_stock_edge_index=cells.ratio("ratio"),
        over_torch_CSR=cells.over("stock torch CSR ms"),
        over_torch_compile=cells.over("torch.compile of stock ms"),
    ),
    "gpu-ceilings": plain("gpu", ceiling=cells.words("name"), rate=cells.words("best", "unit")),
    "breadth": plain(
        "breadth",
        layer=cells.words("layer", "width", "precision"),
        graph=cells.words("graph"),
        stock_ms=cells.stock,
        ours_ms=cells.ours,
        ratio=cells.ratio("ratio"),
        memory_stock_over_ours=cells.words("memory"),
    ),
    "batches": several("batches", cells.batches, "batch", *cells.BATCHES),
    "errors": several(
        "errors", cells.errors, "layer", "results and gradients", "largest error, ours", "stock",
        "ours over stock, worst",
    ),
    "study": several(
        "operator_study", cells.study, "op", "shape", "ms by dimension", "largest over least", "0 % over 99 % zeros"
    ),
}  # fmt: skip


def render(words: str) -> str:
    """The table that these words of a page ask for, and where its rows are from."""
    name, *conditions = shlex.split(words)
    table = TABLES[name]
    rows = [row for row in results.load(RESULTS / f"{table.suite}.csv") if all(_holds(row, c) for c in conditions)]
    if not rows:
        raise ValueError(f"no row of {table.suite}.csv for the table {words!r}")
    lines = [table.header, tuple("---" for _ in table.header), *table.lines(rows)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{text}\n{source(table.suite, rows, quantiles=' - ' in text)}\n"


def _holds(row: Row, condition: str) -> bool:
    column, _, value = condition.partition("=")
    if column.endswith("!"):
        return row[column[:-1]] != value
    return value in row[column] if column == "machine" else row[column] == value


def source(suite: str, rows: list[Row], *, quantiles: bool) -> str:
    """Where rows were measured, when, and of which commits. quantiles: what stands in brackets is told."""

    def all_of(column: str) -> str:
        return ", ".join(dict.fromkeys(row[column] for row in rows))

    dates = sorted({row["date"] for row in rows})
    threads = "" if all_of("threads") == results.UNKNOWN else f", threads: {all_of('threads')}"
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return (
        f"[{suite}.csv](../benchmarks/results/{suite}.csv): {all_of('machine')}{threads}, torch {all_of('torch')}, "
        f"PyG {all_of('pyg')}; {when}; commit {all_of('commit')}"
        + (f"; in brackets: {all_of('quantiles')}." if quantiles else ".")
    )


def rewritten(text: str) -> str:
    """A page with its tables as the rows have them."""
    return PLACES.sub(lambda found: f"{found[1]}{render(found[2])}{found[3]}", text)


def pages() -> Iterator[Path]:
    """What may hold tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def main() -> int:
    """Write the tables, or tell which pages differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    different = [page for page in pages() if rewritten(page.read_text()) != page.read_text()]
    for page in different:
        print(f"{page.relative_to(ROOT)}: {'differs from its rows' if check else 'written'}")
        if not check:
            page.write_text(rewritten(page.read_text()))
    return len(different) if check else 0


if __name__ == "__main__":
    sys.exit(main())
