"""Aggregation modules, alone and inside layers stretto does not know, against the untouched ones."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.nn import aggr

import stretto
from stretto.layers import AGGREGATIONS, record_of
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
    "attentional": lambda: aggr.AttentionalAggregation(Linear(16, 1)),
    "attentional nn": lambda: aggr.AttentionalAggregation(Linear(16, 6), Sequential(Linear(16, 6), ReLU())),
    "attentional mlp": lambda: aggr.AttentionalAggregation(pyg.MLP([16, 8, 1]), pyg.MLP([16, 8, 4])),
    "variance preserving": lambda: aggr.VariancePreservingAggregation(),
    "set2set": lambda: aggr.Set2Set(16, 3),
    "set2set layers": lambda: aggr.Set2Set(16, 2, num_layers=2),
    "scaler": lambda: aggr.DegreeScalerAggregation(["mean", "std"], ["identity", "linear"], torch.tensor([1, 4, 2])),
}


def both(module, x, index, size, dim, ptr=None):
    found = []
    for one in (module, stretto.accelerate(copy.deepcopy(module))):
        leaf = x.clone().requires_grad_()
        out = one(leaf, index, ptr=ptr, dim_size=size, dim=dim)
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


NEED_INDEX = ("mul", "median", "fused", "fused std", "set2set", "set2set layers", "scaler")


@pytest.mark.parametrize("name", [name for name in MODULES if name not in NEED_INDEX])
def test_segments_by_ptr_alone_equal_stock(name):
    module = MODULES[name]().double()
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ptr = torch.tensor([0, 100, 100, 180, 300])
    (wanted, _), (got, fast) = both(module, x, None, None, -2, ptr)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
    assert {record_of(m).path for m in fast.modules() if record_of(m).path} == {"fast"}


@pytest.mark.parametrize("name", NEED_INDEX)
def test_what_needs_an_index_says_so_as_stock_does(name):
    for module in (MODULES[name](), stretto.accelerate(MODULES[name]())):
        with pytest.raises(NotImplementedError, match="requires 'index'"):
            module(torch.randn(300, 16), ptr=torch.tensor([0, 100, 300]))


@pytest.mark.parametrize("ptr", [[0, 100, 200], [1, 100, 300], [0, 200, 100, 300]])
def test_a_ptr_that_does_not_fit_is_left_to_stock(ptr):
    fast = stretto.accelerate(aggr.SumAggregation())
    with contextlib.suppress(RuntimeError):  # stock has its own words for some of them
        fast(torch.randn(300, 16), ptr=torch.tensor(ptr))
    assert "ptr does not lead" in record_of(fast).reason


def test_a_network_that_changes_the_shape_is_ended_by_stock():
    class Wide(torch.nn.Module):
        def forward(self, x):
            return x.unsqueeze(1).expand(-1, 2, -1)

    module = aggr.AttentionalAggregation(Wide(), Wide())
    x, index = torch.randn(300, 16), torch.randint(9, (300,))
    wanted = module(x, index, dim=0)
    torch.testing.assert_close(stretto.accelerate(module)(x, index, dim=0), wanted)


def test_report_tells_of_aggregations_that_serve_no_layer():
    model = torch.nn.ModuleDict(
        {
            "sum": aggr.SumAggregation(),
            "several": aggr.MultiAggregation(["sum", "max", "std"]),
            "set2set": aggr.Set2Set(16, 2),
            "quantile": aggr.QuantileAggregation(0.3),
            "conv": pyg.SAGEConv(4, 4, aggr="median"),
        }
    )
    rows = {row.layer: row for row in stretto.report(model).rows}
    assert list(rows) == ["sum", "several", "set2set", "quantile", "conv"]
    assert "not accelerated" in rows["sum"].reason
    stretto.accelerate(model)
    assert {row.layer: row.path for row in stretto.report(model).rows}["several"] == "not run yet"
    for name in list(rows)[:4]:
        model[name](torch.randn(300, 16), torch.arange(300) // 30)
    told = stretto.report(model)
    rows = {row.layer: row for row in told.rows}
    assert [rows[name].path for name in ("sum", "several", "set2set", "quantile")] == ["fast", "fast", "fast", "stock"]
    assert rows["quantile"].reason == "no fast path for this class"
    assert "3 of 5 layers ran fast" in str(told)


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
