"""Products that share a matrix are taken together where that pays, and give what stock gives."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

from stretto import accelerate
from stretto.compile import choose, execute, together
from stretto.machine.rates import TYPICAL
from tests.graphs import ZOO

LAYERS = {
    "SAGE": (lambda: pyg.SAGEConv(12, 3), 1 + 1 + 2),  # X [W; V]', [A'G G]' X, A'G W + G V in one call
    "GraphConv": (lambda: pyg.GraphConv(12, 3), 1 + 1 + 2),
    "TAG": (lambda: pyg.TAGConv(12, 3, K=2), 1 + 1 + 1),
    "SAGE, widening": (lambda: pyg.SAGEConv(3, 12), None),  # nothing to gain: as before
}


@pytest.fixture
def products(monkeypatch):
    """All products a layer computes, from the smallest on."""
    seen = []

    def counted(x, w, *args, **kwargs):
        seen.append((tuple(x.shape), tuple(w.shape)))
        return plain(x, w, *args, **kwargs)

    def counted_with_sums(grad, x):
        seen.append((tuple(grad.t().shape), tuple(x.shape)))
        return with_sums(grad, x)

    def counted_twice(x, w, y, v, bias=None):
        seen.extend([(tuple(x.shape), tuple(w.shape)), (tuple(y.shape), tuple(v.shape))])
        return two(x, w, y, v, bias)

    plain, with_sums, two = execute.product, execute.product_and_sums, execute.two_products
    monkeypatch.setattr(execute, "product", counted)
    monkeypatch.setattr(execute, "product_and_sums", counted_with_sums)
    monkeypatch.setattr(execute, "two_products", counted_twice)
    monkeypatch.setattr(together, "TALL", 1)
    monkeypatch.setattr(choose, "profile", lambda device, measure: TYPICAL)  # a loaded machine prefers other plans
    choose.CHOOSER.clear()
    yield seen
    choose.CHOOSER.clear()


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ["symmetric", "isolated", "self_loops", "duplicates", "one_node"])
def test_layers_equal_stock(name, graph, products):
    make, count = LAYERS[name]
    edge_index, num_nodes = _graph(graph)
    torch.manual_seed(0)
    stock = make().double()
    x = torch.randn(num_nodes, stock.in_channels, dtype=torch.float64)
    grad = torch.randn(num_nodes, stock.out_channels, dtype=torch.float64)
    wanted = _run(stock, x, edge_index, grad)
    got = _run(accelerate(copy.deepcopy(stock)), x, edge_index, grad)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.is_contiguous()
    if count is not None and graph == "symmetric":
        assert len(products) == count, products


def test_they_are_taken_together_only_where_rows_are_many(products, monkeypatch):
    monkeypatch.setattr(together, "TALL", 10**6)
    layer = accelerate(pyg.SAGEConv(12, 3))
    x = torch.randn(50, 12, requires_grad=True)
    layer(x, torch.randint(50, (2, 300))).sum().backward()
    assert len(products) == 6


@pytest.mark.parametrize("name", ["TAG", "Cheb"])
def test_three_and_more_are_taken_together_on_small_graphs_too(name, products, monkeypatch):
    monkeypatch.setattr(together, "TALL", 10**6)
    torch.manual_seed(0)
    stock = {"TAG": pyg.TAGConv(12, 3, K=3), "Cheb": pyg.ChebConv(12, 3, K=4)}[name].double()
    x, edge_index = torch.randn(50, 12, dtype=torch.float64), torch.randint(50, (2, 300))
    grad = torch.randn(50, 3, dtype=torch.float64)
    got = _run(accelerate(copy.deepcopy(stock)), x, edge_index, grad)
    for mine, theirs in zip(got, _run(stock, x, edge_index, grad), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.is_contiguous()
    assert products[0] == ((50, 12), (12, 4 * 3))
    assert len(products) <= 3, products


def test_gradients_of_gradients(products):
    layer = accelerate(pyg.SAGEConv(12, 3).double())
    edge_index = torch.randint(20, (2, 80))
    x = torch.randn(20, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, edge_index).pow(2), (x,))


def _run(layer, x, edge_index, grad):
    x = x.clone().requires_grad_()
    out = layer(x, edge_index)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]


def _graph(name):
    edge_index, (num_nodes, _) = ZOO[name]()
    return edge_index, num_nodes
