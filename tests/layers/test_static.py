"""Static graphs: one edge_index, x [batch, nodes, channels]."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric import EdgeIndex

import stretto
from stretto.layers import record_of
from tests.graphs import ZOO
from tests.layers.inputs import Data
from tests.layers.test_convs import run

B, IN, OUT = 3, 5, 4
# layer -> whether it takes edge weights
LAYERS = {
    "GCN": (lambda **o: pyg.GCNConv(IN, OUT, **o), True),
    "GCN, wider, other way": (lambda **o: pyg.GCNConv(IN, 9, flow="target_to_source", **o), True),
    "GCN, plain": (lambda **o: pyg.GCNConv(IN, OUT, normalize=False, **o), True),
    "SAGE": (lambda **o: pyg.SAGEConv(IN, OUT, **o), False),
    "SAGE max": (lambda **o: pyg.SAGEConv(IN, OUT, aggr="max", normalize=True, project=True, **o), False),
    "GraphConv": (lambda **o: pyg.GraphConv(IN, OUT, **o), True),
    "SGC": (lambda **o: pyg.SGConv(IN, OUT, K=2, **o), True),
    "SSG": (lambda **o: pyg.SSGConv(IN, OUT, alpha=0.2, K=2, **o), True),
    "TAG": (lambda **o: pyg.TAGConv(IN, OUT, **o), True),
    "LG": (lambda **o: pyg.LGConv(**o), True),
    "APPNP": (lambda **o: pyg.APPNP(3, 0.1, **o), True),
    "Cheb": (lambda **o: pyg.ChebConv(IN, OUT, 3, **o), True),
    "LE": (lambda **o: pyg.LEConv(IN, OUT, **o), True),
    "ClusterGCN": (lambda **o: pyg.ClusterGCNConv(IN, OUT, **o), False),
}


def batch(n, dtype=torch.float64):
    return torch.randn(B, n, IN, generator=torch.Generator().manual_seed(n), dtype=dtype)


def compare(stock, data, path="fast"):
    fast = stretto.accelerate(copy.deepcopy(stock))
    wanted = run(stock, data)
    assert isinstance(wanted, list), wanted
    for _ in range(2):
        got = run(fast, data)
        assert isinstance(got, list), got
        for mine, theirs in zip(got, wanted, strict=True):
            assert mine.shape == theirs.shape
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert record_of(fast).path == path, record_of(fast).reason
    return fast


@pytest.mark.parametrize("graph", ["unsorted", "isolated", "empty", "one_node", "self_loops", "duplicates"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_runs_fast_and_equals_stock(name, graph):
    make, weighted = LAYERS[name]
    edge_index, (n, _) = ZOO[graph]()
    conv, x = make().double(), batch(n)
    compare(conv, Data((x, edge_index)))
    compare(conv, Data((x.transpose(0, 1).contiguous().transpose(0, 1), edge_index)))
    if weighted:
        weight = torch.rand(edge_index.size(1), dtype=torch.float64) + 0.1
        compare(conv, Data((x, edge_index, weight)))
        if name not in ("SGC", "SSG", "TAG"):
            compare(conv, Data((x, edge_index, weight), learned=(0, 2)))


def test_other_forms():
    edge_index, (n, _) = ZOO["unsorted"]()
    x = batch(n)
    compare(pyg.GCNConv(IN, OUT).double(), Data((x, EdgeIndex(edge_index, sparse_size=(n, n)))))
    compare(pyg.GCNConv(IN, OUT).double(), Data((x,), {"edge_index": edge_index}))
    compare(pyg.GCNConv(IN, OUT, cached=True).double(), Data((x, edge_index)), path="stock")
    compare(pyg.GCNConv(IN, OUT).double(), Data((x[:1], edge_index)))


def test_batches_of_several_sizes_and_edits_in_between():
    edge_index, (n, _) = ZOO["unsorted"]()
    stock = pyg.GCNConv(IN, OUT).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    weight = torch.rand(edge_index.size(1), dtype=torch.float64)
    for step in range(4):
        for x in (batch(n), batch(n)[:2], batch(n)[0]):
            torch.testing.assert_close(fast(x, edge_index, weight), stock(x, edge_index, weight), rtol=1e-9, atol=1e-9)
            assert record_of(fast).path == "fast"
        weight.mul_(2).add_(step)
        edge_index[0, step] = step


def test_what_is_not_built_is_told():
    edge_index, (n, _) = ZOO["unsorted"]()
    conv = stretto.accelerate(pyg.SAGEConv(IN, OUT))
    (layer,) = stretto.explain(conv, batch(n, torch.float32), edge_index).layers
    assert layer.avoided_bytes == B * edge_index.size(1) * IN * 4
    assert stretto.report(conv).rows[0].plan
