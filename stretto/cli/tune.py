"""`stretto tune`: settle the choices of the tuner for a graph, and keep them on disk."""

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor

from stretto import datasets, ops
from stretto.errors import expect
from stretto.graph import Graph
from stretto.machine import facts, store
from stretto.machine.timing import settle, threads
from stretto.observe.agreement import DTYPES
from stretto.page.terminal import console, progress

WEIGHTS = ("none", "edge")


def inputs(data: datasets.Dataset, width: int, dtype: str, weight: str) -> tuple[Graph, Tensor, Tensor | None]:
    """What spmm is called with: the graph, random x [n, width], and weight [E] or None."""
    x = torch.randn(data.num_nodes, width).to(DTYPES[dtype])
    edge = torch.rand(data.num_edges, dtype=x.dtype) if weight == "edge" else None
    return Graph.of(data.edge_index, data.num_nodes), x, edge


def _training(graph: Graph, x: Tensor, weight: Tensor | None) -> Callable[[], None]:
    """A sum forward and backward, as training calls it."""
    x.requires_grad_()

    def step() -> None:
        out = ops.spmm(graph, x, weight)
        torch.autograd.grad(out, x, out.detach())

    return step


def command(
    graph: Annotated[
        str, typer.Option(help=f"cora, a path to .npz, {', '.join(datasets.grammar())}.")
    ] = "rmat:17:1200000",
    width: Annotated[str, typer.Option(help="Widths, separated by commas.")] = "16,32,64,128,256",
    dtype: Annotated[str, typer.Option(help="f32, f64, bf16 or f16.")] = "f32",
    weight: Annotated[str, typer.Option(help="none, or edge: one weight each.")] = "none",
    number: Annotated[int, typer.Option("--threads", help="Threads; 0: as many as torch uses.")] = 0,
) -> None:
    """Settle which kernel variants run on a graph and keep that on disk."""
    widths = width.split(",")
    for word in widths:
        expect(word.isdecimal() and int(word) > 0, f"tune: '--width' is {width!r}, wanted numbers with commas")
    expect(dtype in DTYPES, f"tune: '--dtype' is {dtype!r}, wanted one of {', '.join(DTYPES)}")
    expect(weight in WEIGHTS, f"tune: '--weight' is {weight!r}, wanted one of {', '.join(WEIGHTS)}")
    data = datasets.load_graph(graph)
    with progress(len(widths), "tuning") as step, threads(number or torch.get_num_threads()):
        for word in widths:
            settle(_training(*inputs(data, int(word), dtype, weight)))
            step(f"width {word}")
        machine = facts.describe()
    count, path = len(store.read("kernels", machine)), store.path("kernels", machine)
    console().print(f"{count} choices for this machine in {path}", soft_wrap=True)
