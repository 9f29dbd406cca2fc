"""Models as users write them: several views of one tensor, own aggregations, sizes of their own, types, loaders."""

import logging

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.utils import dropout_edge

import stretto.analyze
import stretto.profile
from stretto import NeighborLoader, StrettoError, datasets
from stretto.analyze import Machine
from stretto.observe import look
from stretto.observe.lift import Sizes, difference, rescale, shrunk, usable
from stretto.observe.models import as_data, make
from stretto.observe.trace import Recorder
from stretto.observe.workload import Workload

MACHINE = Machine(memory=1e10)


def graph(width=32):
    return as_data(datasets.load_graph("er:400:1600"), width=width)


class Call(torch.nn.Module):
    """forward of a function over one inner module."""

    def __init__(self, inner, function):
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x, edge_index):
        return self.function(self.inner, x, edge_index)


def unbound(lin, x, edge_index):
    row, col = edge_index
    return torch.zeros(x.size(0), 8).index_add(0, col, lin(x)[row])


def chunked(conv, x, edge_index):
    a, b = conv(x, edge_index).chunk(2, 1)
    return a * b.sigmoid()


def split(conv, x, edge_index):
    a, b, c = conv(x, edge_index).split([4, 8, 4], 1)
    return b + torch.cat([a, c], 1)


def dropped(conv, x, edge_index):
    return conv(x, dropout_edge(edge_index, p=0.5)[0])


VIEWS = {
    "unbind": lambda: Call(torch.nn.Linear(32, 8), unbound),
    "chunk": lambda: Call(pyg.GCNConv(32, 16), chunked),
    "split": lambda: Call(pyg.GCNConv(32, 16), split),
    "dropout_edge": lambda: Call(pyg.GCNConv(32, 8), dropped),
}


@pytest.mark.parametrize("name", VIEWS)
def test_several_views_of_one_tensor(name):
    data, model = graph(), VIEWS[name]()
    for op in Workload(model, data).trace():
        assert all(before < op.index for before in op.deps), op.name
    report = stretto.analyze(model, data, machine=MACHINE, procs=[1, 2])
    assert report.depth.launches > 3


def test_views_wait_for_what_made_their_tensor():
    x = torch.randn(4, 6)
    recorder = Recorder()
    with recorder.recording():
        y = x + 1
        a, b = y.chunk(2, 1)
        a + b
    add, chunk, last = recorder.trace.ops
    assert (add.deps, chunk.deps, last.deps) == ((), (add.index,), (chunk.index,))


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.lin = pyg.GCNConv(32, 16), torch.nn.Linear(16, 3)

    def forward(self, x, edge_index, batch):
        return self.lin(pyg.global_mean_pool(self.conv(x, edge_index).relu(), batch))


class Typed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.RGCNConv(32, 8, 5)

    def forward(self, x, edge_index, edge_type):
        return self.conv(x, edge_index, edge_type)


def batch(count=50):
    torch.manual_seed(0)
    return Batch.from_data_list(
        [
            Data(x=torch.randn(20, 32), edge_index=torch.randint(20, (2, 60)), y=torch.tensor([i % 3]))
            for i in range(count)
        ]
    )


def typed():
    data = graph()
    data.edge_type = torch.randint(5, (data.num_edges,))
    return data


def by_target():
    return graph().sort(sort_by_row=False)


# name -> model, data, whether a probe can stand for it
SIZES = {
    "pooling keeps half": (lambda: pyg.GraphUNet(32, 16, 8, depth=2), graph, False),
    "graphs of a batch": (Pooled, batch, True),
    "edges by type": (Typed, typed, False),
    "edges at random": (VIEWS["dropout_edge"], graph, False),
    "as long as the longest row": (lambda: pyg.SAGEConv(32, 8, aggr="lstm"), by_target, False),
    "width near a size": (lambda: torch.nn.ModuleList([pyg.GCNConv(32, 24)])[0], graph, True),
    "normalised": (lambda: pyg.GCN(32, 16, 2, 8, norm="batch_norm"), graph, True),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_a_probe_cannot_foretell_is_counted(name):
    make_model, make_data, lifted = SIZES[name]
    torch.manual_seed(0)
    model, data = make_model(), make_data()
    report = stretto.analyze(model, data, machine=MACHINE, procs=[1, 2])
    torch.manual_seed(0)
    counted = Workload(model, data).trace()
    assert report.lifted == lifted
    assert bool(report.symbolic) == lifted
    assert any("do not agree" in remark for remark in report.remarks) != lifted
    if name != "edges at random":
        assert report.work == counted.flops
        assert report.trace.peak_bytes == counted.peak_bytes


def test_graphs_of_a_batch_are_a_symbol():
    report = stretto.analyze(Pooled(), batch(), machine=MACHINE, procs=[1])
    assert " g" in report.symbolic["flops formula"]
    assert Sizes.of(batch(7)).g == 7
    assert Sizes.of(graph()).g == 0


def test_a_guess_is_called_one_where_the_data_do_not_fit(monkeypatch, caplog):
    monkeypatch.setattr(look, "memory_here", lambda device: 1e6)
    model, data = pyg.GraphUNet(32, 16, 8, depth=2), graph()
    with caplog.at_level(logging.WARNING, logger="stretto"):
        report = stretto.analyze(model, data, machine=MACHINE, procs=[1])
    assert not report.lifted
    assert "guesses" in report.explain()
    assert "guesses" in caplog.text


def test_two_probes_tell_what_differs():
    data, model = graph(), make("gcn", 32, 16, 8)
    first, second = usable(data, {32, 16, 8})[:2]
    traces = [Workload(model, shrunk(data, sizes)).trace() for sizes in (first, second)]
    table = first.table({name: getattr(second, name) for name in "nmaet"})
    assert difference(rescale(traces[0], table), traces[1]) == ""
    assert "neither" in difference(traces[0], traces[1])
    other = Workload(make("sage", 32, 16, 8), shrunk(data, second)).trace()
    assert "where" in difference(rescale(traces[0], table), other)


def test_no_probe_is_used_whose_sizes_are_widths():
    data = graph()
    assert all(sizes.n != 61 for sizes in usable(data, {61}))
    assert all(sizes.n != 61 for sizes in usable(data, {62}))  # where pointers into 61 rows end
    assert len(usable(data, {64})) >= 4


def test_aggregation_in_the_models_own_forward():
    report = stretto.analyze(VIEWS["unbind"](), graph(), machine=MACHINE, procs=[1, 2])
    assert [(cost.path, cost.name) for cost in report.costs] == [("", "C, L")]
    (pull,) = [s for s in report.strategies if s.name == "partition + halo, pull"]
    assert pull.bytes > 4 * sum(report.partitions[1].halo) * 32  # the rows as they come in, and the weights


def test_pooling_in_the_models_own_forward_is_no_layer():
    class Inner(torch.nn.Module):
        def forward(self, x, edge_index):
            return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.lin = Inner(), torch.nn.Linear(32, 3)

        def forward(self, x, edge_index, batch):
            return self.lin(pyg.global_add_pool(self.inner(x, edge_index), batch))

    report = stretto.analyze(Outer(), batch(), machine=MACHINE, procs=[1])
    assert [cost.path for cost in report.costs] == ["inner"]


class EdgeAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.TransformerConv(32, 8, edge_dim=5)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, edge_attr)


def with_edge_features():
    data = graph()
    data.edge_attr = torch.rand(data.num_edges, 5)
    return data


CLASSES = {
    "GraphUNet": (lambda: pyg.GraphUNet(32, 16, 8, depth=2), graph, {"C, L"}),
    "RGCN": (Typed, typed, {"C, L"}),
    "ARMA": (lambda: pyg.ARMAConv(32, 8, num_layers=3), graph, {"C, R"}),
    "ARMA, shared": (lambda: pyg.ARMAConv(32, 8, num_layers=3, shared_weights=True), graph, {"C, R"}),
    "gated": (lambda: pyg.GatedGraphConv(32, 2), graph, {"C, L"}),  # a GRU after each round: no power of A
    "softmax by channel": (lambda: pyg.GENConv(32, 8, aggr="softmax"), graph, {"MP, L"}),
    "attention, edge features": (EdgeAttention, with_edge_features, {"MP, L"}),
    "accelerated GAT": (lambda: stretto.accelerate(make("gat", 32, 16, 8)), graph, {"A, L"}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_class_of_layers_with_graphs_of_their_own(name):
    make_model, make_data, wanted = CLASSES[name]
    report = stretto.analyze(make_model(), make_data(), machine=MACHINE, procs=[1])
    assert {cost.name for cost in report.costs} == wanted


def hetero():
    torch.manual_seed(0)
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(30, 8), torch.randn(40, 8)
    data["a", "to", "b"].edge_index = torch.randint(30, (2, 60))
    data["b", "back", "a"].edge_index = torch.randint(30, (2, 80))
    return data


class Relations(torch.nn.Module):
    def __init__(self):
        super().__init__()
        kinds = {("a", "to", "b"): pyg.SAGEConv(8, 4), ("b", "back", "a"): pyg.SAGEConv(8, 4)}
        self.conv = pyg.HeteroConv(kinds)

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)


def test_types_of_nodes_and_edges():
    report = stretto.analyze(Relations(), hetero(), machine=MACHINE, procs=[1, 2])
    assert (report.graph.num_nodes, report.graph.num_edges) == (70, 140)
    assert [cost.name for cost in report.costs] == ["C, L", "C, L"]
    assert report.work == Workload(Relations(), hetero()).trace().flops
    assert report.memory["inputs"] == 4 * 8 * 70 + 8 * 2 * 140
    assert "together" in report.explain()


def test_a_batch_of_a_loader():
    data = graph()
    loader = NeighborLoader(data, [5, 5], batch_size=64, input_nodes=torch.arange(400))
    report = stretto.analyze(make("sage", 32, 16, 8), loader, machine=MACHINE, procs=[1, 2])
    assert report.graph.num_nodes <= 400
    assert "one of 7 batches of the NeighborLoader" in report.explain()
    graphs = DataLoader(batch().to_data_list(), batch_size=10)
    report = stretto.analyze(Pooled(), graphs, machine=MACHINE, procs=[1])
    assert report.graph.num_nodes == 200


def test_arguments_of_forward_by_position():
    data, model = graph(), make("sage", 32, 16, 8)
    report = stretto.analyze(model, (data.x, data.edge_index), machine=MACHINE, procs=[1])
    assert report.graph.num_edges == data.num_edges
    with pytest.raises(StrettoError, match="without an edge_index"):
        stretto.analyze(model, (data.x,), machine=MACHINE)
    with pytest.raises(StrettoError, match="has 3 values"):
        stretto.analyze(model, (data.x, data.edge_index, data.y), machine=MACHINE)


def test_what_is_no_data_is_refused_in_words():
    model, data = make("sage", 32, 16, 8), graph()
    with pytest.raises(StrettoError, match="'data' is None"):
        stretto.analyze(model, None, machine=MACHINE)
    with pytest.raises(StrettoError, match="without a batch"):
        stretto.analyze(model, iter([]), machine=MACHINE)
    for shift, words in ((399, "names node 798, but there are 400"), (-1, "names node -1")):
        wrong = data.clone()
        wrong.edge_index = data.edge_index + shift
        with pytest.raises(StrettoError, match=words):
            stretto.analyze(model, wrong, machine=MACHINE)


MASKS = {
    "places": lambda n: torch.arange(50),
    "several splits": lambda n: torch.rand(n, 3) < 0.5,
    "of other nodes": lambda n: torch.ones(n + 1, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_that_the_loss_does_not_take(kind):
    """Its loss is over all nodes: a probe with a mask of its own would count another step."""
    data = graph()
    data.train_mask = MASKS[kind](data.num_nodes)
    report = stretto.analyze(make("gcn", 32, 16, 8), data, machine=MACHINE, procs=[1])
    counted = report.workload.trace()
    assert (report.work, report.bytes) == (counted.flops, counted.bytes)
    assert report.problem.targets == data.num_nodes


class ByName(torch.nn.Module):
    """forward takes everything by name."""

    def __init__(self):
        super().__init__()
        self.conv = pyg.GCNConv(32, 8)

    def forward(self, *, x, edge_index, edge_weight=None):
        return self.conv(x, edge_index, edge_weight)


def test_arguments_of_forward_by_name():
    data = graph()
    report = stretto.analyze(ByName(), data, machine=MACHINE, procs=[1])
    assert report.lifted
    assert report.work == Workload(pyg.GCNConv(32, 8), data).trace().flops
    data.edge_weight = torch.rand(data.num_edges)
    weighted = Workload(ByName(), data).trace()
    assert weighted.flops == Workload(pyg.GCNConv(32, 8), data).trace().flops
    with pytest.raises(StrettoError, match="forward of ByName wants 'x'"):
        stretto.profile(ByName(), Data(edge_index=data.edge_index, num_nodes=400), machine=MACHINE)


class Gives(torch.nn.Module):
    """A model whose output is what a function makes of the layer's."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = pyg.GCNConv(32, 8), function

    def forward(self, x, edge_index):
        return self.function(self.conv(x, edge_index))


def test_a_step_without_a_tensor_is_refused_in_words():
    for out in (None, [], {}, (None, "a"), {"a": None}):
        with pytest.raises(StrettoError, match="a step gives NoneType, wanted a tensor"):
            stretto.profile(Gives(lambda h, out=out: out), graph(), machine=MACHINE, repeats=1)
    plain = Workload(Gives(lambda h: h.sum()), graph()).trace().flops
    assert Workload(Gives(lambda h: (None, {"a": None, "b": [h]})), graph()).trace().flops == plain + 1  # 0 + b


def test_a_list_of_graphs_is_told_what_to_do():
    graphs = batch().to_data_list()
    for ask in (stretto.analyze, stretto.profile):
        with pytest.raises(StrettoError, match=r"'data' is \d+ Data, wanted one: .*Batch.from_data_list"):
            ask(Pooled(), graphs, machine=MACHINE)


def test_a_profile_of_a_loader_is_of_its_first_batch():
    loader = DataLoader(batch().to_data_list(), batch_size=10)
    profile = stretto.profile(Pooled(), loader, machine=MACHINE, repeats=1)
    assert "of the DataLoader" in profile.remarks[0]
    assert profile.remarks[0] in str(profile)
    assert profile.to_dict()["remarks"] == profile.remarks
    assert profile.workload.data.num_graphs == 10
    profile.recommend(repeats=2)
    with pytest.raises(StrettoError, match="profile: 'data' is a loader without a batch"):
        stretto.profile(Pooled(), iter([]), machine=MACHINE)
