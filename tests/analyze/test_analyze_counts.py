"""Counted from a trace, predicted from a probe, written by hand: three ways to the same number, exactly."""

import math

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Data

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.lift import SYMBOLS, Sizes, peak, rescale, shrunk, usable
from stretto.observe.models import HEADS, HOPS, MODELS, as_data, make
from stretto.observe.workload import Workload
from tests.analyze.written_by_hand import FORWARD

NINE = ("gcn", "sage", "gin", "gat", "edgeconv", "sgc", "cheb", "appnp", "tag")


def cora(width: int = 48) -> Data:
    data = as_data(datasets.load_graph("cora"))
    data.x = data.x[:, :width].contiguous()
    return data


def looped() -> Data:
    """Self-loops, duplicate edges, an isolated node, directed."""
    edge_index = torch.tensor([[0, 1, 1, 1, 2, 3, 3, 4, 0], [1, 0, 1, 2, 2, 4, 4, 4, 3]])
    torch.manual_seed(0)
    return Data(
        x=torch.randn(7, 12),
        edge_index=edge_index,
        y=torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        train_mask=torch.arange(7) < 4,
    )


def random(num_nodes: int, edges: int, width: int) -> Data:
    dataset = datasets.load_graph(f"er:{num_nodes}:{edges}")
    data = as_data(dataset, width=width)
    data.y = data.y % 4
    return data


CASES = [
    *[pytest.param(cora, name, "train", id=f"cora-{name}-train") for name in NINE],
    *[pytest.param(looped, name, mode, id=f"looped-{name}-{mode}") for name in MODELS for mode in ("train", "infer")],
]


def probe(data, widths):
    """The data cut to the first sizes that clash with none of these widths."""
    sizes = usable(data, widths)[0]
    return shrunk(data, sizes), sizes


@pytest.mark.parametrize(("graph", "name", "mode"), CASES)
def test_predicted_from_a_probe_equals_counted(graph, name, mode):
    data = graph()
    model = make(name, data.x.size(1), 16, int(data.y.max()) + 1)
    counted = Workload(model, data, mode).trace()
    small, sizes = probe(data, {data.x.size(1), 16, 7, 4})
    lifted = rescale(Workload(model, small, mode).trace(), sizes.table(Sizes.of(data).numbers()))
    assert [op.name for op in lifted] == [op.name for op in counted]
    assert lifted.flops == counted.flops
    assert lifted.bytes == counted.bytes
    assert lifted.peak_bytes == counted.peak_bytes == peak(counted)
    assert counted.unknown == []


def forward_flops(name: str, data: Data, model: torch.nn.Module) -> int:
    trace = Workload(model, data, "infer").trace()
    return trace.flops


@pytest.mark.parametrize("name", NINE)
def test_by_hand_equals_counted(name):
    data = cora()
    sizes = Sizes.of(data).numbers()
    model = make(name, 48, 0, 8, 1)
    conv = model.convs[0] if hasattr(model, "convs") else getattr(model, "conv", model)
    values = {**sizes, "k": 48, "c": 8, "H": HEADS, "K": HOPS}
    formula = FORWARD[type(conv).__name__]
    by_hand = int(formula.subs({s: values[s.name] for s in formula.free_symbols}))
    outside = 2 * data.num_nodes * 48 * 8 + data.num_nodes * 8 if hasattr(model, "lin") and name == "appnp" else 0
    assert forward_flops(name, data, model) == by_hand + outside


def backward_flops(name: str) -> dict[str, int]:
    """Of two layers, 48 -> 16 -> 7 columns, on Cora: products, and sums of rows."""
    first, second = 2 * 2708 * 48 * 16, 2 * 2708 * 16 * 7  # the gradient of X, which is no parameter, is not made
    loss = 140 * 7  # rows with a label go back to their places
    if name == "gcn":  # multiplies, then sums, with self-loops
        return {"gemm": first + 2 * second, "scatter": (10556 + 2708) * (16 + 7) + loss}
    return {"gemm": 2 * (first + 2 * second), "scatter": 10556 * 16 + loss}  # two weights; sums, then multiplies


@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_a_backward_pass_by_hand_equals_counted(name):
    backward = [op for op in Workload(make(name, 48, 16, 7), cora()).trace() if op.phase == "backward"]
    for family, flops in backward_flops(name).items():
        assert sum(op.cost.flops for op in backward if op.cost.family == family) == flops


def exponent(counts: list[float], sizes: list[float]) -> float:
    return math.log(counts[-1] / counts[0]) / math.log(sizes[-1] / sizes[0])


@pytest.mark.parametrize("name", NINE)
def test_growth_in_the_graph(name):
    """All else fixed, work is of degree 1 in (n, m) together."""
    counts = []
    for factor in (1, 8):
        data = random(500 * factor, 4000 * factor, 16)
        edges = data.edge_index[:, : 6000 * factor]  # as many edges per node each time
        data.edge_index = edges
        counts.append(Workload(make(name, 16, 16, 4), data, "infer").trace().flops)
    assert exponent(counts, [1, 8]) == pytest.approx(1.0, abs=0.05)


def varied(name: str, nodes: int, edges: int) -> float:
    """Flops on a graph without self-loops of exactly these sizes; lifted, so that any size is possible."""
    data = random(400, 3000, 16)
    data.train_mask = torch.ones(data.num_nodes, dtype=torch.bool)
    small, sizes = probe(data, {16, 4})
    trace = Workload(make(name, 16, 16, 4), small, "infer").trace()
    return float(rescale(trace, sizes.table({"n": nodes, "m": edges, "a": edges, "e": edges + nodes, "t": 0})).flops)


@pytest.mark.parametrize("name", NINE)
def test_growth_in_nodes_and_in_edges_apart(name):
    """Work is a n + b m: what is left when the other's share is taken away grows with exponent 1."""
    least = 1000
    of_edges = [varied(name, least, m) - varied(name, least, 0) for m in (4000, 64000)]
    of_nodes = [varied(name, n, 0) for n in (1000, 16000)]
    assert exponent(of_edges, [1, 16]) == pytest.approx(1.0, abs=0.05)
    assert exponent(of_nodes, [1, 16]) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", ["SGConv", "TAGConv", "ChebConv", "APPNP"])
def test_growth_in_hops(name):
    """Work beyond the first hop grows with exponent 1 in T."""
    data, conv = random(300, 2000, 16), getattr(pyg, name)
    counts = []
    for hops in (2, 4, 32):
        torch.manual_seed(0)
        layer = conv(K=hops, alpha=0.1) if name == "APPNP" else conv(16, 16, K=hops)
        counts.append(float(Workload(layer, data, "infer").trace().flops))
    assert exponent([counts[1] - counts[0], counts[2] - counts[0]], [2, 30]) == pytest.approx(1.0, abs=0.05)


def fitted(name: str, sizes: list[tuple[int, int]]) -> tuple[float, float]:
    """Exponents of the width and of the layers."""
    data = random(60, 300, 8)
    counts = []
    for width, layers in sizes:
        data.x = torch.randn(data.num_nodes, width)
        counts.append(Workload(make(name, width, width, width, layers), data, "infer").trace().flops)
    return math.log(counts[1] / counts[0]), math.log(sizes[1][0] / sizes[0][0] * sizes[1][1] / sizes[0][1])


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "gat", "edgeconv", "cheb", "tag"])
def test_growth_in_layers(name):
    grown, scale = fitted(name, [(32, 2), (32, 8)])
    assert grown / scale == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("name", "power"), [("gcn", 2), ("sage", 2), ("gin", 2), ("edgeconv", 2), ("cheb", 2), ("tag", 2)]
)
def test_growth_in_the_width_is_quadratic_where_products_dominate(name, power):
    data = random(400, 500, 8)
    data.edge_index = data.edge_index[:, :40]
    if name == "edgeconv":
        data.edge_index = random(400, 3000, 8).edge_index
    counts = []
    for width in (512, 2048):
        data.x = torch.randn(data.num_nodes, width)
        counts.append(_symbolic_count(name, data, width))
    assert exponent(counts, [512, 2048]) == pytest.approx(power, abs=0.05)


def _symbolic_count(name: str, data: Data, width: int) -> float:
    """From the probe, so that wide products need not run at full size."""
    model = make(name, width, width, width, 1)
    small, sizes = probe(data, {width})
    lifted = rescale(Workload(model, small, "infer").trace(), sizes.table(Sizes.of(data).numbers()))
    return float(lifted.flops)


class Weighted(torch.nn.Module):
    """A layer that reads a value of every edge; a loop keeps its own, and a node without one gets one."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GCNConv(12, 8)

    def forward(self, x, edge_index, edge_weight):
        return self.conv(x, edge_index, edge_weight)


@pytest.mark.parametrize("loops", [0, 1, 5])
def test_self_loops_are_a_size_of_their_own(loops):
    data, model = random(60, 200, 12), Weighted()
    edges = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    data.edge_index = torch.cat([edges, torch.arange(loops).repeat(2, 1)], 1)
    data.edge_weight = torch.rand(data.num_edges)
    report, counted = stretto.analyze(model, data, machine=Machine(), procs=[1]), Workload(model, data).trace()
    assert report.lifted
    assert (report.work, report.bytes) == (counted.flops, counted.bytes)
    assert report.trace.peak_bytes == counted.peak_bytes


@pytest.mark.parametrize("name", ["gat", "gatv2", "agnn", "arma"])
def test_what_one_node_shares_with_itself_is_not_summed(name):
    data = Data(x=torch.randn(1, 12), edge_index=torch.zeros(2, 3, dtype=torch.long), y=torch.zeros(1).long())
    model = make(name, 12, 16, 5)
    report, counted = stretto.analyze(model, data, machine=Machine(), procs=[1]), Workload(model, data).trace()
    assert (report.work, report.bytes) == (counted.flops, counted.bytes)


@pytest.mark.parametrize("count", [60, 30, 90], ids=["as many edges as nodes", "fewer", "more"])
def test_what_is_on_edges_is_told_from_nodes(count):
    """SAGE: a row is gathered and summed for every edge, forward; its first layer needs no gradient there."""
    data = random(60, 200, 12)
    data.edge_index = data.edge_index[:, :count]
    conv = pyg.SAGEConv(12, 8, aggr="sum")
    report = stretto.analyze(conv, data, machine=Machine(), procs=[1], mode="infer")
    assert report.split["sparse"]["flops"] == count * 12
    assert report.split["dense"]["flops"] == 60 * (2 * 2 * 12 * 8 + 2 * 8)
    assert report.memory["edge tensors made"] == 4 * count * 12
    (fuse,) = (way for way in report.rewrites if way.rule == "fuse")
    assert fuse.bytes == 2 * 4 * count * 12  # one gathered row for every edge, written and read


def test_symbols():
    data = cora()
    small, sizes = probe(data, {48, 16, 7})
    symbolic = rescale(Workload(make("gcn", 48, 0, 7, 1), small, "infer").trace(), sizes.table(SYMBOLS))
    n, m, e = SYMBOLS["n"], SYMBOLS["m"], SYMBOLS["e"]
    assert symbolic.flops.expand() == (m + 3 * e + 3 * n + 2 * n * 48 * 7 + 2 * e * 7 + n * 7).expand()


def test_accelerated_ops_are_counted_as_declared():
    from stretto import Graph, ops
    from stretto.kernels import native

    if native.library() is None:
        pytest.skip(f"native kernels are off: {native.why_not()}")
    data = cora(16)
    graph = Graph.of(data.edge_index, data.num_nodes)

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(16, 8)

        def forward(self, x, edge_index):
            return ops.spmm(graph, self.lin(x))

    trace = Workload(Sum(), data).trace()
    kernels = [op for op in trace if op.name == "stretto::spmm"]
    assert [op.phase for op in kernels] == ["forward", "backward"]
    x = torch.empty(data.num_nodes, 8)
    for op in kernels:
        assert op.cost.flops == ops.OPS["spmm"].flops(graph, x)
        assert op.cost.bytes == ops.OPS["spmm"].bytes(graph, x)


def test_kernels_are_put_back():
    from stretto import kernels

    before = kernels.backend
    Workload(make("gcn", 48, 0, 7, 1), cora()).trace()
    assert kernels.backend is before


def test_backward_ops_know_their_module_and_forward_op():
    trace = Workload(make("gat", 48, 8, 7), cora()).trace()
    backward = [op for op in trace if op.phase == "backward" and op.cost.family != "view" and op.site is not None]
    assert {op.path for op in backward} >= {"convs.0", "convs.1", "convs.0.lin", "convs.1.lin"}
    for op in backward:
        assert trace.ops[op.site].phase == "forward"
        assert trace.ops[op.site].path == op.path
    lifted = [op for op in backward if op.name.startswith(("aten::index_add", "aten::index_put", "aten::scatter_add"))]
    assert lifted, "the backward of a gather is a scatter"
    assert {trace.ops[op.site].cost.family for op in lifted} == {"gather"}
