"""Rows that a layer reads: given, learned by an embedding or a layer before, drawn anew in every step."""

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.utils import dropout_edge

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.models import Propagate, as_data, make

MACHINE = Machine(memory=1e10)
PULL = "partition + halo, pull"
NODES, WIDTH = 200, 12


def graph():
    return as_data(datasets.load_graph(f"er:{NODES}:800"), width=WIDTH)


def only_edges():
    return Data(edge_index=graph().edge_index, num_nodes=NODES)


def kinds_of_nodes():
    return Data(x=torch.arange(NODES) % 20, edge_index=graph().edge_index)


class Recommend(pyg.LightGCN):
    """Its forward wants pairs to rank; the step of these tests is the propagation."""

    def forward(self, edge_index):
        return self.get_embedding(edge_index)


class ByKind(torch.nn.Module):
    """Looks up what a node is."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = torch.nn.Embedding(20, WIDTH), pyg.GATConv(WIDTH, 8)

    def forward(self, x, edge_index):
        return self.conv(self.table(x), edge_index)


class Table(torch.nn.Module):
    """A parameter with a row for every node."""

    def __init__(self):
        super().__init__()
        self.rows, self.conv = torch.nn.Parameter(torch.randn(NODES, WIDTH)), pyg.SAGEConv(WIDTH, 8)

    def forward(self, edge_index):
        return self.conv(self.rows, edge_index)


LEARNED = {
    "LightGCN": (lambda: Recommend(NODES, WIDTH, 2), only_edges, ["C, L", "C, L"]),
    "by kind": (ByKind, kinds_of_nodes, ["A, L"]),
    "a row for every node": (Table, only_edges, ["C, L"]),
    "a layer before": (lambda: Propagate(torch.nn.Linear(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, 8)), graph, ["C, L"]),
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_rows_are_features_and_need_gradients(name):
    make_model, make_data, wanted = LEARNED[name]
    report = stretto.analyze(make_model(), make_data(), machine=MACHINE, procs=[1, 2])
    assert [cost.name for cost in report.costs] == wanted
    assert {layer.width_in for layer in report.layers} == {WIDTH}
    assert "cache A X" not in {way.rule for way in report.rewrites}
    (pull,) = [s for s in report.strategies if s.name == PULL]
    values = 2 * sum(report.partitions[1].halo) * WIDTH * len(wanted) + 2 * report.problem.parameters
    assert pull.bytes == 4 * values
    assert pull.syncs == 2 * len(wanted) + 1


def test_a_given_input_needs_no_gradient_wherever_it_is_read():
    """Two layers side by side read the features, and neither sends gradients back."""

    class Beside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (pyg.SAGEConv(WIDTH, 8) for _ in range(2))

        def forward(self, x, edge_index):
            return self.one(x, edge_index) + self.two(x, edge_index)

    report = stretto.analyze(Beside(), graph(), machine=MACHINE, procs=[1, 2])
    assert report.problem.forward_widths == [WIDTH, WIDTH]
    assert report.problem.backward_widths == []


class Drawn(torch.nn.Module):
    """A layer whose rows, or edges, pass through a function first."""

    def __init__(self, conv, rows=None, edges=None):
        super().__init__()
        self.conv, self.rows, self.edges = conv, rows, edges

    def forward(self, x, edge_index):
        if self.rows is not None:
            x = self.rows(x)
        if self.edges is not None:
            edge_index = self.edges(edge_index)
        return self.conv(x, edge_index)


def dropped_edges(edge_index):
    return dropout_edge(edge_index, p=0.5)[0]


RANDOM = {
    "dropout": {"rows": lambda x: F.dropout(x, 0.5)},
    "noise": {"rows": lambda x: x + torch.randn_like(x)},
    "edges dropped": {"edges": dropped_edges},
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("conv", [pyg.SAGEConv, pyg.GCNConv])
def test_what_is_drawn_anew_is_not_the_same_in_every_step(name, conv):
    def rules(model):
        report = stretto.analyze(model, graph(), machine=MACHINE, procs=[1])
        return {way.rule for way in report.rewrites if way.rule.startswith("cache")}

    plain = rules(Drawn(conv(WIDTH, 8)))
    assert plain
    kept = {"cache norm"} & plain if "rows" in RANDOM[name] else set()  # the edges are those of the data
    assert rules(Drawn(conv(WIDTH, 8), **RANDOM[name])) == kept


def test_exchanged_values_are_as_wide_as_the_parameters():
    def moved(dtype):
        data = graph()
        data.x = data.x.to(dtype)
        report = stretto.analyze(make("sage", WIDTH, 16, 8).to(dtype), data, machine=MACHINE, procs=[1, 4, 8])
        return {(s.name, s.workers): s.bytes for s in report.strategies if s.bytes}

    double, single, half = (moved(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16))
    names = double.keys() & single.keys() & half.keys()
    assert len(names) > 12
    for name in names:
        assert double[name] == 2 * single[name] == 4 * half[name], name
