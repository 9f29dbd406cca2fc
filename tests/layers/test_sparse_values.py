"""The values of a torch sparse matrix as edge_index: layers multiply by them as stock does, and they learn."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential

import stretto
from stretto.layers import adjacency, record_of
from tests.graphs import random_edges

N = 20
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PAIRS = random_edges(N, N, 60).unique(dim=1)
VALUES = torch.linspace(-1, 2, PAIRS.size(1), dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore:(Converting sparse|Sparse|There exist node types)")


def matrix(layout, values=VALUES, rows=N):
    """A [rows, N] matrix with the values in the order in which they are stored."""
    made = torch.sparse_coo_tensor(torch.stack([PAIRS[0] % rows, PAIRS[1]]), VALUES, (rows, N)).coalesce()
    values = values[: made.values().numel()]
    if layout == "coo":
        return torch.sparse_coo_tensor(made.indices(), values, (rows, N), is_coalesced=True)
    made = made.to_sparse_csr()
    return torch.sparse_csr_tensor(made.crow_indices(), made.col_indices(), values, (rows, N))


def network():
    return Sequential(Linear(6, 5), ReLU(), Linear(5, 3))


LAYERS = {
    "SAGE mean": lambda: pyg.SAGEConv(6, 3),
    "SAGE sum": lambda: pyg.SAGEConv(6, 3, aggr="sum"),
    "SAGE max": lambda: pyg.SAGEConv(6, 3, aggr="max"),
    "SAGE project": lambda: pyg.SAGEConv(6, 3, project=True),
    "GIN": lambda: pyg.GINConv(network()),
    "GIN mean": lambda: pyg.GINConv(network(), aggr="mean"),
    "GIN min": lambda: pyg.GINConv(network(), aggr="min"),
    "GIN eps": lambda: pyg.GINConv(network(), train_eps=True),
    "GraphConv": lambda: pyg.GraphConv(6, 3),
    "GCN as it is": lambda: pyg.GCNConv(6, 3, normalize=False),
    "LGConv as it is": lambda: pyg.LGConv(normalize=False),
    "LEConv": lambda: pyg.LEConv(6, 3),
}


def both(make):
    torch.manual_seed(1)
    stock = make().double()
    return stock, stretto.accelerate(copy.deepcopy(stock))


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("layer", LAYERS)
def test_values_count(layer, layout):
    stock, fast = both(LAYERS[layer])
    adj = matrix(layout)
    close(fast(X, adj), stock(X, adj))
    assert record_of(fast).path == "fast"


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("make", [lambda: pyg.SAGEConv((6, 6), 3), lambda: pyg.GINConv(network())])
def test_values_count_between_two_sets_of_nodes(make, layout):
    stock, fast = both(make)
    adj = matrix(layout, rows=7)
    close(fast((X, X[:7]), adj), stock((X, X[:7]), adj))
    assert record_of(fast).path == "fast"


def test_values_count_in_relations_side_by_side():
    kinds = [("a", "one", "b"), ("b", "two", "b")]
    stock, fast = both(lambda: pyg.HeteroConv({kind: pyg.SAGEConv((6, 6), 3) for kind in kinds}))
    given = ({"a": X, "b": X * 2}, {kind: matrix("csr", VALUES + at) for at, kind in enumerate(kinds)})
    close(fast(*given)["b"], stock(*given)["b"])
    assert record_of(fast).path == "fast"


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("layer", LAYERS)
def test_values_learn(layer, layout):
    stock, fast = both(LAYERS[layer])
    grads = []
    for conv in (stock, fast):
        values = VALUES.clone().requires_grad_()
        conv(X, matrix(layout, values)).pow(2).sum().backward()
        grads.append(values.grad)
    assert grads[0] is not None
    close(grads[1], grads[0])


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_values_that_learn_and_are_normalised_are_left_to_stock(layout):
    """Which torch itself may not differentiate: then both raise its error."""
    stock, fast = both(lambda: pyg.GCNConv(6, 3))
    found = []
    for conv in (stock, fast):
        values = VALUES.clone().abs().requires_grad_()
        try:
            conv(X, matrix(layout, values)).pow(2).sum().backward()
            found.append(values.grad)
        except RuntimeError as error:
            found.append(str(error))
    assert found[0] is not None
    if isinstance(found[0], str):
        assert found[1] == found[0]
    else:
        close(found[1], found[0])
    assert "gradient" in record_of(fast).reason


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_ones_are_no_weights_until_they_are_edited(layout):
    stock, fast = both(lambda: pyg.SAGEConv(6, 3))
    adj = matrix(layout, torch.ones_like(VALUES))
    close(fast(X, adj), stock(X, adj))
    graph = stretto.Graph.of(adj)
    assert adjacency.weights_in(graph, adj, X) is None
    adj.values().mul_(VALUES)
    close(fast(X, adj), stock(X, adj))
    close(adjacency.weights_in(graph, adj, X), adj.values())


@pytest.mark.parametrize("make", [lambda: pyg.SAGEConv(6, 3), lambda: pyg.GraphConv(6, 3, aggr="max")])
def test_duplicates_in_a_matrix_are_left_to_stock(make):
    """Stock adds them up, and then counts one: a mean or maximum of the single values is another."""
    stock, fast = both(make)

    def twice():
        return torch.sparse_coo_tensor(torch.cat([PAIRS, PAIRS], dim=1), torch.cat([VALUES, VALUES + 1]), (N, N))

    close(fast(X, twice()), stock(X, twice()))
    assert "not coalesced" in record_of(fast).reason
