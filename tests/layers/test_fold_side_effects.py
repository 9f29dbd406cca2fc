"""Folds in users' own models must not show: not in what a forward prints, keeps or counts, and not to other tools."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Linear, Module

import stretto
from stretto.layers import fold_models
from tests.layers.folding_models import Base, Plain
from tests.layers.test_fold_models import EXACT, _count, _fold_small_ones, _same, _told  # noqa: F401
from tests.layers.test_folds import _data, _pair

SAID: list[str] = []
STEP = 0


def say(text):
    SAID.append(text)


def step():
    global STEP
    STEP += 1


class TellsItself(Base):
    def forward(self, x, edge_index):
        say(f"{self}")
        return self.bn1(self.conv1(x, edge_index))


class TellsModules(Base):
    def forward(self, x, edge_index):
        say("%s and %s" % (self.conv1, self.bn1))  # noqa: UP031
        return self.bn1(self.conv1(x, edge_index))


class LooksUp(Base):
    """Decides by a number of the input that a dict finds."""

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        kind = {5: "both"}.get(x.size(1), "one")
        return self.bn1(h) + h if kind == "both" else self.bn1(h)


class Keyed(Base):
    """A fold gives the very tensor back that the layer made: a dict would tell."""

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        seen = {h: 1}
        y = self.bn1(h)
        return y * 0 if y in seen else y


class Compares(Base):
    def __init__(self):
        super().__init__()
        self.some, self.others = torch.nn.ModuleList(), torch.nn.ModuleList()

    def forward(self, x, edge_index):
        return self.bn1(self.conv1(x, edge_index)) + (1 if self.some == self.others else 0)


@pytest.mark.parametrize("make", [TellsItself, TellsModules, LooksUp, Keyed, Compares], ids=lambda kind: kind.__name__)
def test_what_a_forward_says_and_looks_up(make):
    stock, fast = _pair(make)
    said = []
    for model in (stock, fast):
        SAID.clear()
        with torch.no_grad():
            model(*_data("unsorted"))
        said.append([line.replace("Fast", "") for line in SAID])
    assert said[0] == said[1]
    _same(fast, stock, *_data("unsorted"))
    assert _count(fast) == 0
    assert "not folded: the model's forward " in _told(fast)[0]


class Steps(Base):
    """A function that it calls changes what it then decides by."""

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        y = self.bn1(h)
        step()
        return y + h if STEP > 0 else y


def test_a_constant_that_changes_on_the_way(monkeypatch):
    stock, fast = _pair(Steps)
    for _ in range(3):
        results = []
        for model in (stock, fast):
            monkeypatch.setitem(globals(), "STEP", 0)
            with torch.no_grad():
                results.append(model(*_data("unsorted")))
        torch.testing.assert_close(*results, **EXACT)
    assert _count(fast) == 0
    assert STEP == 1  # called once, as soon as it is known


class Encoder(Module):
    def __init__(self):
        super().__init__()
        self.net, self.conv, self.lin = Plain(), pyg.SAGEConv(3, 4), Linear(4, 2)

    def forward(self, x, edge_index):
        return self.lin(self.conv(self.net(x, edge_index), edge_index))


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return True


def test_a_tracer_sees_the_calls_of_models_inside():
    stock, fast = _pair(Encoder)
    wanted, got = ([node.target for node in Leaves().trace(model).nodes] for model in (stock, fast))
    assert got == wanted
    assert "net" in got


def test_a_layers_result_is_let_go_as_by_stock():
    """A model of many layers would hold all of their results at once otherwise."""

    class Watches(Module):
        def forward(self, x):
            alive.append(sum(ref() is not None for ref in made))
            made.append(weakref.ref(x))
            return x * 2

    class Deep(Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList([pyg.GCNConv(5, 5) for _ in range(4)])
            self.norms = torch.nn.ModuleList([BatchNorm1d(5) for _ in range(4)])
            self.watch = Watches()

        def forward(self, x, edge_index):
            for conv, norm in zip(self.convs, self.norms):  # noqa: B905
                x = self.watch(norm(conv(x, edge_index)))
            return x

    stock, fast = _pair(Deep)
    counts = []
    for model in (stock, fast):
        made, alive = [], []
        with torch.no_grad():
            model(*_data("unsorted"))
        counts.append(alive)
    assert counts[0] == counts[1] == [0, 0, 0, 0]
    assert _count(fast) == 4


class Guarded(Base):
    def __setattr__(self, name, value):
        if name == "__class__":
            raise AttributeError("this model is what it is")
        super().__setattr__(name, value)

    def forward(self, x, edge_index):
        return self.bn1(self.conv1(x, edge_index))


def test_a_model_that_guards_its_attributes_keeps_its_class():
    stock = Guarded().double().eval()
    fast = stretto.accelerate(copy.deepcopy(stock))
    assert not fold_models.is_container(type(fast))
    _same(fast, stock, *_data("unsorted"))


class AsksType(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) if type(self) is AsksType else h


def test_a_model_that_asks_for_its_class_keeps_it():
    stock, fast = _pair(AsksType)
    _same(fast, stock, *_data("unsorted"))
    assert type(fast) is AsksType


class Records(Base):
    """Gradients from the norm on, whatever the caller has set."""

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        torch.set_grad_enabled(True)
        y = self.bn1(h)
        torch.set_grad_enabled(False)
        return y


def test_a_forward_that_records_gradients():
    stock, fast = _pair(Records)
    results = []
    for model in (stock, fast):
        with torch.no_grad():
            out = model(*_data("unsorted"))
            assert not torch.is_grad_enabled()
        out.sum().backward()
        results.append([out, model.bn1.bias.grad, model.conv1.lin.weight.grad])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)
    assert _count(fast) == 0
