"""`python -m benchmarks.operator_study`: run the study, judge its findings, and write the rows if asked."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.operator_study import cell, findings
from benchmarks.suites import results
from stretto.errors import expect
from stretto.observe.subject import usable, writable
from stretto.page.terminal import console


def command(
    only: Annotated[str, typer.Option(help="The cells that contain this text.")] = "",
    threads: Annotated[int, typer.Option(help="Threads; 0: as many as torch uses.")] = 0,
    repeats: Annotated[int, typer.Option(help="Samples of each candidate, at least 20.")] = cell.REPEATS,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    csv: Annotated[Path | None, typer.Option(help="Put the rows into this file.")] = None,
) -> None:
    """Check every candidate against fp64, time those that agree in turns, and judge the study's findings."""
    expect(repeats >= cell.REPEATS, f"operator study: '--repeats' is {repeats}, wanted at least {cell.REPEATS}")
    writable(csv, "operator study: '--csv'")
    threads = threads or torch.get_num_threads()
    rows, failed = findings.judge(console(), threads=threads, repeats=repeats, only=only, device=usable(device))
    results.save(csv, rows)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(command)
