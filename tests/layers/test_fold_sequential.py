"""Folds in torch_geometric.nn.Sequential, of which each has a forward that PyG writes for it."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Dropout, Linear, ReLU

import stretto
from stretto.layers import fold_models
from tests.layers.test_fold_models import EXACT, _count, _fold_small_ones, _same, _told, norms  # noqa: F401
from tests.layers.test_folds import GRAPHS, _data, _pair

LAYER = "x, edge_index -> x"


@pytest.fixture(autouse=True, params=[True, False], ids=["written", "in a loop"])
def written(request, monkeypatch):
    """PyG writes a forward for each Sequential, unless it cannot import the file that makes it by its bare name."""
    monkeypatch.setattr(pyg.Sequential, "forward", FORWARD)  # PyG writes it onto the class, too
    if request.param:
        monkeypatch.setitem(sys.modules, Path(__file__).stem, sys.modules[__name__])
    return request.param


FORWARD = pyg.Sequential.forward


def double(x):
    return 2 * x


def both(x1, x2):
    return [x1, x2]


def plain(conv=pyg.GCNConv):
    return pyg.Sequential(
        "x, edge_index",
        [
            (Dropout(0.5), "x -> x"),
            (conv(5, 6), LAYER),
            BatchNorm1d(6),
            ReLU(inplace=True),
            (conv(6, 6), LAYER),
            pyg.BatchNorm(6),
            Linear(6, 3),
        ],
    )


def named():
    parts = [
        ("first", (pyg.SAGEConv(5, 6), LAYER)),
        ("norm", (BatchNorm1d(6), "x -> x")),
        ("twice", (double, "x -> x")),
        ("mlp", torch.nn.Sequential(Linear(6, 6), ReLU())),
        ("last", (pyg.GraphConv(6, 6), LAYER)),
        ("head", (torch.nn.Sequential(BatchNorm1d(6), ReLU()), "x -> x")),
    ]
    return pyg.Sequential("x, edge_index", OrderedDict(parts))


def jumping():
    return pyg.Sequential(
        "x, edge_index",
        [
            (pyg.GCNConv(5, 6), "x, edge_index -> x1"),
            (BatchNorm1d(6), "x1 -> x1"),
            (pyg.GCNConv(6, 6), "x1, edge_index -> x2"),
            (BatchNorm1d(6), "x2 -> x3"),
            (both, "x2, x3 -> xs"),
            pyg.JumpingKnowledge("cat"),
        ],
    )


def nested():
    inner = pyg.Sequential("x, edge_index", [(pyg.GCNConv(6, 6), LAYER), BatchNorm1d(6)])
    return pyg.Sequential("x, edge_index", [(pyg.GCNConv(5, 6), LAYER), BatchNorm1d(6), (inner, LAYER)])


# name -> (model, how many layers something is folded into, how often batch_norm still runs)
MODELS = {
    "plain": (plain, 2, 0),
    "attention": (lambda: plain(pyg.GATConv), 2, 0),
    "named": (named, 2, 0),
    "jumping": (jumping, 1, 1),
    "nested": (nested, 2, 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_stock(name, norms, written):  # noqa: F811
    make, count, left = MODELS[name]
    stock, fast = _pair(make)
    assert ("forward" in vars(stock)) == written
    make()
    for graph in GRAPHS:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                wanted = stock(*_data(graph))
                norms.clear()
                got = fast(*_data(graph))
            torch.testing.assert_close(got, wanted, **EXACT)
            assert len(norms) == left
    assert _count(fast) == count
    assert {row.path for row in stretto.report(fast).rows} == {"fast"}
    assert repr(fast) == repr(stock)


def test_copies_and_what_is_put_back():
    stock, fast = _pair(plain)
    other, _ = _pair(named)
    data = _data("unsorted")
    before = dict(vars(fast))
    copies = [pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast), copy.deepcopy(copy.deepcopy(fast)), fast]
    more = pickle.loads(pickle.dumps(stretto.accelerate(copy.deepcopy(other))))
    for model in copies:
        _same(model, stock, *data)
        assert _count(model) == 2
        with torch.no_grad():
            torch.testing.assert_close(model.forward(*data), stock(*data), **EXACT)
        assert type(stretto.restore(model)) is pyg.Sequential
        _same(model, stock, *data)
    _same(more, other, *data)
    assert vars(fast) == before


def test_what_is_replaced_or_watched_is_seen():
    stock, fast = _pair(plain)
    data = _data("unsorted")
    _same(fast, stock, *data)
    for model in (stock, fast):
        model.module_2 = torch.nn.Identity()
    _same(fast, stock, *data)
    assert _count(fast) == 1
    seen = []
    fast.module_4.register_forward_hook(lambda *a: seen.append(1))
    _same(fast, stock, *data)
    assert seen
    assert _count(fast) == 0
    fast.forward = lambda x, edge_index: x
    with torch.no_grad():
        assert fast(*data) is data[0]


def test_gradients_fold_nothing():
    stock, fast = _pair(plain)
    data = _data("unsorted")
    _same(fast, stock, *data)
    results = []
    for model in (stock, fast):
        out = model(*data)
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), list(model.parameters()))])
    for got, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
    assert _count(fast) == 0


def test_a_result_read_twice_is_told():
    stock, fast = _pair(jumping)
    _same(fast, stock, *_data("unsorted"))
    assert "not folded: its result is read more than once" in _told(fast)[1]


def test_patched_ones_fold_and_are_put_back(norms):  # noqa: F811
    stock, _ = _pair(plain)
    data = _data("unsorted")
    with torch.no_grad():
        wanted = stock(*data)
        stretto.patch()
        try:
            norms.clear()
            torch.testing.assert_close(stock(*data), wanted, **EXACT)
            made = _pair(named)[0]
            assert not norms
            assert _count(stock) == 2
        finally:
            stretto.unpatch()
    assert "__call__" not in vars(pyg.Sequential)
    assert not fold_models.is_container(type(stock))
    _same(copy.deepcopy(made), made, *data)


def test_compiled():
    stock, fast = _pair(plain)
    data = _data("unsorted")
    _same(torch.compile(fast, backend="eager"), stock, *data)
    torch._dynamo.reset()
