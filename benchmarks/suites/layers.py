"""`stretto bench models --layer NAME`: forward and backward of one layer, its time and its memory above its inputs and
outputs; stock, torch.compile of stock, and ours. Gradients go to the parameters, to x and to edge
features, but for those of molecules, which are data. Names that end in -fresh get new mini-batches at every call;
SchNet and CGCNN are whole training steps on such batches (scenes.py). Every sample follows an untimed call of its
own kind, as a step of training does: not one of stock, which leaves its gigabytes in the caches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_geometric.nn
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch_geometric.nn.models.schnet import CFConv, ShiftedSoftplus

from benchmarks.suites import report, results, scenes
from benchmarks.suites.case import Outcome, details, reasons
from benchmarks.suites.scenes import BATCHES, CUTOFF, Scene
from stretto import datasets
from stretto.compile import Order
from stretto.layers import gat, record_of
from stretto.machine import facts as machine
from stretto.machine.timing import as_alone, measure
from stretto.observe.peak_memory import peak_bytes, tensor_bytes
from stretto.page.terminal import Step
from stretto.plug.accelerate import accelerate

OURS, STOCK = "stretto", "stock edge_index"
UPDATE_FIRST = "stretto, update first"
pyg: Any = torch_geometric.nn


@dataclass(frozen=True)
class Layer:
    """How to build a layer between two widths, how wide its edge features are, and on what it is measured.

    kind: "same" input again and again, "fresh" mini-batches, or training "steps". orders: ours also with the projection
    before the sum over neighbours.
    """

    make: Callable[[int, int, Any], nn.Module]
    edge_dim: int = 0
    molecules: bool = False
    widths: tuple[int, int] = (128, 256)
    kind: str = "same"
    graph: str = "rmat:17:1200000"
    orders: bool = False
    arrays: int = 0  # arrays of edges x out that stock holds at its peak, where they may not fit


def _pna(i: int, o: int, data: datasets.Dataset) -> nn.Module:
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    names, scalers = ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"]
    conv: nn.Module = pyg.PNAConv(i, o, names, scalers, torch.bincount(degree))
    return conv


def _filters(i: int, o: int, data: datasets.Dataset) -> nn.Module:
    net = nn.Sequential(nn.Linear(50, o), ShiftedSoftplus(), nn.Linear(o, o))
    make: Callable[..., nn.Module] = CFConv  # abstract to a type checker
    return make(i, o, o, net, CUTOFF)


def _mlp(i: int, o: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, hidden), nn.ReLU(), nn.Linear(hidden, o))


def _gine(i: int, o: int, data: datasets.Dataset) -> nn.Module:
    conv: nn.Module = pyg.GINEConv(_mlp(i, o, o), edge_dim=50)
    return conv


LAYERS: dict[str, Layer] = {
    "GATConv": Layer(lambda i, o, data: pyg.GATConv(i, o // 4, heads=4)),
    "GATv2Conv": Layer(lambda i, o, data: pyg.GATv2Conv(i, o // 4, heads=4)),
    "TransformerConv": Layer(lambda i, o, data: pyg.TransformerConv(i, o // 4, heads=4)),
    "GATConv-wide": Layer(lambda i, o, data: pyg.GATConv(i, o), widths=(32, 2048), graph="rmat:11:93000", orders=True),
    "PNAConv": Layer(_pna),
    "GENConv": Layer(lambda i, o, data: pyg.GENConv(i, o), arrays=10),
    "EdgeConv": Layer(lambda i, o, data: pyg.EdgeConv(_mlp(2 * i, o, o)), widths=(64, 64)),
    "FiLMConv": Layer(lambda i, o, data: pyg.FiLMConv(i, o)),
    "ResGatedGraphConv": Layer(lambda i, o, data: pyg.ResGatedGraphConv(i, o, edge_dim=16), 16),
    "NNConv": Layer(
        lambda i, o, data: pyg.NNConv(i, o, _mlp(16, i * o, 64), aggr="mean"), 16, widths=(64, 64), arrays=133
    ),  # its weights of an edge: 64 x 64
    "CFConv": Layer(_filters, 50, True, (128, 128)),
    "CGConv": Layer(lambda i, o, data: pyg.CGConv(i, 50), 50, True, (64, 64)),
    "GINEConv": Layer(_gine, 50, True, (64, 64)),
    "CFConv-fresh": Layer(_filters, 50, True, (128, 128), "fresh"),
    "CGConv-fresh": Layer(lambda i, o, data: pyg.CGConv(i, 50), 50, True, (64, 64), "fresh"),
    "GINEConv-fresh": Layer(_gine, 50, True, (64, 64), "fresh"),
    "SchNet": Layer(lambda i, o, data: scenes.SchNetStep(i), 50, True, (128, 1), "steps"),
    "CGCNN": Layer(lambda i, o, data: scenes.CrystalStep(i), 50, True, (64, 1), "steps"),
}


@dataclass
class Result:
    """A layer on a graph and what was measured."""

    layer: str
    graph: str
    widths: tuple[int, int]
    num_nodes: int
    num_edges: int
    repeats: int
    threads: int
    ends_bytes: int  # inputs, outputs, parameters' gradients: what any candidate must hold
    compiled: bool = False
    plan: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    def get(self, name: str) -> Outcome | None:
        return next((o for o in self.outcomes if o.name == name and o.timing), None)

    def command(self) -> str:
        widths = ",".join(map(str, self.widths))
        return (
            f"stretto bench models --layer {self.layer} --graph {self.graph} --widths {widths} "
            f"--threads {self.threads} --repeats {self.repeats}{' --compile' if self.compiled else ''}"
        )

    def to_row(self) -> results.Row:
        """As it is written down."""
        timings = {o.name: o.timing for o in self.outcomes if o.timing is not None}
        case = {"layer": self.layer, "graph": self.graph, "widths": "-".join(map(str, self.widths))}
        mib = {o.name: o.peak_bytes / 2**20 for o in self.outcomes if o.peak_bytes is not None}
        more = {"plan": self.plan, "ends_mib": self.ends_bytes / 2**20, "update_first_mib": mib.get(UPDATE_FIRST)}
        more |= details(self.outcomes, OURS, STOCK)
        return results.row(
            "layers", case, results.figures(timings), command=self.command(), threads=self.threads, stock=STOCK,
            rivals=[name for name in timings if name.startswith("stock")],
            note=reasons(self.outcomes), more={"nodes": self.num_nodes, "edges": self.num_edges} | more,
        )  # fmt: skip


def run(
    name: str,
    graph: str = "",
    widths: tuple[int, int] | None = None,
    *,
    repeats: int = 5,
    compiled: bool = False,
    after: Step = lambda name: None,
) -> Result:
    """Check every candidate against stock, measure its memory, then time all in turns."""
    layer = LAYERS[name]
    graph = graph or ("qm9-20k" if layer.molecules else layer.graph)
    i, o = widths or layer.widths
    torch.manual_seed(0)
    first, scene = _scene(name, layer, graph, i, o)
    ends = scene.ends + tensor_bytes(*first.parameters())
    shape = (scene.num_nodes, scene.num_edges)
    result = Result(name, graph, (i, o), *shape, repeats, torch.get_num_threads(), ends, compiled)
    calls: dict[str, Callable[[], object]] = {}
    truth: list[Tensor] = []  # of stock, which is the first
    for label, make in _candidates(layer, compiled).items():
        outcome = Outcome(label)
        result.outcomes.append(outcome)
        net = make(copy.deepcopy(first))
        arrays = 0 if not label.startswith("stock") else 8 if layer.orders else layer.arrays
        call = _checked(outcome, net, scene, truth, 4 * arrays * scene.num_edges * o)
        if label == OURS:
            result.plan = _plans(net)
        if call is not None:
            calls[label] = as_alone(call, ours=not label.startswith("stock"))
            after(label)
    truth.clear()
    timings = measure(calls, repeats=repeats, warmup=2, sample_seconds=0.05, lead_in=True, after=after)
    for outcome in result.outcomes:
        outcome.timing = timings.get(outcome.name)
    return result


def _candidates(layer: Layer, compiled: bool) -> dict[str, Callable[[Any], Any]]:
    """What is done with the layer, by the name of the candidate."""
    makers: dict[str, Callable[[Any], Any]] = {STOCK: lambda net: net}
    if compiled:
        makers["stock torch.compile"] = torch.compile
    makers[OURS] = accelerate
    if layer.orders:
        makers[UPDATE_FIRST] = lambda net: _UpdateFirst(accelerate(net))
    return makers


def _checked(outcome: Outcome, net: Any, scene: Scene, truth: list[Tensor], need: int) -> Callable[[], object] | None:
    """The call to time, of a candidate that agrees with stock; of another the outcome says what was wrong.

    truth: the results of stock, empty until there are any. need: bytes without which it is not tried.
    """
    if need > 0.9 * machine.memory_bytes("MemAvailable"):
        outcome.reason = f"needs {need / 2**30:.0f} GiB"
        return None
    try:
        got = scene.check(net)
        truth[:] = truth or got
        outcome.error = _error(got, truth)
        del got
        call = scene.call(net)
        outcome.peak_bytes = max(peak_bytes(call) - scene.result_bytes, 0)
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        outcome.reason = f"raises: {str(error).splitlines()[0][:90]}"
        return None
    if outcome.error > 1e-3:
        outcome.reason = f"differs from stock by {outcome.error:.1e}"
        return None
    return call


def _plans(net: nn.Module) -> str:
    """How the layers of an accelerated model ran, or why they ran as stock."""
    records = [record_of(module) for module in net.modules()]
    plans = [record.plan or record.reason for record in records if record.calls]
    return ", ".join(dict.fromkeys(plan for plan in plans if plan))


def _scene(name: str, layer: Layer, graph: str, i: int, o: int) -> tuple[nn.Module, Scene]:
    """The layer, and what it is measured on."""
    if layer.kind == "steps":
        made = scenes.batches(graph, BATCHES // 2, near=name == "SchNet")
        return layer.make(i, o, None), scenes.Steps(made)
    if layer.molecules:
        net = layer.make(i, o, None)
        inputs = [_of_molecules(layer, m, i) for m in scenes.batches(graph, BATCHES if layer.kind == "fresh" else 1)]
        fresh = layer.kind == "fresh"
        return net, scenes.Fresh(net, inputs) if fresh else scenes.Same(net, inputs[0], inputs[0][0].size(0))
    data = datasets.load_graph(graph)
    net = layer.make(i, o, data)
    x = torch.randn(data.num_nodes, i, requires_grad=True)
    attr = (torch.randn(data.edge_index.size(1), layer.edge_dim, requires_grad=True),) if layer.edge_dim else ()
    probe = copy.deepcopy(net)  # of a wide layer ours: stock's messages may not fit
    return net, scenes.Same(
        accelerate(probe) if layer.orders or layer.arrays else probe, (x, data.edge_index, *attr), data.num_nodes
    )


def _of_molecules(layer: Layer, given: scenes.Molecules, width: int) -> tuple[Any, ...]:
    length, attr = given.attributes()
    x = torch.randn(given.z.numel(), width, requires_grad=True)
    return (x, given.index, *((length,) if layer.make is _filters else ()), attr)  # nobody learns lengths


class _UpdateFirst(nn.Module):
    """An accelerated GATConv that projects before it sums, whatever the sizes."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, *inputs: Any) -> Tensor:
        before, gat.ordered = gat.ordered, lambda *_: (Order(gat.REUSE, (), 0), None, None)
        try:
            result: Tensor = self.conv(*inputs)
            return result
        finally:
            gat.ordered = before


def _error(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative difference; a gradient that is zero but for rounding is measured by the others."""
    norms = [float(w.double().norm()) for w in wanted]
    least = max(1e-3 * max(norms), 1e-30)
    errors = [float((g.double() - w.double()).norm()) for g, w in zip(got, wanted, strict=True)]
    return max(e / max(n, least) for e, n in zip(errors, norms, strict=True))


def show(out: Any, result: Result) -> None:
    """One result as a table."""
    i, o = result.widths
    title = f"{result.layer} {i}-{o}, {result.graph}, forward + backward, {result.threads} threads"
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    table.add_column("candidate")
    for column in ("median ms", "q20 - q80", "peak MiB", "times ours", "peak, times ours", "error"):
        table.add_column(column, justify="right")
    ours = result.get(OURS)
    for outcome in result.outcomes:
        peak = "" if outcome.peak_bytes is None else f"{outcome.peak_bytes / 2**20:.0f}"
        error = "" if outcome.error is None else f"{outcome.error:.1e}"
        if outcome.timing is None:
            table.add_row(outcome.name, "-", escape(outcome.reason), peak, "", "", error, style="dim")
            continue
        times = memory = ""
        if ours is not None and ours.timing is not None:
            times = f"{outcome.timing.median / ours.timing.median:.2f}"
            memory = f"{(outcome.peak_bytes or 0) / max(ours.peak_bytes or 0, 1):.1f}"
        cells = (report.milliseconds(outcome.timing), report.spread(outcome.timing), peak, times, memory, error)
        table.add_row(outcome.name, *cells, style="bold" if outcome.name == OURS else "")
    out.print(table)
    ends = f"inputs, outputs and parameters: {result.ends_bytes / 2**20:.0f} MiB"
    out.print(f"ours: {result.plan}; {ends}", soft_wrap=True, style="dim", highlight=False)
    out.print(f"repeat: {result.command()}", soft_wrap=True, style="dim", highlight=False, markup=False)
    out.print()
