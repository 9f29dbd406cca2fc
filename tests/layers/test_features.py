"""Features that are nearly all zeros: products by their nonzeros equal stock, as long as x stays what it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.compile import HOIST
from stretto.layers import record_of
from tests.compare import judge
from tests.graphs import random_edges

N, WIDE = 600, 500
LAYERS = {
    "gcn": lambda: pyg.GCNConv(WIDE, 6),
    "gcn without bias": lambda: pyg.GCNConv(WIDE, 6, bias=False),
    "sage": lambda: pyg.SAGEConv(WIDE, 6),
    "sage sum": lambda: pyg.SAGEConv(WIDE, 6, aggr="sum", root_weight=False),
    "graph conv": lambda: pyg.GraphConv(WIDE, 6),
    "gat": lambda: pyg.GATConv(WIDE, 3, heads=2),
}


def _words(dtype=torch.float64, kept=0.01):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, WIDE, generator=generator, dtype=torch.float64)
    x[torch.rand(N, WIDE, generator=generator) > kept] = 0
    x[3] = 0
    return x.to(dtype)


def _step(layer, x, edge_index):
    out = layer(x, edge_index)
    return [out, *torch.autograd.grad(out.pow(2).sum(), list(layer.parameters()))]


@pytest.mark.parametrize("name", LAYERS)
def test_few_nonzeros(name):
    torch.manual_seed(0)
    stock = LAYERS[name]().double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, edge_index = _words(), random_edges(N, N, 2000)
    for step in range(6):
        if step == 4:
            x[5, 7] = 3.0  # seen: the product is made of what x holds now
        for got, wanted in zip(_step(fast, x, edge_index), _step(stock, x, edge_index), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        assert (HOIST._entry(x).nonzeros is not None) == (step in (2, 3))
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(x, edge_index), stock(x, edge_index), rtol=1e-9, atol=1e-9)
    assert HOIST._entry(x).nonzeros is not None
    assert record_of(fast).path == "fast"


def test_single_precision():
    torch.manual_seed(0)
    stock = pyg.SAGEConv(WIDE, 6)
    fast, exact = stretto.accelerate(copy.deepcopy(stock)), copy.deepcopy(stock).double()
    x, edge_index = _words(torch.float32), random_edges(N, N, 2000)
    for _ in range(4):
        results = _step(fast, x, edge_index)
    truth, baseline = _step(exact, x.double(), edge_index), _step(stock, x, edge_index)
    for mine, theirs, true in zip(results, baseline, truth, strict=True):
        judge(mine, theirs, true, terms=N, scale=1.0)
    assert "nonzeros" in record_of(fast).plan


def test_who_is_left_alone():
    """Dense features, features that learn, features with something infinite, and what narrow layers make wider."""
    edge_index = random_edges(N, N, 2000)
    infinite = _words()
    infinite[0, 0] = float("inf")
    for x in (_words(kept=0.5), _words().requires_grad_(), infinite):
        layer = stretto.accelerate(pyg.GCNConv(WIDE, 6).double())
        for _ in range(5):
            layer(x, edge_index)
        assert "nonzeros" not in record_of(layer).plan
    x, wide = _words(), stretto.accelerate(pyg.GCNConv(WIDE, WIDE + 1).double())
    for _ in range(5):
        wide(x, edge_index)
    assert "nonzeros" not in record_of(wide).plan


def test_the_order_of_stock_and_the_kernels_of_torch_know_nothing_of_it(monkeypatch):
    x, edge_index = _words(), random_edges(N, N, 2000)
    for name, value in (("STRETTO_PLAN", "stock"), ("STRETTO_BACKEND", "torch")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            layer = stretto.accelerate(pyg.GCNConv(WIDE, 6).double())
            for _ in range(5):
                layer(x, edge_index)
            assert "nonzeros" not in record_of(layer).plan
