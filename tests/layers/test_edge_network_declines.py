"""Networks on edges that a trace does not show, or not surely: they stay stock, with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch.nn import functional as F

import stretto
from stretto.layers import record_of
from stretto.plug import generic
from tests.layers.edge_layers import DIM, IN, Mesh, inputs, pair, same

FACTOR = 2.0


class ReadsTraining(Mesh):
    def message(self, x_i, x_j, attr):
        out = self.net(torch.cat([x_i, x_j, attr], dim=-1))
        return out if self.training else 2 * out


class ReadsNumber(Mesh):
    scale = 3.0

    def message(self, x_i, x_j, attr):
        return self.net(torch.cat([x_i, x_j, attr], dim=-1)) * self.scale


class ReadsParameter(Mesh):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def message(self, x_i, x_j, attr):
        return self.scale * self.net(torch.cat([x_i, x_j, attr], dim=-1))


class SelfInTheMiddle(ReadsParameter):
    def message(self, x_i, x_j, attr):
        return torch.mul(self.net(torch.cat([x_i, x_j, attr], dim=-1)), self.scale)


class ReadsGlobal(Mesh):
    def message(self, x_i, x_j, attr):
        return self.net(torch.cat([x_i, x_j, attr], dim=-1)) * FACTOR


class ReadsState(Mesh):
    def message(self, x_i, x_j, attr):
        out = self.net(torch.cat([x_i, x_j, attr], dim=-1))
        return out if torch.is_grad_enabled() else out * 2


class EditsFeatures(Mesh):
    def message(self, x_i, x_j, attr):
        attr += 1
        return self.net(torch.cat([x_i, x_j, attr], dim=-1))


class EditsByMethod(Mesh):
    def message(self, x_i, x_j, attr):
        attr.mul_(2)
        return self.net(torch.cat([x_i, x_j, attr], dim=-1))


class EditsByFlag(Mesh):
    def message(self, x_i, x_j, attr):
        return self.net(torch.cat([x_i, x_j, F.relu(attr, True)], dim=-1))


class EditsByItem(Mesh):
    def message(self, x_i, x_j, attr):
        attr[:, 0] = 1.0
        return self.net(torch.cat([x_i, x_j, attr], dim=-1))


class Counts(Mesh):
    def message(self, x_i, x_j, attr):
        self.calls = 1
        return self.net(torch.cat([x_i, x_j, attr], dim=-1))


class Catches(Mesh):
    def message(self, x_i, x_j, attr):
        try:
            return self.net(torch.cat([x_i, x_j, attr], dim=-1)) * self.absent
        except AttributeError:
            return self.net(torch.cat([x_i, x_j, attr], dim=-1))


class ChoosesByName(Mesh):
    def message(self, x_i, x_j, attr):
        out = self.net(torch.cat([x_i, x_j, attr], dim=-1))
        return out * 2 if self.net.__class__.__name__ == "Sequential" else out


class NoNetwork(Mesh):
    def message(self, x_i, x_j, attr):
        return torch.cat([x_i, x_j, attr], dim=-1)[:, :3]


class Drops(Mesh):
    def message(self, x_i, x_j, attr):
        return F.dropout(self.net(torch.cat([x_i, x_j, attr], dim=-1)), training=self.training)


KEEP_THEIR_CLASS = {
    ReadsTraining: "self.training",
    ReadsGlobal: "the global FACTOR",
    ReadsState: "torch.is_grad_enabled",
    EditsFeatures: "in place",
    EditsByMethod: "in place",
    EditsByFlag: "in place",
    EditsByItem: "more than to compute",
    Counts: "more than to compute",
    Catches: "catches errors",
    ChoosesByName: "self.net other than to call it",
    NoNetwork: "calls no network",
    Drops: "dropout",
    ReadsNumber: "self.scale other than to call it",
    ReadsParameter: "self.scale other than to call it",
    SelfInTheMiddle: "self.scale other than to call it",
}


@pytest.mark.parametrize("kind", KEEP_THEIR_CLASS, ids=lambda k: k.__name__)
def test_what_a_trace_does_not_show_keeps_its_class(kind):
    stock, fast = pair(kind)
    assert type(fast) is kind
    assert KEEP_THEIR_CLASS[kind] in str(generic.why_not(kind))
    assert KEEP_THEIR_CLASS[kind] in stretto.report(fast).rows[0].reason
    args = inputs("unsorted")
    torch.testing.assert_close(fast.eval()(*copy.deepcopy(args)), stock.eval()(*copy.deepcopy(args)))


class AlongEdges(Mesh):
    def message(self, x_i, x_j, attr):
        return self.net(torch.cat([x_i, x_j, attr - attr.mean(0)], dim=-1))


class ByAccident(Mesh):
    """[E] beside [E, E]: torch lets rows meet columns."""

    def message(self, x_i, x_j, attr):
        return self.net(torch.cat([x_i, x_j, attr], dim=-1)) * attr.sum(-1)


class Unused(Mesh):
    def __init__(self, net=None):
        super().__init__(net)
        self.norm = BatchNorm1d(DIM)

    def message(self, x_i, x_j, attr):
        self.norm(attr)
        return self.net(torch.cat([x_i, x_j, attr], dim=-1))


class OnEdgesOnly(Mesh):
    def __init__(self):
        super().__init__(lambda i: Linear(DIM, DIM))

    def message(self, x_j, attr):
        return self.net(attr) * x_j[:, :3]


class Function(Mesh):
    def __init__(self):
        super().__init__()
        self.function = torch.tanh

    def message(self, x_i, x_j, attr):
        return self.function(self.net(torch.cat([x_i, x_j, attr], dim=-1)))


class NormOfNumbers(Mesh):
    """LayerNorm of [E]: the mean of all edges."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(50)

    def forward(self, x, pos, edge_index, attr, w):
        return self.propagate(edge_index, x=x, attr=attr, w=w)

    def message(self, x_i, x_j, attr, w):
        return self.net(torch.cat([x_i, x_j, attr], dim=-1)) * self.norm(w).view(-1, 1)


class Own(Mesh):
    """A module of the user's own."""

    def __init__(self):
        class Twice(nn.Module):
            def forward(self, x):
                return 2 * x

        super().__init__(lambda i: Sequential(Linear(i, DIM), Twice()))


class TakesIndex(Mesh):
    def message(self, x_i, x_j, attr, index):
        return self.net(torch.cat([x_i, x_j, attr], dim=-1))


RUN_AS_STOCK = {
    AlongEdges: "mean() of it may see more than one edge",
    ByAccident: "mul() of it may see more than one edge",
    Unused: "does not return",
    OnEdgesOnly: "no Linear of it acts on more edges",
    Function: "not a module",
    Own: "holds a Twice",
    NormOfNumbers: "a number an edge",
    TakesIndex: "special arguments",
}


@pytest.mark.parametrize("kind", RUN_AS_STOCK, ids=lambda k: k.__name__)
def test_what_is_not_sure_runs_as_stock(kind):
    stock, fast = pair(kind)
    args = inputs("unsorted")
    if kind is ByAccident:
        args = [a[:DIM] if i in (3, 4) else a[:, :DIM] if i == 2 else a for i, a in enumerate(args)]
    same(stock, fast, args, path="stock")
    assert RUN_AS_STOCK[kind] in record_of(fast).reason


def test_inputs_that_decline():
    stock, fast = pair(Mesh)
    x, pos, index, attr, w = inputs("unsorted")
    for made in (lambda: pyg.Linear(-1, DIM), lambda: Sequential(ReLU(inplace=True), Linear(2 * IN + DIM, DIM))):
        other = stretto.accelerate(Mesh(lambda i, m=made: m()).double())
        other(x, pos, index, attr, w)
        assert record_of(other).path == "stock"
        assert record_of(other).reason
    softmax = stretto.accelerate(Mesh(aggr="softmax").double())
    softmax(x, pos, index, attr, w)
    assert "aggregation" in record_of(softmax).reason
    with pytest.raises((IndexError, RuntimeError)):
        fast(x, pos, index + x.size(0), attr, w)
    with pytest.raises(RuntimeError):
        fast(x, pos, index, attr[:-1], w)
    torch.testing.assert_close(fast(x, pos, index, attr.float(), w), stock(x, pos, index, attr.float(), w))
    assert "float32" in record_of(fast).reason
    same(stock, fast, [x, pos, index, attr, w])
