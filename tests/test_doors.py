"""The doors in one another: what was there before a door was opened is there after it is closed."""

import torch
import torch_geometric.nn as pyg

import stretto
from stretto.nn.classes import STOCK

X, EDGE_INDEX = torch.randn(30, 6), torch.randint(30, (2, 140))


def test_restoring_inside_the_context_is_undone_at_its_end():
    model = stretto.accelerate(torch.nn.ModuleList([pyg.GCNConv(6, 4), pyg.SAGEConv(4, 2)]))
    before = [type(m) for m in model.modules()]
    with stretto.accelerated(model):
        stretto.restore(model)
        assert type(model[0]) is pyg.GCNConv
    assert [type(m) for m in model.modules()] == before
    assert type(model[0]) in STOCK
