"""STRETTO_SHADOW: stock runs beside us without disturbing the step, and what differs, forward or backward, is found."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Dropout, Linear, ReLU, Sequential

import stretto
from stretto.layers import record_of
from stretto.layers.layer import Layer
from stretto.plug import shadow
from stretto.plug.dispatch import accelerated_forward

N, EDGES = 300, 1400
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
EDGE_INDEX = torch.randint(N, (2, EDGES), generator=torch.Generator().manual_seed(1))

RANDOM = {
    "GAT": lambda: pyg.GATConv(6, 3, heads=2, dropout=0.5),
    "GATv2": lambda: pyg.GATv2Conv(6, 3, dropout=0.5),
    "Transformer": lambda: pyg.TransformerConv(6, 3, dropout=0.5),
    "GIN": lambda: pyg.GINConv(Sequential(Linear(6, 8), ReLU(), Dropout(0.5), Linear(8, 3))),
    "EdgeConv": lambda: pyg.EdgeConv(Sequential(Linear(12, 8), ReLU(), Dropout(0.5), Linear(8, 3))),
    "ARMA": lambda: pyg.ARMAConv(6, 3, dropout=0.5),
    "BatchNorm": lambda: pyg.GINConv(Sequential(Linear(6, 8), BatchNorm1d(8), ReLU(), Linear(8, 3))),
    "PNA": lambda: pyg.PNAConv(6, 6, ["mean", "max", "std"], ["identity"], torch.tensor([1, 5, 9, 3])),
}


@pytest.fixture(autouse=True)
def on(monkeypatch):
    monkeypatch.setenv("STRETTO_SHADOW", "1")


def lying(stock, wrong):
    """A layer's class whose fast function is wrong(conv, right, *args), with right its true result."""
    right = stock.forward
    fast = accelerated_forward(Layer(stock, lambda conv, *args, **kwargs: wrong(right(conv, *args, **kwargs))))
    return type(stock.__name__, (stock,), {"forward": fast})


def steps(conv, count=3):
    """Results, gradients, buffers and the next random number after some training steps."""
    torch.manual_seed(7)
    seen = []
    for _ in range(count):
        conv.zero_grad()
        out = conv(X, EDGE_INDEX)
        out.square().sum().backward()
        seen += [out.detach(), *(p.grad.clone() for p in conv.parameters() if p.grad is not None)]
    return [*seen, *(b.clone() for b in conv.buffers()), torch.rand(3)]


@pytest.mark.parametrize("name", RANDOM)
def test_training_is_what_it_is_without(name, monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "analytic")  # plans that are tried in turn differ in rounding
    torch.manual_seed(3)
    watched = stretto.accelerate(RANDOM[name]()).train()
    alone = copy.deepcopy(watched)
    got = steps(watched)
    assert record_of(watched).path == "fast", record_of(watched).reason
    monkeypatch.setenv("STRETTO_SHADOW", "0")
    wanted = steps(alone)
    for mine, theirs in zip(got, wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert "_stretto_mismatch" not in watched.__dict__


def test_random_bits_of_our_own_are_told_once_and_what_is_wrong_besides_is_found(caplog, monkeypatch):
    monkeypatch.setattr(shadow, "_said", set())
    conv = stretto.accelerate(pyg.GATConv(6, 3, dropout=0.5))
    with caplog.at_level(logging.WARNING, logger="stretto"):
        conv(X, EDGE_INDEX)
        conv(X, EDGE_INDEX)
    assert caplog.text.count("compared without dropout") == 1
    conv.__class__ = lying(pyg.GATConv, lambda out: out * 1.01)
    with caplog.at_level(logging.ERROR, logger="stretto"):
        conv(X, EDGE_INDEX)
    assert record_of(conv).path == "stock"
    assert conv.training


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_no_mismatch(value):
    x = X.clone()
    x[0, 0] = value
    for conv in (pyg.GCNConv(6, 3), pyg.SAGEConv(6, 3), pyg.SAGEConv(6, 3, aggr="max"), pyg.GATConv(6, 3)):
        stretto.accelerate(conv)(x, EDGE_INDEX)
        assert record_of(conv).path == "fast", (conv, record_of(conv).reason)


def test_a_nan_that_stock_does_not_have_is_found():
    conv = pyg.GCNConv(6, 3)
    conv.__class__ = lying(pyg.GCNConv, lambda out: out.masked_fill(torch.arange(N).unsqueeze(1) == 5, float("nan")))
    assert not conv(X, EDGE_INDEX).isnan().any()
    assert record_of(conv).path == "stock"


def test_tuples_and_dicts_are_compared():
    conv = pyg.GATConv(6, 3)
    conv.__class__ = lying(pyg.GATConv, lambda out: (out[0], (out[1][0], out[1][1] * 1.5)))
    _, (_, alpha) = conv(X, EDGE_INDEX, return_attention_weights=True)
    assert record_of(conv).path == "stock"
    torch.testing.assert_close(alpha, pyg.GATConv.forward(conv, X, EDGE_INDEX, return_attention_weights=True)[1][1])

    kinds = [("a", "to", "b"), ("b", "to", "b")]
    hetero = pyg.HeteroConv({kind: pyg.SAGEConv((6, 6), 3) for kind in kinds})
    inputs = {"a": X, "b": X}, dict.fromkeys(kinds, EDGE_INDEX)
    assert record_of(stretto.accelerate(hetero)).path == ""
    hetero(*inputs)
    assert record_of(hetero).path == "fast"
    hetero.__class__ = lying(pyg.HeteroConv, lambda out: {key: value + 1 for key, value in out.items()})
    hetero(*inputs)
    assert record_of(hetero).path == "stock"


class _Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


def test_a_wrong_gradient_is_found_and_stock_takes_the_step(caplog):
    conv = pyg.GCNConv(6, 3)
    other = copy.deepcopy(conv)
    conv.__class__ = lying(pyg.GCNConv, _Bent.apply)
    with caplog.at_level(logging.ERROR, logger="stretto"):
        conv(X, EDGE_INDEX).square().sum().backward()
    assert "in its gradients" in caplog.text
    other(X, EDGE_INDEX).square().sum().backward()
    for mine, theirs in zip(conv.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_gradients_of_inputs_are_compared():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.zeros_like(grad)

    def wrong(conv, x, edge_index, edge_weight=None):
        return right(conv, Own.apply(x), edge_index, edge_weight)

    right = pyg.GCNConv.forward
    conv = pyg.GCNConv(6, 3)
    conv.__class__ = type("GCNConv", (pyg.GCNConv,), {"forward": accelerated_forward(Layer(pyg.GCNConv, wrong))})
    conv(X, EDGE_INDEX)
    assert record_of(conv).path == "fast"  # nobody wants the gradient of x
    conv(X.clone().requires_grad_(), EDGE_INDEX)
    assert record_of(conv).path == "stock"


def test_a_gradient_that_is_rounding_alone_is_no_mismatch():
    layers = Sequential(Linear(6, 8), BatchNorm1d(8), ReLU(), Linear(8, 3))  # the first bias has gradient 0
    for dtype in (torch.float32, torch.float64):
        conv = stretto.accelerate(pyg.GINConv(copy.deepcopy(layers)).to(dtype))
        for _ in range(3):
            conv(X.to(dtype), EDGE_INDEX).square().sum().backward()
        assert record_of(conv).path == "fast", record_of(conv).reason


def test_hooks_and_gradients_of_the_user_are_left_alone():
    conv = stretto.accelerate(pyg.GCNConv(6, 3))
    parameters, fired = list(conv.parameters()), []
    for parameter in parameters:
        parameter.register_hook(lambda grad: fired.append(1))
    x = X.clone().requires_grad_()
    x.register_hook(lambda grad: fired.append(1))
    out = conv(x, EDGE_INDEX)
    assert not fired
    assert x.grad is None
    assert all(a is b and a.grad is None for a, b in zip(parameters, conv.parameters(), strict=True))
    out.sum().backward()
    assert len(fired) == 1 + len(parameters)


def test_of_a_layer_of_the_users_own():
    class Own(pyg.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

    conv = stretto.accelerate(Own())
    conv(X.clone().requires_grad_(), EDGE_INDEX)
    assert record_of(conv).path == "fast", record_of(conv).reason


@pytest.mark.parametrize("value", ["0", "00"])
def test_zero_in_any_spelling_is_off(value, monkeypatch):
    monkeypatch.setenv("STRETTO_SHADOW", value)
    conv = pyg.GCNConv(6, 3)
    conv.__class__ = lying(pyg.GCNConv, lambda out: out + 1)
    conv(X, EDGE_INDEX)
    assert record_of(conv).path == "fast"


def test_every_third_call(monkeypatch):
    monkeypatch.setenv("STRETTO_SHADOW", "3")
    conv = pyg.GCNConv(6, 3)
    conv.__class__ = lying(pyg.GCNConv, lambda out: out + 1)
    paths = []
    for _ in range(4):
        conv(X, EDGE_INDEX)
        paths.append(record_of(conv).path)
    assert paths == ["fast", "fast", "stock", "stock"]


@pytest.mark.parametrize("door", ["accelerated", "restore", "patch"])
def test_leaving_by_any_door_leaves_no_mark(door, monkeypatch):
    conv = pyg.GCNConv(6, 3)
    before = set(conv.__dict__)
    monkeypatch.setattr(shadow, "difference", lambda got, wanted: 1.0)
    if door == "accelerated":
        with stretto.accelerated(conv):
            conv(X, EDGE_INDEX)
            assert "_stretto_mismatch" in conv.__dict__
    elif door == "restore":
        stretto.accelerate(conv)(X, EDGE_INDEX)
        stretto.restore(conv)
    else:
        stretto.patch()
        try:
            conv(X, EDGE_INDEX)
            assert "_stretto_mismatch" in conv.__dict__
        finally:
            stretto.unpatch()
    assert set(conv.__dict__) == before
