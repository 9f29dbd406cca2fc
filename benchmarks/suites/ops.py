"""`stretto bench ops`: every candidate of an op on one graph, checked, then timed in turns."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.suites import foundation, report, results
from benchmarks.suites.case import Spec
from benchmarks.suites.run import Result, run
from stretto.datasets import grammar
from stretto.errors import expect, fail
from stretto.observe.subject import writable
from stretto.ops import OPS
from stretto.page.terminal import console, progress

# name -> its rows, and whether ours failed the check in any
SUITES: dict[str, Callable[..., tuple[list[results.Row], bool]]] = {
    "foundation": foundation.command,
}


CELL = ("op", "graph", "width", "dtype", "reduce", "weight", "heads", "direction")  # options that describe one


def command(
    context: typer.Context,
    op: Annotated[str, typer.Option(help="The op, or several separated by commas; empty: all.")] = "",
    graph: Annotated[str, typer.Option(help=f"cora, a path to .npz, {', '.join(grammar())}.")] = Spec.graph,
    width: Annotated[str, typer.Option(help="Columns of x, or several numbers separated by commas.")] = "256",
    dtype: Annotated[str, typer.Option(help="f32, f64, bf16 or f16.")] = "f32",
    reduce: Annotated[str, typer.Option(help="sum, mean, max, min; segment_reduce knows more.")] = "sum",
    weight: Annotated[str, typer.Option(help="spmm: none, edge (a weight each) or scales (row and column).")] = "none",
    heads: Annotated[int, typer.Option(help="Heads of sddmm and edge_softmax.")] = 1,
    direction: Annotated[str, typer.Option(help="fwd, or both: forward and backward.")] = "fwd",
    threads: Annotated[int, typer.Option(help="Threads; 0: as many as torch uses.")] = 0,
    repeats: Annotated[int, typer.Option(help="Samples of each candidate.")] = 9,
    suite: Annotated[str, typer.Option(help=f"A table of targets instead of one cell: {', '.join(SUITES)}.")] = "",
    only: Annotated[str, typer.Option(help="Of a suite, the lines that contain this text.")] = "",
    csv: Annotated[Path | None, typer.Option(help="Put the rows into this file.")] = None,
) -> None:
    """Check each candidate of an op against the fp64 reference, then time all of them in turns."""
    _refuse_what_is_not_meant(context, "a suite" if suite else "one cell")
    expect(repeats >= 1, f"bench ops: '--repeats' is {repeats}, wanted at least 1")
    writable(csv, "bench ops: '--csv'")
    out = console()
    threads = threads or torch.get_num_threads()
    if suite:
        if suite not in SUITES:
            fail(f"bench ops: '--suite' is {suite!r}, wanted one of {', '.join(SUITES)}")
        rows, failed = SUITES[suite](out, threads=threads, repeats=repeats, only=only)
    else:
        rows, failed = [], False
        for name in op.split(",") if op else OPS:
            for columns in width.split(","):
                if not columns.isdigit():
                    fail(f"bench ops: '--width' is {width!r}, wanted numbers separated by commas")
                spec = Spec(name, graph, int(columns), dtype, reduce, weight, heads, direction, threads)
                result = _one(out, spec, repeats)
                rows.append(result.to_row())
                failed |= bool(result.failed)
    results.save(csv, rows)
    if failed:
        raise typer.Exit(1)


def _refuse_what_is_not_meant(context: typer.Context, kind: str) -> None:
    """A suite has cells of its own, and one cell has no lines to choose from."""
    for name in CELL if kind == "a suite" else ("only",):
        if _was_given(context, name):
            fail(f"bench ops: '--{name}' means nothing for {kind}")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _one(out: Console, spec: Spec, repeats: int) -> Result:
    """Measure and show one cell."""
    with progress(0, spec.op) as step:
        result = run(spec, repeats=repeats, after=step)
    report.show(out, result)
    return result
