"""Single inputs for which layers must do what stock does, found by hand."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric import EdgeIndex

import stretto


def both(conv):
    return conv, stretto.accelerate(copy.deepcopy(conv))


def test_no_edges_leave_edge_parameters_without_a_gradient():
    no_edges, attr = torch.empty(2, 0, dtype=torch.long), torch.empty(0, 3)
    found = []
    for conv in both(pyg.GATConv(4, 2, edge_dim=3, add_self_loops=False)):
        conv(torch.randn(5, 4), no_edges, attr).sum().backward()
        found.append({name for name, p in conv.named_parameters() if p.grad is None})
    assert found[0] == found[1]
    assert "att_edge" in found[0]


@pytest.mark.parametrize(
    "change", [("interpolation", "higher"), ("q", torch.tensor([[0.9]])), ("interpolation", "linear")]
)
def test_a_median_that_became_another_quantile(change):
    x, index = torch.randn(600, 4, dtype=torch.float64), torch.arange(600) % 7
    stock, fast = both(pyg.MedianAggregation().double())
    for aggregation in (stock, fast):
        setattr(aggregation, *change)
    torch.testing.assert_close(fast(x, index, dim_size=7), stock(x, index, dim_size=7), rtol=0, atol=0)


def test_an_edge_index_that_knows_no_sizes_ignores_size():
    edges = EdgeIndex(torch.tensor([[0, 4, 3], [1, 0, 1]]))
    stock, fast = both(pyg.SAGEConv(3, 2))
    x = torch.randn(5, 3)
    torch.testing.assert_close(fast((x, None), edges, size=(5, 2)), stock((x, None), edges, size=(5, 2)))


@pytest.mark.parametrize("wide", ["weight", "bias", "edge_weight"])
@pytest.mark.parametrize("conv", [pyg.GCNConv(3, 2), pyg.APPNP(2, 0.1), pyg.LGConv()], ids=lambda c: type(c).__name__)
def test_what_stock_promotes_is_promoted(conv, wide):
    edges, weight = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]), torch.rand(4)
    results = []
    for layer in both(conv):
        for name, parameter in layer.named_parameters():
            if name.endswith(wide):
                parameter.data = parameter.data.double()
        try:
            results.append(layer(torch.randn(3, 3), edges, weight.double() if wide == "edge_weight" else weight).dtype)
        except RuntimeError as error:
            results.append(type(error))
    assert results[0] == results[1]


def test_a_product_has_a_second_derivative():
    x, index = torch.rand(600, 3, dtype=torch.float64) + 0.5, torch.arange(600) % 300
    found = []
    for aggregation in both(pyg.MulAggregation()):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(aggregation(leaf, index, dim_size=300).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.pow(2).sum(), leaf)[0])
    torch.testing.assert_close(*found)
