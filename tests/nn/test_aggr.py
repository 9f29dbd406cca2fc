"""Aggregation modules, alone and inside layers stretto does not know, against the untouched ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import aggr

import stretto
from stretto.nn import AGGREGATIONS, record_of
from tests.graphs import random_edges

MODULES = {
    "sum": lambda: aggr.SumAggregation(),
    "mean": lambda: aggr.MeanAggregation(),
    "max": lambda: aggr.MaxAggregation(),
    "min": lambda: aggr.MinAggregation(),
    "mul": lambda: aggr.MulAggregation(),
    "var": lambda: aggr.VarAggregation(),
    "var semi_grad": lambda: aggr.VarAggregation(semi_grad=True),
    "std": lambda: aggr.StdAggregation(),
    "softmax": lambda: aggr.SoftmaxAggregation(),
    "softmax t": lambda: aggr.SoftmaxAggregation(t=0.3, learn=True),
    "softmax channels": lambda: aggr.SoftmaxAggregation(learn=True, channels=16),
    "softmax semi_grad": lambda: aggr.SoftmaxAggregation(semi_grad=True),
    "powermean": lambda: aggr.PowerMeanAggregation(p=2.0, learn=True),
    "median": lambda: aggr.MedianAggregation(),
    "fused": lambda: aggr.MultiAggregation(["sum", "mean", "max", "min", "mul", "var", "std"]),
    "fused std": lambda: aggr.MultiAggregation(["std", "median"]),
    "scaler": lambda: aggr.DegreeScalerAggregation(["mean", "std"], ["identity", "linear"], torch.tensor([1, 4, 2])),
}


def both(module, x, index, size, dim):
    found = []
    for one in (module, stretto.accelerate(copy.deepcopy(module))):
        leaf = x.clone().requires_grad_()
        out = one(leaf, index, dim_size=size, dim=dim)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        learned = [p for p in one.parameters() if p.requires_grad]
        grads = torch.autograd.grad((out * weight).sum(), [leaf, *learned], allow_unused=True)
        found.append(([out, *(g for g in grads if g is not None)], one))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_equals_stock(name):
    module = MODULES[name]().double()
    for count, size in ((300, 40), (300, 3), (200, 1)):
        index = torch.randint(size, (count,), generator=torch.Generator().manual_seed(2))
        x = torch.randn(count, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (wanted, _), (got, fast) = both(module, x, index, size + 2, -2)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
        reduced = [m for m in fast.modules() if record_of(m).path]
        assert reduced
        assert all(record_of(m).path == "fast" for m in reduced)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "var", "softmax"])
def test_other_shapes_equal_stock(name):
    module = MODULES[name]()
    index = torch.randint(9, (64,), generator=torch.Generator().manual_seed(2))
    for shape, dim in (((64, 4, 8), 0), ((3, 64, 8), -2), ((64, 32), 0)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        (wanted, _), (got, fast) = both(module, x, index, 9, dim)
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
        assert record_of(fast).path == ("stock" if shape[0] == 3 else "fast")
        assert bool(record_of(fast).reason) == (shape[0] == 3)


class Own(pyg.MessagePassing):
    """A user's layer: stretto knows nothing of its message."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return (x_j - x_i).tanh() * x_j


@pytest.mark.parametrize("how", ["add", "mean", "max", "softmax", "std", ["mean", "std", "max"]])
def test_layers_of_users_aggregate_fast(how):
    edge_index = random_edges(30, 30, 200)
    x = torch.randn(30, 8, dtype=torch.float64)
    stock = Own(aggr=how).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted, got = stock(one, edge_index), fast(other, edge_index)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    wanted.pow(2).sum().backward()
    got.pow(2).sum().backward()
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-9, atol=1e-10)
    assert any(record_of(m).path == "fast" for m in fast.aggr_module.modules())


def test_restore_gives_every_class_back():
    model = torch.nn.ModuleList([make() for make in MODULES.values()])
    before = [type(m) for m in model.modules()]
    stretto.accelerate(model)
    assert sum(type(m) not in before for m in model.modules()) > len(AGGREGATIONS)
    stretto.restore(model)
    assert [type(m) for m in model.modules()] == before


def test_patch_reaches_aggregations_and_leaves_nothing():
    before = {kind: kind.forward for kind in AGGREGATIONS}
    x, index = torch.randn(300, 16), torch.randint(9, (300,))
    module = aggr.SumAggregation()
    wanted = module(x, index)
    stretto.patch()
    try:
        torch.testing.assert_close(module(x, index), wanted)
        assert record_of(module).path == "fast"
    finally:
        stretto.unpatch()
    assert {kind: kind.forward for kind in AGGREGATIONS} == before
