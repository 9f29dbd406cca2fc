"""torch.func: inside a transform layers run as stock; what ran plainly takes a batch of gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.autograd.functional import jacobian
from torch_geometric.data import Data
from torch_geometric.utils import total_influence

import stretto
from stretto.layers import record_of
from tests.graphs import ZOO

LAYERS = {
    "gcn": lambda: pyg.GCNConv(5, 4),
    "sage": lambda: pyg.SAGEConv(5, 4),
    "sage max": lambda: pyg.SAGEConv(5, 4, aggr="max"),
    "gin": lambda: pyg.GINConv(torch.nn.Linear(5, 4), train_eps=True),
    "gat": lambda: pyg.GATConv(5, 4, heads=2),
    "gatv2": lambda: pyg.GATv2Conv(5, 4),
    "transformer": lambda: pyg.TransformerConv(5, 4),
    "pna": lambda: pyg.PNAConv(5, 4, ["mean", "max", "std"], ["identity"], torch.tensor([1, 2, 3])),
    "gen": lambda: pyg.GENConv(5, 4),
    "gated": lambda: pyg.ResGatedGraphConv(5, 4),
    "rgcn": lambda: pyg.RGCNConv(5, 4, 1),
}


def _pair(name):
    torch.manual_seed(0)
    stock = LAYERS[name]().double().eval()
    edge_index, (n, _) = ZOO["unsorted"]()
    rest = (edge_index, torch.zeros(edge_index.size(1), dtype=torch.long)) if name == "rgcn" else (edge_index,)
    return stock, stretto.accelerate(copy.deepcopy(stock)), torch.randn(n, 5).double(), rest


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_gradients(name):
    """The backward of a plain forward under vmap."""
    stock, fast, x, rest = _pair(name)
    wanted = jacobian(lambda x: stock(x, *rest), x)
    got = jacobian(lambda x: fast(x, *rest), x, vectorize=True)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert record_of(fast).path == "fast"
    parameters = list(fast.parameters())
    out = fast(x, *rest)
    batch = torch.randn(3, *out.shape).double()
    at_once = torch.autograd.grad(out, parameters, batch, is_grads_batched=True, retain_graph=True, allow_unused=True)
    for i in range(3):
        alone = torch.autograd.grad(out, parameters, batch[i], retain_graph=True, allow_unused=True)
        for one, many in zip(alone, at_once, strict=True):
            assert (one is None) == (many is None)
            if one is not None:
                torch.testing.assert_close(many[i], one)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gin"])
def test_inside_a_transform(name):
    stock, fast, x, rest = _pair(name)
    for transform in (
        lambda f: torch.func.jacrev(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).pow(2).sum()))(torch.stack([x, 2 * x])),
        lambda f: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    ):
        wanted, got = transform(lambda x: stock(x, *rest)), transform(lambda x: fast(x, *rest))
        torch.testing.assert_close(got, wanted)
        assert "torch.func" in record_of(fast).reason
    weights = {key: 2 * value.detach() for key, value in fast.named_parameters()}
    results = [torch.func.functional_call(layer, weights, (x, *rest)) for layer in (stock, fast)]
    torch.testing.assert_close(*results)
    assert record_of(fast).path == "fast"  # a call with other weights is no transform

    def loss(layer):
        return lambda weights: torch.func.functional_call(layer, weights, (x, *rest)).pow(2).sum()

    for key, value in torch.func.grad(loss(stock))(weights).items():
        torch.testing.assert_close(torch.func.grad(loss(fast))(weights)[key], value)


def test_influence_with_the_plug_in_on():
    model = torch.nn.ModuleList([pyg.GCNConv(5, 6), pyg.GCNConv(6, 7)])
    model.forward = lambda x, edge_index: model[1](model[0](x, edge_index), edge_index)
    data = Data(x=torch.randn(6, 5), edge_index=torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]))
    torch.manual_seed(1)
    wanted = total_influence(model, data, max_hops=2, num_samples=4)
    stretto.patch()
    try:
        torch.manual_seed(1)
        got = total_influence(model, data, max_hops=2, num_samples=4)
    finally:
        stretto.unpatch()
    torch.testing.assert_close(got[0], wanted[0])
    assert record_of(model[0]).path == "fast"
