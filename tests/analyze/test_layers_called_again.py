"""Layers that a model calls several times, or owns in several places: each call is a round of its own."""

import pytest
import torch
from torch_geometric import nn as pyg

import stretto.analyze
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.models import as_data

MACHINE = Machine(memory=1e10)
WIDTH, TIMES = 12, 3


class Tied(torch.nn.Module):
    """One layer, called again and again; bent: with something non-linear in between."""

    def __init__(self, conv, bent=True):
        super().__init__()
        self.conv, self.bent = conv, bent

    def forward(self, x, edge_index):
        for _ in range(TIMES):
            x = self.conv(x, edge_index)
            x = x.relu() if self.bent else x
        return x


class Block(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).relu()


def report_of(model, **options):
    data = as_data(datasets.load_graph("er:200:800"), width=WIDTH)
    return stretto.analyze(model, data, machine=MACHINE, procs=[1, 3], **options)


def untied(conv):
    return pyg.Sequential("x, edge_index", [(conv(WIDTH, WIDTH), "x, edge_index -> x") for _ in range(TIMES)])


@pytest.mark.parametrize("bent", [True, False], ids=["bent", "linear"])
@pytest.mark.parametrize("conv", [pyg.GCNConv, pyg.SAGEConv, pyg.GATConv])
def test_every_call_is_a_round(conv, bent):
    tied, apart = report_of(Tied(conv(WIDTH, WIDTH), bent)), report_of(untied(conv))
    for report in (tied, apart):
        assert report.problem.forward_widths == [WIDTH] * TIMES
        assert report.problem.backward_widths == [WIDTH] * (TIMES - 1)
    assert [cost.name for cost in tied.costs] == [apart.costs[0].name]


def test_what_the_rules_save_is_of_all_calls_they_apply_to():
    tied, apart = report_of(Tied(pyg.SAGEConv(WIDTH, WIDTH))), report_of(untied(pyg.SAGEConv))
    for rule in ("fuse", "cache A X"):
        (mine,) = [way for way in tied.rewrites if way.rule == rule]
        others = [way for way in apart.rewrites if way.rule == rule]
        assert (mine.flops, mine.bytes) == (sum(w.flops for w in others), sum(w.bytes for w in others))
        assert f"in {len(others)} of {TIMES} calls" in mine.sentence


@pytest.mark.parametrize("hold", [torch.nn.ModuleList, lambda convs: torch.nn.ModuleList(map(Block, convs))])
def test_one_layer_in_several_places(hold):
    class Places(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.places = hold([pyg.GCNConv(WIDTH, WIDTH)] * TIMES)

        def forward(self, x, edge_index):
            for place in self.places:
                x = place(x, edge_index)
            return x

    problem = report_of(Places()).problem
    assert problem.forward_widths == [WIDTH] * TIMES
    assert problem.backward_widths == [WIDTH] * (TIMES - 1)


def test_calls_may_be_of_other_widths():
    class Narrowing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.hop, self.lin = pyg.LGConv(), torch.nn.Linear(WIDTH, 8)

        def forward(self, x, edge_index):
            return self.hop(self.lin(self.hop(x, edge_index)), edge_index)

    report = report_of(Narrowing())
    assert report.problem.forward_widths == [WIDTH, 8]
    assert report.problem.backward_widths == [8]
    assert [cost.name for cost in report.costs] == ["C, L"]


def test_what_is_around_a_layer_is_no_call_of_it():
    report = report_of(pyg.SAGEConv(WIDTH, 8))
    assert len(report.layers[0].calls) == 1
    assert report.problem.forward_widths == [WIDTH]
