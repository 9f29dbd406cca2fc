"""`stretto bench latency`: what a layer costs where there is nothing to compute, on a graph of 100 nodes.

Calls of Python functions, as sys.setprofile counts them, in a forward and in a backward pass of a layer that has met
its graph a few times; and the time of both beside stock's, on one thread. The backward count includes the calls that
torch's own Tensor.backward makes before it reaches a layer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
import torch_geometric
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.suites import results
from stretto.errors import expect
from stretto.machine.timing import measure
from stretto.plug.accelerate import accelerate

pyg: Any = torch_geometric.nn
NODES, EDGES, WIDTH, HEADS = 100, 500, 16, 4
SETTLED = 25  # steps before anything is counted
STOCK = "stock edge_index"
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gcn": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "sage": lambda: pyg.SAGEConv(WIDTH, WIDTH),
    "gin": lambda: pyg.GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
    "gat": lambda: pyg.GATConv(WIDTH, WIDTH // HEADS, heads=HEADS),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, WIDTH // HEADS, heads=HEADS),
    "transformer": lambda: pyg.TransformerConv(WIDTH, WIDTH // HEADS, heads=HEADS),
}


def python_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function gives, and how many Python functions it calls."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return result, count - 1  # the function itself


def run(name: str, repeats: int, command: str) -> results.Row:
    """One layer: calls counted, then forward and backward timed beside stock."""
    torch.manual_seed(0)
    stock = LAYERS[name]()
    ours = accelerate(copy.deepcopy(stock))
    x, edge_index = torch.randn(NODES, WIDTH, requires_grad=True), torch.randint(0, NODES, (2, EDGES))

    def step(net: nn.Module) -> None:
        net(x, edge_index).sum().backward()
        for tensor in (x, *net.parameters()):
            tensor.grad = None

    for _ in range(SETTLED):
        step(ours)
    out, forward = python_calls(lambda: ours(x, edge_index))
    flow = torch.ones_like(out)
    _, backward = python_calls(lambda: out.backward(flow))
    candidates: dict[str, Callable[[], object]] = {"stretto": lambda: step(ours), STOCK: lambda: step(stock)}
    timings = measure(candidates, repeats=repeats, warmup=3, sample_seconds=0.05)
    return results.row(
        "latency",
        {"layer": name, "nodes": NODES, "edges": EDGES, "width": WIDTH},
        results.figures(timings),
        command=command,
        stock=STOCK,
        more={"forward calls": forward, "backward calls": backward},
    )


def command(
    layers: Annotated[str, typer.Option(help=f"Names, separated by commas: {', '.join(LAYERS)}.")] = ",".join(LAYERS),
    repeats: Annotated[int, typer.Option(help="Samples of each, in turns.")] = 9,
    csv: Annotated[Path | None, typer.Option(help="File of rows; an older row of the same case goes.")] = None,
) -> None:
    """Python calls and time of a layer on a graph of 100 nodes, on one thread."""
    names = layers.split(",")
    wrong = [name for name in names if name not in LAYERS]
    expect(not wrong, f"bench latency: '--layers' has {', '.join(wrong)}, wanted some of {', '.join(LAYERS)}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [run(name, repeats, f"stretto bench latency --layers {name} --repeats {repeats}") for name in names]
    finally:
        torch.set_num_threads(threads)
    table = Table(title=f"{NODES} nodes, {EDGES} edges, {WIDTH} channels, 1 thread", title_justify="left")
    for heading in ("layer", "calls forward", "backward", "ours, ms", "stock, ms", "stock / ours"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for row in rows:
        table.add_row(*[row[k] for k in ("layer", "forward calls", "backward calls", "ours", "stock", "ratio")])
    Console().print(table)
    results.save(csv, rows)
