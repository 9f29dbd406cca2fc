"""Layers of users with an update() of their own: it follows the product as it follows stock's aggregation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch_geometric.nn import MessagePassing

import stretto
from stretto.layers import record_of
from tests.graphs import ZOO


class OwnUpdate(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def update(self, inputs):
        return inputs * 2


class Updates(MessagePassing):
    """With an update() that reads what propagate() was given, and edits its result in place."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lin = torch.nn.Linear(5, 5)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, scale=2.0)

    def message(self, x_j):
        return x_j

    def update(self, aggr_out, x, scale):
        return self.lin(aggr_out.mul_(scale).relu_()) + x


class UpdatesNetwork(Updates):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net = torch.nn.Linear(10, 5)

    def message(self, x_i, x_j):
        return self.net(torch.cat([x_i, x_j], dim=-1)).relu()


class UpdatesByDefault(Updates):
    def update(self, aggr_out, x, scale, other=None):
        return aggr_out


class UpdatesByIndex(Updates):
    def update(self, aggr_out, index):
        return aggr_out + index.size(0)


class UpdatesByEnd(Updates):
    def update(self, aggr_out, x_i):
        return aggr_out + x_i.sum()


@pytest.mark.parametrize("door", ["accelerate", "patch"])
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (OwnUpdate, "fast"),
        (Updates, "fast"),
        (UpdatesNetwork, "fast"),
        (UpdatesByDefault, "stock"),
        (UpdatesByIndex, "stock"),
        (UpdatesByEnd, "stock"),
    ],
)
def test_an_update_of_its_own_follows_the_product(kind, path, door):
    edge_index, (n, _) = ZOO["unsorted"]()
    stock, x = kind().double(), torch.randn(n, 5, dtype=torch.float64)
    fast, found = copy.deepcopy(stock), []
    for layer in (stock, fast):
        if layer is fast and door == "patch":
            stretto.patch()
        elif layer is fast:
            stretto.accelerate(layer)
        try:
            learned = x.clone().requires_grad_()
            out = layer(learned, edge_index)
            leaves = [learned, *layer.parameters()]
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)])
        finally:
            if stretto.is_patched():
                stretto.unpatch()
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert record_of(fast).path == path, record_of(fast).reason


class Dotted(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j, w):
        return w[..., None] * x_j


def test_a_weight_may_become_a_column_by_dots():
    edge_index, (n, _) = ZOO["unsorted"]()
    stock = Dotted()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, w = torch.randn(n, 5, dtype=torch.float64), torch.rand(edge_index.size(1), dtype=torch.float64)
    torch.testing.assert_close(fast(x, edge_index, w), stock(x, edge_index, w))
    assert record_of(fast).plan == "sum(A, w X)"
