"""A layer that is applied twice: its input depends on its own weights, and every derivative counts each path once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential

import stretto
from stretto.layers import record_of
from stretto.layers.edges import streaming

LAYERS = {
    "GAT": (lambda: pyg.GATConv(6, 6), False),
    "GAT with edges": (lambda: pyg.GATConv(6, 3, heads=2, edge_dim=3), True),
    "GATv2": (lambda: pyg.GATv2Conv(6, 6), False),
    "GATv2 with edges": (lambda: pyg.GATv2Conv(6, 3, heads=2, edge_dim=3), True),
    "Transformer": (lambda: pyg.TransformerConv(6, 6, edge_dim=3), True),
    "GINE": (lambda: pyg.GINEConv(Sequential(Linear(6, 6), ReLU(), Linear(6, 6)), edge_dim=3), True),
    "CG": (lambda: pyg.CGConv(6, 3), True),
    "GEN": (lambda: pyg.GENConv(6, 6, edge_dim=3, norm="layer", learn_t=True), True),
    "Edge": (lambda: pyg.EdgeConv(Sequential(Linear(12, 6), ReLU(), Linear(6, 6)), aggr="mean"), False),
    "PNA": (lambda: pyg.PNAConv(6, 6, ["mean", "max"], ["identity"], torch.ones(4).long(), edge_dim=3), True),
    "GCN": (lambda: pyg.GCNConv(6, 6), False),
}


@pytest.mark.parametrize("large", [0, 1 << 40], ids=["in blocks", "at once"])
@pytest.mark.parametrize("name", LAYERS)
def test_first_and_second_derivatives(name, large, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", large)
    monkeypatch.setattr(streaming, "BLOCK", 7)
    make, edges = LAYERS[name]
    torch.manual_seed(0)
    stock = make().double()
    index, attr = torch.randint(30, (2, 90)), torch.randn(90, 3, dtype=torch.float64)
    args = (index, attr) if edges else (index,)
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for layer in (stock, stretto.accelerate(copy.deepcopy(stock))):
        out = layer(layer(x, *args), *args)
        leaves = [x, *layer.parameters()]
        first = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves, allow_unused=True)
        found.append([out, *first, *(s for s in second if s is not None)])
    assert record_of(layer).path == "fast"
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9 * max(float(wanted.detach().abs().max()), 1.0))
