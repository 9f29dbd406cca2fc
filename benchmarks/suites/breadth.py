"""Every layer of the breadth table beside stock PyG, one device: forward, backward, time and peak memory.

`python -m benchmarks.suites.breadth --device cuda` needs neither typer nor rich. A layer that loses says so in its row.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn

import stretto
from benchmarks.suites import results
from stretto import datasets
from stretto.errors import expect
from stretto.machine.timing import measure
from stretto.observe.peak_memory import peak_bytes

logger = logging.getLogger("stretto")
pyg: Any = torch_geometric.nn
EDGE_DIM, HEADS, RELATIONS = 16, 4, 5
STOCK = "stock edge_index"
SETTLE = 14  # calls before timing: variants and plans are chosen within them


@dataclass(frozen=True)
class Layer:
    """How to build a layer of some width, and what it takes beside x and edge_index.

    edge: features of edges. kind: "one" set of nodes, "two", edges of several "types", or "hetero" dictionaries.
    width: its own, where it cannot be that of the others.
    """

    make: Callable[[int], nn.Module]
    edge: bool = False
    kind: str = "one"
    width: int = 0


def _mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))


def _relation(number: int) -> tuple[str, str, str]:
    return ("n", f"r{number}", "n")


def _hetero(make: Callable[[], nn.Module]) -> nn.Module:
    conv: nn.Module = pyg.HeteroConv({_relation(r): make() for r in range(RELATIONS)})
    return conv


_METADATA = (["n"], [_relation(r) for r in range(RELATIONS)])
_PNA = (["mean", "min", "max", "std"], ["identity", "amplification"], torch.ones(64))
LAYERS: dict[str, Layer] = {
    "gcn": Layer(lambda k: pyg.GCNConv(k, k)),
    "sage": Layer(lambda k: pyg.SAGEConv(k, k)),
    "gin": Layer(lambda k: pyg.GINConv(_mlp(k, k))),
    "gine": Layer(lambda k: pyg.GINEConv(_mlp(k, k), edge_dim=EDGE_DIM), edge=True),
    "edgeconv": Layer(lambda k: pyg.EdgeConv(_mlp(2 * k, k))),
    "gat": Layer(lambda k: pyg.GATConv(k, k // HEADS, heads=HEADS)),
    "gat-edge": Layer(lambda k: pyg.GATConv(k, k // HEADS, heads=HEADS, edge_dim=EDGE_DIM), edge=True),
    "gatv2": Layer(lambda k: pyg.GATv2Conv(k, k // HEADS, heads=HEADS)),
    "gatv2-edge": Layer(lambda k: pyg.GATv2Conv(k, k // HEADS, heads=HEADS, edge_dim=EDGE_DIM), edge=True),
    "transformer": Layer(lambda k: pyg.TransformerConv(k, k // HEADS, heads=HEADS)),
    "transformer-edge": Layer(lambda k: pyg.TransformerConv(k, k // HEADS, heads=HEADS, edge_dim=EDGE_DIM), edge=True),
    "gen-edge": Layer(lambda k: pyg.GENConv(k, k, edge_dim=EDGE_DIM), edge=True),
    "resgated-edge": Layer(lambda k: pyg.ResGatedGraphConv(k, k, edge_dim=EDGE_DIM), edge=True),
    "cg-edge": Layer(lambda k: pyg.CGConv(k, EDGE_DIM), edge=True),
    "pna": Layer(lambda k: pyg.PNAConv(k, k, *_PNA)),
    "gatedgraph": Layer(lambda k: pyg.GatedGraphConv(k, 2)),
    "gmm-edge": Layer(lambda k: pyg.GMMConv(k, k, EDGE_DIM, 2), edge=True),
    "nn-edge": Layer(lambda k: pyg.NNConv(k, k, nn.Linear(EDGE_DIM, k * k)), edge=True, width=8),
    "sage-two": Layer(lambda k: pyg.SAGEConv((k, k), k), kind="two"),
    "gat-two": Layer(lambda k: pyg.GATConv((k, k), k // HEADS, heads=HEADS, add_self_loops=False), kind="two"),
    "rgcn": Layer(lambda k: pyg.RGCNConv(k, k, RELATIONS), kind="types"),
    "hetero-sage": Layer(lambda k: _hetero(lambda: pyg.SAGEConv(k, k)), kind="hetero"),
    "hetero-gat": Layer(
        lambda k: _hetero(lambda: pyg.GATConv(k, k // HEADS, heads=HEADS, add_self_loops=False)), kind="hetero"
    ),
    "hgt": Layer(lambda k: pyg.HGTConv(k, k, _METADATA, heads=HEADS), kind="hetero"),
    "han": Layer(lambda k: pyg.HANConv(k, k, _METADATA, heads=HEADS), kind="hetero"),
}


def inputs(layer: Layer, edge_index: Tensor, num_nodes: int, width: int) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Arguments of a call, and those of them that want gradients."""
    device = edge_index.device
    x = torch.randn(num_nodes, width, device=device, requires_grad=True)
    if layer.kind == "two":
        other = torch.randn(num_nodes, width, device=device, requires_grad=True)
        return ((x, other), edge_index), [x, other]
    types = torch.arange(edge_index.size(1), device=device) % RELATIONS
    if layer.kind == "types":
        return (x, edge_index, types), [x]
    if layer.kind == "hetero":
        return ({"n": x}, {_relation(r): edge_index[:, types == r].contiguous() for r in range(RELATIONS)}), [x]
    if layer.edge:
        return (x, edge_index, torch.rand(edge_index.size(1), EDGE_DIM, device=device)), [x]
    return (x, edge_index), [x]


def stepper(
    net: nn.Module, arguments: tuple[Any, ...], learned: list[Tensor], precision: torch.dtype
) -> Callable[[], None]:
    """Forward and backward; gradients of parameters and x."""
    device = learned[0].device.type

    def step() -> None:
        with torch.autocast(device, dtype=precision, enabled=precision != torch.float32):
            out = net(*arguments)
        out = out["n"] if isinstance(out, dict) else out
        out.backward(torch.ones_like(out))
        for tensor in (*learned, *net.parameters()):
            tensor.grad = None

    return step


def peak(step: Callable[[], None], device: torch.device) -> int:
    """Bytes that a step needs above what there was before it."""
    if device.type != "cuda":
        return peak_bytes(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cell(
    name: str, graph: str, edge_index: Tensor, num_nodes: int, width: int, precision: str, repeats: int
) -> results.Row:
    """One layer beside stock, settled."""
    layer, device = LAYERS[name], edge_index.device
    width = layer.width or width
    torch.manual_seed(0)
    stock = layer.make(width).to(device)
    ours = stretto.accelerate(copy.deepcopy(stock))
    arguments, learned = inputs(layer, edge_index, num_nodes, width)
    steps = {
        label: stepper(net, arguments, learned, getattr(torch, precision))
        for label, net in (("stretto", ours), (STOCK, stock))
    }
    for _ in range(SETTLE):
        steps["stretto"]()
    steps[STOCK]()
    sizes = {label: peak(step, device) for label, step in steps.items()}
    timings = measure(steps, repeats=repeats, warmup=2, sample_seconds=0.03, device=device.type)
    rows = stretto.report(ours).rows
    return results.row(
        "breadth",
        {"graph": graph, "layer": name, "width": width, "precision": precision},
        results.figures(timings),
        command=(
            f"python -m benchmarks.suites.breadth --device {device.type} --graph {graph} --width {width} "
            f"--layers {name} --precisions {precision} --repeats {repeats}"
        ),
        stock=STOCK,
        device=device.type,
        more={
            "memory": sizes[STOCK] / max(sizes["stretto"], 1),
            "path": rows[0].path if rows else "",
            "plan": (rows[0].plan or rows[0].reason) if rows else "",
        },
    )


def draw(device: torch.device, scale: int, draws: int) -> Tensor:
    """A power-law graph with both directions of every edge."""
    if device.type == "cuda":
        from benchmarks.suites.gpu import rmat

        return rmat(scale, draws)
    return datasets.load_graph(f"rmat:{scale}:{draws}").edge_index


def main() -> None:
    """Rows to the log and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", default="", help="names, separated by commas; all by default")
    parser.add_argument("--precisions", default="float32", help="float32, bfloat16, float16: the last two by autocast")
    parser.add_argument("--graph", default="", help="rmat:SCALE:DRAWS, 2^SCALE nodes; by default as the device suits")
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path, help="file of rows; an older row of the same case goes")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logger.setLevel(logging.INFO)
    device = torch.device(options.device)
    card = device.type == "cuda"
    expect(not card or torch.cuda.is_available(), "bench breadth: '--device' is cuda, but there is no CUDA device here")
    graph = options.graph or ("rmat:17:1200000" if card else "rmat:14:110000")
    wrong = f"bench breadth: '--graph' is {graph!r}, wanted rmat:SCALE:DRAWS"
    expect(re.fullmatch(r"rmat:\d{1,2}:\d+", graph) is not None, wrong)
    scale, draws = map(int, graph.split(":")[1:])
    edge_index = draw(device, scale, draws)
    ratios = []
    for precision in options.precisions.split(","):
        for name in options.layers.split(",") if options.layers else LAYERS:
            width = options.width or (128 if card else 64)
            row = cell(name, graph, edge_index, 1 << scale, width, precision, options.repeats)
            ratios.append(float(row["ratio"]))
            shown = ("layer", "precision", "ours", "stock", "ratio", "memory", "path", "plan")
            logger.info("%s", "  ".join(row[column] for column in shown))
            results.save(options.csv, [row])
            gc.collect()
            if card:
                torch.cuda.empty_cache()
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    logger.info("geometric mean %.2fx, least %.2fx", mean, min(ratios))


if __name__ == "__main__":
    main()
