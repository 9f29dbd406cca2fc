"""Layers on graphs of their own sizes, which may be those of something else elsewhere."""

import pytest
import torch
from torch_geometric import nn as pyg
from torch_geometric.data import Data

import stretto.analyze
from stretto.analyze import Machine

MACHINE = Machine(memory=1e10)


def graph(nodes, edges, loops=0):
    row = torch.arange(edges)
    edge_index = torch.stack([row % nodes, (row % nodes + 1 + row // nodes) % nodes])
    edge_index[1, :loops] = edge_index[0, :loops]
    return Data(x=torch.randn(nodes, 12), edge_index=edge_index, y=torch.arange(nodes) % 5)


def test_self_loops_as_many_as_a_row_is_wide():
    """The data has 5 of them, and the last layer 5 columns."""
    torch.manual_seed(0)
    report = stretto.analyze(pyg.GraphUNet(12, 16, 5, depth=2), graph(150, 700, loops=5), machine=MACHINE, procs=[1])
    assert not report.lifted
    assert {cost.name for cost in report.costs} == {"C, L"}


class Inner(torch.nn.Module):
    """The last layer is on a graph of its own: the first nodes, in a ring."""

    def __init__(self, conv, part):
        super().__init__()
        self.outer, self.inner, self.part = pyg.SAGEConv(12, 16), conv(16, 8), part

    def forward(self, x, edge_index):
        i = torch.arange(len(x) // self.part)
        ring = torch.cat([torch.stack([i, (i + step) % len(i)]) for step in (1, 2, 3)], 1)
        return self.inner(self.outer(x, edge_index).relu()[: len(i)], ring)


@pytest.mark.parametrize("conv", [pyg.GCNConv, pyg.SAGEConv, pyg.GATConv], ids=lambda conv: conv.__name__)
@pytest.mark.parametrize("part", [3, 4], ids=["edges as many as nodes outside", "its own"])
def test_a_layer_on_a_graph_of_its_own(conv, part):
    report = stretto.analyze(Inner(conv, part), graph(150, 700), machine=MACHINE, procs=[1])
    assert not report.lifted
    kind = "A, L" if conv is pyg.GATConv else "C, L"
    assert [(layer.name, layer.width_in) for layer in report.layers] == [("C, L", 12), (kind, 16)]
    assert report.problem.backward_widths == [16]
