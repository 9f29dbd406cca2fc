"""`stretto bench models`: whole training steps of PyG models, stock in every form it has, and with two lines added.

A step is forward, cross-entropy, backward and Adam. Candidates: stock with edge_index, with a torch CSR adjacency (norm
precomputed), with EdgeIndex, torch.compile of stock; ours; and, to show what comes from where, our plans on torch's own
kernels, our kernels in stock's order of evaluation, and stock with freed memory kept. All start from
the same weights; loss and gradients are compared with stock before anything is timed.
"""

from __future__ import annotations

import copy
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch_geometric.nn
import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from benchmarks.suites import layers, report, results
from benchmarks.suites.case import Outcome, details, reasons
from benchmarks.suites.dense_floor import NAME, dense_floor
from stretto import datasets
from stretto.compile import HOIST
from stretto.errors import expect
from stretto.machine import facts
from stretto.machine.timing import as_alone, measure, settle
from stretto.machine.timing import threads as use_threads
from stretto.observe.peak_memory import peak_bytes
from stretto.page.terminal import Step, console, progress
from stretto.plug.accelerate import accelerate

OURS, STOCK, COMPILED = "stretto", "stock edge_index", "stock torch.compile"
SAMPLE = 0.2  # seconds: shorter steps are timed several in a row, as in training, all after one that is not timed
pyg: Any = torch_geometric.nn  # its layers look abstract to a type checker


def _mlp(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))


# name -> layer from i to o channels; `last` tells the output layer (one head, averaged)
LAYERS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "gcn": lambda i, o, last: pyg.GCNConv(i, o),
    "gcn-plain": lambda i, o, last: pyg.GCNConv(i, o, normalize=False),
    "sage": lambda i, o, last: pyg.SAGEConv(i, o),
    "sage-sum": lambda i, o, last: pyg.SAGEConv(i, o, aggr="sum"),
    "sage-max": lambda i, o, last: pyg.SAGEConv(i, o, aggr="max"),
    "gin": lambda i, o, last: pyg.GINConv(_mlp(i, o)),
    "graphconv": lambda i, o, last: pyg.GraphConv(i, o),
    "tag": lambda i, o, last: pyg.TAGConv(i, o, K=3),
    "sgc": lambda i, o, last: pyg.SGConv(i, o, K=2),
    "appnp": lambda i, o, last: nn.ModuleList([nn.Linear(i, o), pyg.APPNP(10, 0.1)]) if last else nn.Linear(i, o),
    "gat": lambda i, o, last: pyg.GATConv(i, o if last else o // 4, heads=1 if last else 4),
    "gatv2": lambda i, o, last: pyg.GATv2Conv(i, o if last else o // 4, heads=1 if last else 4),
    "transformer": lambda i, o, last: pyg.TransformerConv(i, o if last else o // 4, heads=1 if last else 4),
}
# Stock computes their norm anew each step, unless it is handed in (SGConv computes it even then).
NORMALISED = ("gcn", "tag", "appnp")
UNFUSED = ("gat", "gatv2", "transformer")  # stock has no path for sparse matrices


class Net(nn.Module):
    """A stack of layers with ReLU between them."""

    def __init__(self, model: str, widths: list[int]) -> None:
        super().__init__()
        sizes = list(itertools.pairwise(widths))
        self.layers = nn.ModuleList(LAYERS[model](i, o, k == len(sizes) - 1) for k, (i, o) in enumerate(sizes))

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """Class scores: x [N, F] -> [N, C]."""
        extra = () if edge_weight is None else (edge_weight,)
        for k, layer in enumerate(self.layers):
            x = x.relu() if k else x
            for part in layer if isinstance(layer, nn.ModuleList) else (layer,):
                x = part(x) if isinstance(part, nn.Linear) else part(x, edge_index, *extra)
        return x


@dataclass
class Result:
    """A model on a graph and what was measured."""

    model: str
    graph: str
    widths: list[int]
    train: bool
    num_nodes: int = 0
    num_edges: int = 0
    threads: int = 0
    repeats: int = 0
    compiled: bool = False
    ablation: bool = True
    outcomes: list[Outcome] = field(default_factory=list)

    def get(self, name: str) -> Outcome | None:
        return next((o for o in self.outcomes if o.name == name and o.timing), None)

    @property
    def best_stock(self) -> Outcome | None:
        stock = [o for o in self.outcomes if o.timing is not None and o.name.startswith("stock")]
        return min(stock, key=lambda o: o.timing.median if o.timing else 0.0, default=None)

    def command(self) -> str:
        widths = ",".join(map(str, self.widths))
        mode = "" if self.train else " --eval"
        mode += "" if self.compiled else " --no-compile"
        return (
            f"stretto bench models --graph {self.graph} --model {self.model} --widths {widths}{mode} "
            f"--threads {self.threads} --repeats {self.repeats}{'' if self.ablation else ' --no-ablation'}"
        )

    def to_row(self) -> results.Row:
        """As it is written down."""
        timings = {o.name: o.timing for o in self.outcomes if o.timing is not None}
        case = {"model": self.model, "graph": self.graph, "widths": "-".join(map(str, self.widths))}
        case["mode"] = "training" if self.train else "inference"
        more = details(self.outcomes, OURS, STOCK)
        return results.row(
            "models", case, results.figures(timings), command=self.command(), threads=self.threads, stock=STOCK,
            rivals=[name for name in timings if name.startswith("stock")],
            note=reasons(self.outcomes), more={"nodes": self.num_nodes, "edges": self.num_edges} | more,
        )  # fmt: skip


def run(
    model: str,
    graph: str,
    widths: list[int],
    *,
    train: bool = True,
    repeats: int = 5,
    compiled: bool = False,
    ablation: bool = True,
    only: tuple[str, ...] = (),
    lead_in: bool = True,
    after: Step | None = None,
) -> Result:
    """Check every candidate (or those named in `only`) against stock, then time them in turns.

    lead_in: an untimed step before each sample; without, long steps take half as long to time.
    """
    data = datasets.load_graph(graph)
    torch.manual_seed(0)
    x = _features(data, widths[0])
    y = torch.randint(widths[-1], (data.num_nodes,))
    first = Net(model, widths)
    size = (data.num_nodes, data.edge_index.size(1))
    result = Result(model, graph, widths, train, *size, torch.get_num_threads(), repeats, compiled, ablation)
    calls: dict[str, Callable[[], object]] = {}
    truth: list[Tensor] | None = None
    for name, (make, arguments, environment) in candidates(model, data, x, compiled, ablation).items():
        if only and name not in only:
            continue
        outcome = Outcome(name)
        result.outcomes.append(outcome)
        try:
            net = make(copy.deepcopy(first))
            step = _step(net, arguments, y, train)
            with _environment(environment):
                got = _loss_and_gradients(net, arguments, y, train)
                outcome.peak_bytes = peak_bytes(step)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            outcome.reason = f"raises: {str(error).splitlines()[0][:90]}"
            continue
        truth = got if truth is None else truth
        outcome.error = max(relative(a, b) for a, b in zip(got, truth, strict=True))
        if outcome.error > 1e-3:
            outcome.reason = f"differs from stock by {outcome.error:.1e}"
            continue
        calls[name] = as_alone(_within(environment, step), ours=not name.startswith("stock"))
        if after is not None:
            after(name)
    for name, call in calls.items():
        if not name.startswith("stock"):
            settle(call, minimum=12)
    floor = dense_floor(calls[OURS]) if ablation and OURS in calls else None
    if floor is not None:
        calls[NAME] = floor
        result.outcomes.append(Outcome(NAME))
    timings = measure(calls, repeats=repeats, warmup=1, sample_seconds=SAMPLE, lead_in=lead_in, after=after)
    for outcome in result.outcomes:
        outcome.timing = timings.get(outcome.name)
    HOIST.clear()
    return result


def candidates(model: str, data: Any, x: Tensor, compiled: bool, ablation: bool) -> dict[str, Any]:
    """By name: what to do with the net, the arguments of forward, environment variables."""
    plain = (x, data.edge_index)
    found: dict[str, Any] = {STOCK: (lambda net: net, plain, {})}
    if model not in UNFUSED:
        found["stock torch CSR"] = (_raw if model in NORMALISED else lambda net: net, (x, _csr(model, data, x)), {})
        sorted_index = EdgeIndex(data.edge_index, sparse_size=(data.num_nodes, data.num_nodes)).sort_by("col")[0]
        found["stock EdgeIndex"] = (lambda net: net, (x, sorted_index), {})
    if compiled:
        found[COMPILED] = (torch.compile, plain, {})
    plain = (x.clone(), data.edge_index)  # ours are moved into large pages (memory/pages.py), stock's are not
    found[OURS] = (accelerate, plain, {})
    if ablation:
        found["our plans, torch kernels"] = (accelerate, plain, {"STRETTO_BACKEND": "torch"})
        if "stock torch CSR" in found:  # what the allocator alone would give the best of stock
            found["torch CSR, freed memory kept"] = found["stock torch CSR"]
        found["our kernels, stock order"] = (accelerate, plain, {"STRETTO_PLAN": "stock"})
    return found


def _csr(model: str, data: Any, x: Tensor) -> Tensor:
    index, weight = data.edge_index, torch.ones(data.edge_index.size(1))
    if model in NORMALISED:
        loops = model != "tag"
        index, weight = gcn_norm(index, None, data.num_nodes, add_self_loops=loops, dtype=x.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = (data.num_nodes, data.num_nodes)
        return torch.sparse_coo_tensor(index.flip(0), weight, size).to_sparse_csr()


def _raw(net: nn.Module) -> nn.Module:
    """Stock with the norm already in the adjacency: the best a careful user gets."""
    for module in net.modules():
        if isinstance(module, (pyg.GCNConv, pyg.TAGConv, pyg.APPNP)):
            module.normalize = False
    return net


def _loss(net: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor:
    return F.cross_entropy(net(*arguments), y)


def _step(net: nn.Module, arguments: tuple[Any, ...], y: Tensor, train: bool) -> Callable[[], None]:
    if not train:
        net.eval()

        def infer() -> None:
            with torch.no_grad():
                net(*arguments)

        return infer
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        _loss(net, arguments, y).backward()
        optimizer.step()

    return step


def _loss_and_gradients(net: nn.Module, arguments: tuple[Any, ...], y: Tensor, train: bool) -> list[Tensor]:
    net.zero_grad()
    if not train:
        with torch.no_grad():
            return [net(*arguments)]
    loss = _loss(net, arguments, y)
    loss.backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return [loss.detach(), *grads]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def _features(data: datasets.Dataset, width: int) -> Tensor:
    """The graph's own features cut to the width, or random ones where it has too few."""
    if data.x is not None and data.x.size(1) >= width:
        return data.x[:, :width].contiguous()
    return torch.randn(data.num_nodes, width)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _within(values: dict[str, str], call: Callable[[], None]) -> Callable[[], None]:
    def within() -> None:
        with _environment(values):
            call()

    return within if values else call


def show(out: Any, result: Result) -> None:
    """One result as a table."""
    words = [f"{result.model} {'-'.join(map(str, result.widths))}", result.graph]
    words += ["training step" if result.train else "inference", f"{result.threads} threads"]
    table = Table("candidate", title=escape(", ".join(words)), title_justify="left", title_style="bold")
    for column in ("median ms", "q20 - q80", "peak MiB", "error", "times ours"):
        table.add_column(column, justify="right")
    ours = result.get(OURS)
    for o in sorted(result.outcomes, key=lambda o: o.timing.median if o.timing else float("inf")):
        peak = "" if o.peak_bytes is None else f"{o.peak_bytes / 2**20:.0f}"
        error = "" if o.error is None else f"{o.error:.1e}"
        if o.timing is None:
            table.add_row(o.name, "-", escape(o.reason), peak, error, "", style="dim")
            continue
        times = f"{o.timing.median / ours.timing.median:.2f}" if ours and ours.timing else ""
        cells = (report.milliseconds(o.timing), report.spread(o.timing), peak, error, times)
        table.add_row(o.name, *cells, style="bold" if o.name == OURS else "")
    out.print(table)
    out.print(f"repeat: {result.command()}", soft_wrap=True, style="dim", highlight=False, markup=False)
    out.print()


def numbers(name: str, text: str) -> list[int]:
    """Comma-separated positive numbers of an option."""
    parts = [part for part in text.split(",") if part]
    expect(all(p.isdecimal() and int(p) > 0 for p in parts), f"bench: {name!r} is {text!r}, wanted numbers with commas")
    return [int(part) for part in parts]


def check_models(names: str) -> None:
    """Comma-separated names of models, or an error."""
    for name in names.split(","):
        expect(name in LAYERS, f"bench: 'model' is {name!r}, wanted some of {', '.join(LAYERS)}")


def command(
    graph: Annotated[str, typer.Option(help="cora, a .npz, rmat:SCALE:EDGES, er:N:E, grid:N, ...")] = "",
    model: Annotated[str, typer.Option(help=f"comma-separated, of {', '.join(LAYERS)}")] = "gcn,sage,gin",
    layer: Annotated[str, typer.Option(help=f"one layer instead: of {', '.join(layers.LAYERS)}, or all")] = "",
    widths: Annotated[str, typer.Option(help="features,hidden,...,classes; of a layer: in,out")] = "",
    eval_: Annotated[bool, typer.Option("--eval", help="inference instead of training steps")] = False,
    threads: Annotated[int, typer.Option(help="threads; 0: as torch has them")] = 0,
    repeats: Annotated[int, typer.Option(help="timed rounds")] = 5,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="torch.compile of stock, too; without --layer the default"),
    ] = None,
    ablation: Annotated[bool, typer.Option(help="also re-association alone and kernels alone")] = True,
    csv: Annotated[Path | None, typer.Option(help="put the rows into this file")] = None,
) -> None:
    """Training steps (or inference) of PyG models: stock in every form, and with two lines added."""
    out = console()
    out.print(facts.headline(), style="dim")
    sizes = numbers("widths", widths or ("" if layer else "128,256,40"))
    compiled = not layer if compiled is None else compiled
    rows: list[results.Row] = []
    if layer:
        names = list(layers.LAYERS) if layer == "all" else layer.split(",")
        for name in names:
            expect(name in layers.LAYERS, f"bench: 'layer' is {name!r}, wanted some of {', '.join(layers.LAYERS)}")
        expect(len(sizes) in (0, 2), f"bench: 'widths' is {widths!r}, wanted in,out")
        with use_threads(threads or torch.get_num_threads()):
            for name in names:
                pair = (sizes[0], sizes[1]) if sizes else None
                with progress(3 + (repeats + 2) * 3, name) as after:
                    found = layers.run(name, graph, pair, repeats=repeats, compiled=compiled, after=after)
                layers.show(out, found)
                rows.append(found.to_row())
        results.save(csv, rows)
        return
    graph = graph or "rmat:17:1200000"
    expect(len(sizes) > 1, f"bench: 'widths' is {widths!r}, wanted features,hidden,...,classes")
    check_models(model)
    with use_threads(threads or torch.get_num_threads()):
        for name in model.split(","):
            with progress(7 + (repeats + 1) * 7, name) as after:
                result = run(
                    name,
                    graph,
                    sizes,
                    train=not eval_,
                    repeats=repeats,
                    compiled=compiled,
                    ablation=ablation,
                    after=after,
                )
            show(out, result)
            rows.append(result.to_row())
    results.save(csv, rows)
