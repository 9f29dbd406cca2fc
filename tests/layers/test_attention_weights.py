"""return_attention_weights: the weights of every edge, and beside them the edges as stock hands them out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric import EdgeIndex

import stretto
from stretto.layers import record_of
from tests.graphs import ZOO

LAYERS = {
    "GATConv": lambda **o: pyg.GATConv(5, 4, heads=2, **o),
    "GATConv no loops": lambda **o: pyg.GATConv(5, 4, add_self_loops=False, **o),
    "GATConv backwards": lambda **o: pyg.GATConv(5, 4, flow="target_to_source", **o),
    "GATv2Conv": lambda **o: pyg.GATv2Conv(5, 4, heads=2, **o),
    "GATv2Conv no loops": lambda **o: pyg.GATv2Conv(5, 4, add_self_loops=False, **o),
    "TransformerConv": lambda **o: pyg.TransformerConv(5, 4, heads=2, **o),
}


def sorted_edges(edges: torch.Tensor, n: int) -> EdgeIndex:
    return EdgeIndex(edges[:, edges[1].argsort(stable=True)].contiguous(), sparse_size=(n, n), sort_order="col")


FORMATS = {
    "edge_index": lambda edges, n: edges,
    "EdgeIndex": lambda edges, n: EdgeIndex(edges, sparse_size=(n, n)),
    "EdgeIndex of unknown size": lambda edges, n: EdgeIndex(edges),
    "EdgeIndex sorted": sorted_edges,
}


def layers_of(name: str):
    torch.manual_seed(0)
    stock = LAYERS[name]().double()
    return stock, stretto.accelerate(copy.deepcopy(stock))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_edges_are_stocks(name, form):
    for graph in ("unsorted", "self_loops", "isolated", "empty"):
        edges, (n, _) = ZOO[graph]()
        stock, fast = layers_of(name)
        x = torch.randn(n, 5, dtype=torch.float64, requires_grad=True)
        found = []
        for layer in (stock, fast):
            out, (pairs, alpha) = layer(x, FORMATS[form](edges, n), return_attention_weights=True)
            wanted = [x, *layer.parameters()]
            loss = out.square().sum() + alpha.pow(3).sum()
            found.append([pairs, out, alpha, *torch.autograd.grad(loss, wanted, materialize_grads=True)])
        assert record_of(fast).path == "fast", record_of(fast).reason
        (theirs, *values), (ours, *mine) = found
        assert type(ours) is type(theirs)
        assert torch.equal(ours, theirs)
        if isinstance(theirs, EdgeIndex):
            for attribute in ("sort_order", "is_undirected"):
                assert getattr(ours, attribute) == getattr(theirs, attribute)
            assert ours.sparse_size() == theirs.sparse_size()
        for a, b in zip(mine, values, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["GATConv no loops", "GATv2Conv no loops", "TransformerConv"])
def test_a_sparse_matrix_is_stocks_affair(name):
    edges, (n, _) = ZOO["symmetric"]()
    stock, fast = layers_of(name)
    x = torch.randn(n, 5, dtype=torch.float64)
    matrix = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.size(1)).double(), (n, n)).coalesce()
    out, (pairs, alpha) = fast(x, matrix.to_sparse_csr(), return_attention_weights=True)
    wanted, (their_pairs, their_alpha) = stock(x, matrix.to_sparse_csr(), return_attention_weights=True)
    assert record_of(fast).reason == "return_attention_weights with a sparse matrix"
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(alpha, their_alpha)
    assert pairs.layout == their_pairs.layout
