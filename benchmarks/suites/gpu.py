"""`stretto bench gpu`: operators, layers and training steps on one CUDA device, beside stock PyG and cuSPARSE.

One call runs the whole table, losses included, with the card's ceilings measured in the same run. Graphs are drawn on
the device (R-MAT). Needs neither typer nor rich: `python -m benchmarks.suites.gpu --csv FILE` does the same on a bare
machine.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_torch_csr_tensor

import stretto
from benchmarks.suites import results
from benchmarks.suites.gpu_parts import ceilings, dense_products, milliseconds, timed
from benchmarks.suites.gpu_rows import COMPILED, CSR, OURS, STOCK, Sheet, to_rows
from benchmarks.suites.gpu_targets import geomean, targets
from stretto import ops
from stretto.errors import expect
from stretto.kernels import vendor

logger = logging.getLogger("stretto")
pyg: Any = torch_geometric.nn  # its layers look abstract to a type checker

# name -> R-MAT scale, draws, input width, output width of a layer
GRAPHS = {"g1": (17, 1_200_000, 128, 256), "g2": (21, 62_000_000, 100, 256), "g3": (18, 60_000_000, 602, 128)}
HEADS = 4
SETTLE, SETTLE_BIG = 35, 14  # calls before timing: the tuner decides within them
WIDTHS = (32, 64, 128, 256)

# name -> layer from i to o channels; `last`: one head
LAYERS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "gcn": lambda i, o, last: pyg.GCNConv(i, o),
    "sage": lambda i, o, last: pyg.SAGEConv(i, o),
    "sage-max": lambda i, o, last: pyg.SAGEConv(i, o, aggr="max"),
    "gin": lambda i, o, last: pyg.GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))),
    "gat": lambda i, o, last: pyg.GATConv(i, o if last else o // HEADS, heads=1 if last else HEADS),
    "gatv2": lambda i, o, last: pyg.GATv2Conv(i, o if last else o // HEADS, heads=1 if last else HEADS),
    "transformer": lambda i, o, last: pyg.TransformerConv(i, o if last else o // HEADS, heads=1 if last else HEADS),
}
SPARSE = ("gcn", "sage", "gin")  # stock takes a torch CSR adjacency for these


def rmat(scale: int, draws: int, *, seed: int = 0) -> Tensor:
    """Power-law graph on the device, both directions of every edge, sorted by source: edge_index [2, E]."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    source = torch.zeros(draws, dtype=torch.int64, device="cuda")
    target = torch.zeros_like(source)
    for _ in range(scale):
        draw = torch.rand(draws, generator=generator, device="cuda")
        lower = draw >= 0.76
        right = ((draw >= 0.57) & ~lower) | (draw >= 0.95)
        source, target = source * 2 + lower, target * 2 + right
    keep = source != target
    source, target = source[keep], target[keep]
    keys = torch.unique(torch.cat([(source << scale) + target, (target << scale) + source]))
    return torch.stack([keys >> scale, keys & ((1 << scale) - 1)])


def operators(sheet: Sheet, name: str, edge_index: Tensor, num_nodes: int) -> None:
    """Sums of every width against cuSPARSE."""
    graph = stretto.Graph.of(edge_index, num_nodes)
    for width in WIDTHS:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(num_nodes, width, device="cuda", dtype=dtype)
            for _ in range(SETTLE):
                ops.spmm(graph, x)
            got, wanted = ops.spmm(graph, x), vendor.spmm(graph.csr, x)[0]
            calls: dict[str, Callable[[], object]] = {
                OURS: partial(ops.spmm, graph, x),
                "cusparse": partial(vendor.spmm, graph.csr, x),
            }
            if dtype == torch.float32:
                calls["stretto max"] = partial(ops.spmm, graph, x, reduce="max")
            timings = timed(calls)
            ms = milliseconds(timings)
            sheet.add(
                timings,
                kind="spmm",
                graph=name,
                width=width,
                dtype=str(dtype).removeprefix("torch."),
                ms=ms,
                error=relative(got, wanted),
                speedup=ms["cusparse"] / ms[OURS],
                gathered_tb_s=graph.num_edges * width * x.element_size() / ms[OURS] / 1e9,
            )


def relative(got: Tensor, wanted: Tensor, least: float = 1e-30) -> float:
    """Norm of the difference over the norm of `wanted`, or over `least`: a gradient that is zero but for rounding."""
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=least))


def layers(sheet: Sheet, name: str, edge_index: Tensor, num_nodes: int, models: tuple[str, ...]) -> None:
    """Forward and backward of one layer, with gradients of its input."""
    _, _, i, o = GRAPHS[name]
    big = name != "g1"
    x = torch.randn(num_nodes, i, device="cuda", requires_grad=True)
    adj = to_torch_csr_tensor(edge_index, size=(num_nodes, num_nodes)) if not big else None
    for model in models:
        if sheet.over:
            sheet.add(kind="layer", graph=name, model=model, skipped="time is up")
            continue
        torch.manual_seed(0)
        stock = LAYERS[model](i, o, False).cuda()
        ours = stretto.accelerate(copy.deepcopy(stock))
        upstream = torch.randn(num_nodes, o, device="cuda")
        candidates = {OURS: _both(ours, x, edge_index, upstream)}
        if not big:
            candidates[STOCK] = _both(stock, x, edge_index, upstream)
        if adj is not None and model in SPARSE:
            candidates[CSR] = _both(stock, x, adj, upstream)
        row: dict[str, Any] = {"kind": "layer", "graph": name, "model": model, "widths": f"{i} -> {o}"}
        _race(sheet, row, candidates, settle=SETTLE if not big else SETTLE_BIG)
    if not big:
        sheet.add(kind="parts", graph=name, model="gin", name="its products alone", ms=dense_products(num_nodes, i, o))


def _both(layer: nn.Module, x: Tensor, edges: Tensor, upstream: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        out = layer(x, edges)
        return (out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], upstream))

    return call


def _race(
    sheet: Sheet, row: dict[str, Any], candidates: dict[str, Callable[[], Any]], *, settle: int, repeats: int = 7
) -> None:
    """Check, warm, time; what cannot run says why. Memory of each: the peak of a call above inputs and parameters, its
    results, gradients and whatever the layer keeps included."""
    results: dict[str, Any] = {}
    compared = OURS in candidates and STOCK in candidates  # results take memory: kept only to be compared
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for name in list(candidates):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        try:
            first = candidates[name]()  # the first call is the one to compare: steps move the weights
            if compared and name in (OURS, STOCK):
                results[name] = [t.cpu() for t in first]  # not to be counted below
            del first
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - start
            for _ in range(settle if name == OURS else 2):
                candidates[name]()
            torch.cuda.reset_peak_memory_stats()
            candidates[name]()
            torch.cuda.synchronize()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        except (RuntimeError, NotImplementedError) as error:
            failed[name] = str(error).splitlines()[0][:160]
            del candidates[name]
    if OURS in results and STOCK in results:
        least = 1e-4 * max(float(w.double().norm()) for w in results[STOCK])
        pairs = zip(results[OURS], results[STOCK], strict=True)
        row["error"] = max(relative(g, w, least) for g, w in pairs)
    results.clear()
    timings = timed(candidates, repeats=repeats) if candidates else {}
    ms = milliseconds(timings)
    if OURS in ms:
        row["speedup"] = {name: value / ms[OURS] for name, value in ms.items() if name != OURS}
    if OURS in memory:
        row["memory_ratio"] = {name: value / memory[OURS] for name, value in memory.items() if name != OURS}
    sheet.add(timings, **row, ms=ms, gib=memory, first_call_s=seconds, failed=failed)


class Net(nn.Module):
    """A stack of layers with ReLU between them."""

    def __init__(self, model: str, widths: tuple[int, ...]) -> None:
        super().__init__()
        last = len(widths) - 2
        self.layers = nn.ModuleList(
            LAYERS[model](i, o, k == last) for k, (i, o) in enumerate(itertools.pairwise(widths))
        )

    def forward(self, x: Tensor, edges: Any, weight: Any = None) -> Tensor:
        """Class scores: x [N, F] -> [N, C]."""
        extra = () if weight is None else (weight,)
        for k, layer in enumerate(self.layers):
            x = layer(x.relu() if k else x, edges, *extra)
        return x


def steps(sheet: Sheet, edge_index: Tensor, num_nodes: int, *, compiled: tuple[str, ...]) -> None:
    """Training steps (forward, cross-entropy, backward, Adam) of 2- and 3-layer nets on the first graph."""
    x = torch.randn(num_nodes, 128, device="cuda")
    y = torch.randint(0, 40, (num_nodes,), device="cuda")
    adj = to_torch_csr_tensor(edge_index, size=(num_nodes, num_nodes))
    for model in ("gcn", "sage", "gin", "gat", "gatv2"):
        for widths in ((128, 256, 40), (128, 256, 256, 40)):
            if sheet.over:
                sheet.add(kind="step", graph="g1", model=model, layers=len(widths) - 1, skipped="time is up")
                continue
            torch.manual_seed(0)
            stock = Net(model, widths).cuda()
            candidates: dict[str, Callable[[], Any]] = {
                OURS: _step(stretto.accelerate(copy.deepcopy(stock)), x, edge_index, y),
                STOCK: _step(copy.deepcopy(stock), x, edge_index, y),
            }
            if model in SPARSE:
                net, matrix = _normed(copy.deepcopy(stock), adj, model)
                candidates[CSR] = _step(net, x, matrix, y)
            if model in compiled:
                torch._dynamo.reset()
                candidates[COMPILED] = _step(torch.compile(copy.deepcopy(stock)), x, edge_index, y)
            row: dict[str, Any] = {"kind": "step", "graph": "g1", "model": model, "layers": len(widths) - 1}
            _race(sheet, row, candidates, settle=SETTLE)


def _normed(net: Net, adj: Tensor, model: str) -> tuple[Net, Tensor]:
    """Stock at its best: GCN's norm computed once and kept in the adjacency."""
    if model != "gcn":
        return net, adj
    normed, _ = gcn_norm(adj, None, adj.size(0), dtype=torch.float32)
    for layer in net.layers:
        layer.normalize = False  # type: ignore[assignment]
    return net, normed.to_sparse_csr() if normed.layout != torch.sparse_csr else normed


def _step(net: Any, x: Tensor, edges: Tensor, y: Tensor) -> Callable[[], tuple[Tensor]]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step() -> tuple[Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x, edges), y)
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return step


def run(
    *, budget: float = 460.0, only: str = "", compiled: tuple[str, ...] = ("gcn", "sage", "gin", "gat", "gatv2")
) -> Sheet:
    """The whole table, or the parts named in `only` (ops, layers, big, steps)."""
    expect(torch.cuda.is_available(), "bench gpu: no CUDA device here")
    torch.backends.cuda.matmul.allow_tf32 = False
    sheet = Sheet(budget)
    wanted = only.split(",") if only else ["ops", "layers", "steps", "big"]
    sheet.add(
        kind="machine",
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        pyg=torch_geometric.__version__,
        command=f"stretto bench gpu --only {','.join(wanted)}",
    )
    ceilings(sheet)
    for name in GRAPHS:
        if name != "g1" and not {"ops", "big"} & set(wanted):
            continue
        scale, draws, _, _ = GRAPHS[name]
        edge_index = rmat(scale, draws)
        num_nodes = 1 << scale
        torch.cuda.synchronize()
        start = time.perf_counter()
        stretto.Graph.of(edge_index, num_nodes).T  # noqa: B018 -- built here, so that it can be timed
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        sheet.add(kind="graph", name=name, nodes=num_nodes, edges=edge_index.size(1), build_s=seconds)
        if "ops" in wanted:
            operators(sheet, name, edge_index, num_nodes)
        if name == "g1":
            if "layers" in wanted:
                layers(sheet, name, edge_index, num_nodes, tuple(LAYERS))
        elif "big" in wanted:
            layers(sheet, name, edge_index, num_nodes, ("gat", "gatv2", "transformer", "gcn", "sage", "sage-max"))
        stretto.Graph.cache_clear()
        del edge_index
        torch.cuda.empty_cache()
    if "steps" in wanted:  # last: torch.compile takes most of the time
        scale, draws, _, _ = GRAPHS["g1"]
        steps(sheet, rmat(scale, draws), 1 << scale, compiled=compiled)
    _summary(sheet)
    return sheet


def _summary(sheet: Sheet) -> None:
    """Geometric means over the training steps, what was to be reached, and every loss."""
    for against in (STOCK, "best stock"):
        ratios = [r for row in sheet.rows if row.get("kind") == "step" for r in _ratios(row, against)]
        if ratios:
            sheet.add(kind="summary", name=f"training steps vs {against}", geomean=geomean(ratios), least=min(ratios))
    for target in targets(sheet.rows, OURS, STOCK, CSR, COMPILED):
        sheet.add(kind="target", **target)
    sheet.add(kind="summary", name="losses", rows=list(losses(sheet)), seconds=time.perf_counter() - sheet.start)


def _ratios(row: dict[str, object], against: str) -> list[float]:
    speedup = row.get("speedup")
    if not isinstance(speedup, dict) or not speedup:
        return []
    return [min(speedup.values())] if against == "best stock" else [speedup[against]] if against in speedup else []


def losses(sheet: Sheet) -> Iterator[str]:
    """Where something else is faster."""
    for row in sheet.rows:
        speedup = row.get("speedup")
        table = speedup if isinstance(speedup, dict) else {"cusparse": speedup} if isinstance(speedup, float) else {}
        for name, value in table.items():
            if value < 1:
                what = [str(row[k]) for k in ("kind", "graph", "model", "width", "dtype", "layers") if k in row]
                yield f"{' '.join(what)}: {name} {1 / value:.2f}x faster"


def command(csv: Path | None = None, budget: float = 460.0, only: str = "") -> None:
    """Operators, layers and training steps on a GPU, beside stock PyG and cuSPARSE; losses included."""
    from stretto.page.terminal import console

    out = console()
    sheet = run(budget=budget, only=only)
    for row in sheet.rows:
        out.print(json.dumps(row, default=str), soft_wrap=True, highlight=False)
    results.save(csv, to_rows(sheet))


def main() -> None:
    """Without a command line package: rows to the log and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--budget", type=float, default=460.0)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results.save(arguments.csv, to_rows(run(budget=arguments.budget, only=arguments.only)))


if __name__ == "__main__":
    main()
