"""What code reads may be something else at its next call: globals, closures, defaults, classes, modules, attributes.

Whatever was read once and kept (a trace, a choice by class) is then made anew. Every case is run before and after the
change, by an accelerated model and by an untouched one, and once more when the change is undone.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn

import stretto
from stretto.layers import record_of
from tests.graphs import random_edges

N, IN, OUT = 40, 10, 6
EDGES = random_edges(N, N, 400, 3)
helpers = types.ModuleType("helpers")  # a user's own module of functions
helpers.__dict__.update(act=torch.relu, NORMED=True)
act, relu, FLAG = torch.relu, torch.relu, True


def post(h):
    return h * 1.0


# ---- users' layers: a message that is a network of both ends, and one that is x_j ----


class Edges(pyg.MessagePassing):
    def __init__(self):
        super().__init__()
        self.net, self.last, self.act = nn.Linear(2 * IN, OUT), nn.ReLU(), torch.relu

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class Global(Edges):
    def message(self, x_i, x_j):
        return act(self.net(torch.cat([x_i, x_j], dim=-1)))


class Named(Edges):
    def message(self, x_i, x_j):
        return relu(self.net(torch.cat([x_i, x_j], dim=-1)))


class OfTorch(Edges):
    def message(self, x_i, x_j):
        return torch.nn.functional.silu(self.net(torch.cat([x_i, x_j], dim=-1)))


class OfModule(Edges):
    def message(self, x_i, x_j):
        return helpers.act(self.net(torch.cat([x_i, x_j], dim=-1)))


class OfSelf(Edges):
    def message(self, x_i, x_j):
        return self.last(self.net(torch.cat([x_i, x_j], dim=-1)))


class Function(Edges):
    def message(self, x_i, x_j):
        return self.act(self.net(torch.cat([x_i, x_j], dim=-1)))


class Helped(Edges):
    def helper(self, h):
        return h.relu()

    def message(self, x_i, x_j):
        return self.helper(self.net(torch.cat([x_i, x_j], dim=-1)))


class Heir(Helped):
    def helper(self, h):
        return h.tanh()


def _closed() -> Any:
    def message(self, x_i, x_j):
        return within(self.net(torch.cat([x_i, x_j], dim=-1)))

    within = torch.relu
    return message


class Closed(Edges):
    message = _closed()


class Sends(Edges):
    def message(self, x_j):
        return x_j


class Inside(Edges):
    def message(self, x_j):
        return (lambda value: value if FLAG else -value)(x_j)


# ---- users' models, in which a BatchNorm or a Linear is folded ----


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.lin = pyg.GCNConv(IN, OUT), nn.BatchNorm1d(OUT), nn.Linear(OUT, 3)
        self.part = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.bn.running_var.fill_(1.5)

    def pre(self, h):
        return h * 1.0

    def forward(self, x, edge_index):
        h = self.bn(self.conv(self.pre(x), edge_index))
        return self.lin(self.part(post(h - 1)))


class Nearer(Model):
    pass


class ByFlags(Model):
    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        if FLAG and helpers.NORMED:
            h = self.bn(h)
        return self.lin(helpers.act(h))


class ByDefaults(Model):
    def forward(self, x, edge_index, normed=True, *, scale=1.0):
        h = self.conv(x, edge_index)
        if normed:
            h = self.bn(h)
        return self.lin(h) * scale


# ---- what is changed ----


@dataclass(frozen=True)
class Change:
    """owner.name becomes value; owner None: of the model itself, by its path."""

    kind: Callable[[], Any]
    owner: Any
    name: str
    value: Any
    fast: bool = True  # whether it runs fast before the change


THIS = sys.modules[__name__]
doubled, negative = (lambda self, x_j: 2 * x_j), (lambda self, h: -3 * h)

CHANGES = {
    "a global": Change(Global, THIS, "act", torch.tanh),
    "a global that is no function of torch": Change(Global, THIS, "act", lambda h: h.tanh()),
    "a global of torch's name": Change(Named, THIS, "relu", torch.sigmoid),
    "torch's own function": Change(OfTorch, F, "silu", torch.tanh),
    "a function of a user's module": Change(OfModule, helpers, "act", torch.tanh, fast=False),
    "a module of self": Change(OfSelf, None, "last", nn.Tanh()),
    "a function of self": Change(Function, None, "act", torch.tanh, fast=False),
    "a helper method": Change(Helped, Helped, "helper", negative, fast=False),
    "a helper method of a subclass": Change(Heir, Heir, "helper", negative, fast=False),
    "a closure": Change(Closed, Closed.message.__closure__[0], "cell_contents", torch.tanh, fast=False),
    "message(), with a default of its own": Change(Sends, Sends, "message", lambda self, x_j, sign=-1: sign * x_j),
    "message()": Change(Global, Global, "message", OfTorch.message),
    "message() of another kind": Change(Sends, Sends, "message", doubled),
    "message()'s code": Change(Global, Global.message, "__code__", OfTorch.message.__code__),
    "x_j's code": Change(Sends, Sends.message, "__code__", doubled.__code__),
    "message() of the instance": Change(Sends, None, "message", lambda x_j: 3 * x_j),
    "a global of a function inside": Change(Inside, THIS, "FLAG", False, fast=False),
    "update()": Change(Sends, Sends, "update", negative),
    "aggregate()": Change(
        Sends, Sends, "aggregate", lambda self, inputs, index, ptr=None, dim_size=None: inputs.new_ones(dim_size, 2)
    ),
    "forward()": Change(Sends, Sends, "forward", lambda self, x, edge_index: -x),
    "MessagePassing's update()": Change(Sends, pyg.MessagePassing, "update", negative),
    "SAGEConv's message()": Change(lambda: pyg.SAGEConv(IN, OUT), pyg.SAGEConv, "message", doubled),
    "SAGEConv's update()": Change(lambda: pyg.SAGEConv(IN, OUT), pyg.SAGEConv, "update", negative),
    "SAGEConv's forward()": Change(
        lambda: pyg.SAGEConv(IN, OUT), pyg.SAGEConv, "forward", lambda self, x, edge_index: self.lin_l(x)
    ),
    "an aggregation's forward()": Change(
        lambda: pyg.SAGEConv(IN, OUT),
        pyg.MeanAggregation,
        "forward",
        lambda self, x, index, ptr=None, dim_size=None, dim=-2: x.new_ones(dim_size, x.size(1)),
    ),
    "Linear's forward": Change(
        lambda: pyg.SAGEConv(IN, OUT), pyg.Linear, "forward", lambda self, x: -F.linear(x, self.weight, self.bias)
    ),
    "BatchNorm's forward": Change(Model, nn.BatchNorm1d, "forward", lambda self, x: -x),
    "the forward of GCN's layers": Change(
        lambda: pyg.GCN(IN, OUT, 2), pyg.GCNConv, "forward", lambda self, x, edge_index, edge_weight=None: self.lin(x)
    ),
    "a method of a model": Change(Model, Model, "pre", negative),
    "a method of a nearer class": Change(Nearer, Nearer, "pre", negative),
    "a method of a model's instance": Change(Model, None, "pre", lambda h: h * 4),
    "a function of a model": Change(Model, THIS, "post", torch.tanh),
    "a partial of a model": Change(Model, None, "part", functools.partial(F.leaky_relu, negative_slope=0.9)),
    "a flag": Change(ByFlags, THIS, "FLAG", False),
    "a flag of a user's module": Change(ByFlags, helpers, "NORMED", False),
    "a model's default": Change(ByDefaults, ByDefaults.forward, "__defaults__", (False,)),
    "a model's default by keyword": Change(ByDefaults, ByDefaults.forward, "__kwdefaults__", {"scale": 7.0}),
    "a model's code": Change(ByFlags, ByFlags.forward, "__code__", Model.forward.__code__),
    "a model's forward": Change(Model, Model, "forward", ByDefaults.forward),
    "GCNConv's message() in a model": Change(
        Model, pyg.GCNConv, "message", lambda self, x_j, edge_weight: 2 * x_j
    ),
}  # fmt: skip
ABSENT = object()


def evaluated(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Results with and without gradients, and the gradients."""
    with torch.no_grad():
        quiet = model(x, EDGES)
    leaf = x.clone().requires_grad_()
    out = model(leaf, EDGES)
    wanted = [leaf, *model.parameters()]
    weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    found = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True) if out.requires_grad else []
    return [quiet, out.detach(), *(g if g is not None else torch.zeros(()) for g in found)]


def put(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute, or take it away; what was there itself."""
    if isinstance(owner, nn.Module):
        before = owner._modules.get(name, owner.__dict__.get(name, ABSENT))
    else:  # a class or a module; else a function or cell, with what Python gives it
        before = vars(owner).get(name, ABSENT) if isinstance(owner, (type, types.ModuleType)) else getattr(owner, name)
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
    return before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("door", ["accelerate", "patch", "both"])
def test_what_was_read_is_read_again(change, door):
    torch.manual_seed(0)
    x = torch.randn(N, IN, dtype=torch.float64)
    stock = change.kind().double().eval()
    ours = copy.deepcopy(stock)

    def opened() -> list[torch.Tensor]:
        if door != "accelerate":
            stretto.patch()
        try:
            return evaluated(ours, x)
        finally:
            if door != "accelerate":
                stretto.unpatch()

    def compare() -> None:
        for mine, theirs in zip(opened(), evaluated(stock, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)

    if door != "patch":
        stretto.accelerate(ours)
    compare()
    layer = next(m for m in ours.modules() if isinstance(m, pyg.MessagePassing))
    assert (record_of(layer).path == "fast") == change.fast, record_of(layer).reason
    owners = [change.owner] if change.owner is not None else [stock, ours]
    wanted = evaluated(stock, x)
    before = [(owner, put(owner, change.name, change.value)) for owner in owners]
    try:
        assert any(not torch.equal(a, b) for a, b in zip(wanted, evaluated(stock, x), strict=False)), (
            "it changes nothing"
        )
        compare()
    finally:
        for owner, value in before:
            put(owner, change.name, value)
    compare()
