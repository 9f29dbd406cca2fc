"""`stretto analyze`: whether more hardware would help."""

from pathlib import Path
from typing import Annotated

import typer

from stretto.analyze.analysis import analyze
from stretto.analyze.terminal import show_analysis, show_schemes
from stretto.errors import fail
from stretto.observe.models import MODELS
from stretto.observe.subject import subject, writable
from stretto.observe.this_machine import get
from stretto.observe.trace import device_of
from stretto.page.terminal import console


def command(
    target: Annotated[str, typer.Argument(help=f"FILE.py:FUNCTION, or {', '.join(MODELS)}.")] = "gcn",
    graph: Annotated[
        str, typer.Option(help="For a built-in model: cora, a path to .npz, rmat:SCALE:EDGES, ...")
    ] = "cora",
    hidden: Annotated[int, typer.Option(help="Hidden width of a built-in model.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of a built-in model.")] = 2,
    mode: Annotated[str, typer.Option(help="train or infer.")] = "train",
    procs: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = "1,2,4,8,16",
    device: Annotated[str, typer.Option(help="Where a built-in model runs: cpu or cuda.")] = "cpu",
    machine: Annotated[str, typer.Option(help="auto: this machine, measured once; or a machine file.")] = "auto",
    probe_again: Annotated[bool, typer.Option("--probe", help="Measure this machine again, and keep that.")] = False,
    save_machine: Annotated[Path | None, typer.Option(help="Write the machine file, to edit and plan with.")] = None,
    validate: Annotated[bool, typer.Option(help="Run what can run here beside the predictions.")] = False,
    schemes: Annotated[bool, typer.Option(help="Count an epoch by full batch, sampling, layers, clusters.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as one page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
) -> None:
    """Work, depth, memory and communication of a model on a graph, and which way of running it on P workers is best."""
    words = procs.split(",")
    if not all(word.isdecimal() and word.isascii() and int(word) >= 1 for word in words):
        fail(f"analyze: '--procs' is {procs!r}, wanted numbers from 1, separated by commas")
    for option, path in (("save-machine", save_machine), ("html", html), ("json", json)):
        writable(path, f"analyze: '--{option}'")
    model, data = subject(target, graph, hidden, layers, device)
    many = any(int(word) > 1 for word in words)
    computer = get(machine, again=probe_again, device=device_of(model), link=many)
    if save_machine is not None:
        computer.save(save_machine)
    report = analyze(model, data, procs=[int(word) for word in words], machine=computer, mode=mode)
    report.model = target if target in MODELS else report.model
    try:
        if validate:
            report.validate()
    finally:  # the analysis is there, whatever became of its check
        show_analysis(console(), report)
        if html is not None:
            report.to_html(html)
        if json is not None:
            report.to_json(json)
    if schemes:
        show_schemes(console(), report)
