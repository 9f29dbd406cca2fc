"""Layers whose backward makes messages again, in blocks of edges: it makes those of the forward, whatever has become of
the layer's modules since."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.func import functional_call
from torch.nn import BatchNorm1d, Dropout, Linear, ReLU, Sequential
from torch_geometric.nn.models.schnet import CFConv

import stretto
from stretto.layers import record_of
from stretto.layers.edges import streaming
from tests.layers.edge_layers import Mesh
from tests.layers.edge_layers import inputs as mesh_inputs
from tests.layers.test_streaming import LAYERS, inputs


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Every graph counts as large, and a block holds a few edges."""
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 5)


def _net(*sizes):
    """A network with both kinds of modules that have modes."""
    first, hidden, last = sizes
    return Sequential(Linear(first, hidden), BatchNorm1d(hidden).eval(), ReLU(), Dropout(0.5), Linear(hidden, last))


DEGREES = torch.tensor([1, 2, 3])
# name -> (layer, width of the attributes of edges)
MODES = {
    "EdgeConv": (lambda: pyg.EdgeConv(_net(12, 6, 4), aggr="sum"), None),
    "EdgeConv MLP": (lambda: pyg.EdgeConv(pyg.MLP([12, 6, 5, 4], dropout=0.5, norm=None), aggr="sum"), None),
    "EdgeConv passes": (lambda: pyg.EdgeConv(pyg.MLP([12, 6, 5, 4], dropout=0.5), aggr="sum"), None),
    "FiLMConv": (lambda: pyg.FiLMConv(6, 4, act=Dropout(0.5)), None),
    "ResGated": (lambda: pyg.ResGatedGraphConv(6, 4, edge_dim=3, act=Dropout(0.5)), 3),
    "NNConv": (lambda: pyg.NNConv(6, 4, _net(3, 5, 24)), 3),
    "NNConv passes": (lambda: pyg.NNConv(6, 4, pyg.MLP([3, 5, 7, 24], dropout=[0.5, 0.5, 0.0])), 3),
    "NNConv max": (lambda: pyg.NNConv(6, 4, _net(3, 5, 24), aggr="max"), 3),
    "PNAConv": (
        lambda: pyg.PNAConv(6, 4, ["mean", "std"], ["identity"], DEGREES, edge_dim=3, pre_layers=2, act=Dropout(0.5)),
        3,
    ),
    "CFConv": (lambda: CFConv(6, 4, 5, _net(3, 5, 5), cutoff=9.0), "lengths"),
    "Mesh": (lambda: Mesh(lambda i: _net(i, 5, 3)), "mesh"),
}


def prepared(make, dim):
    torch.manual_seed(0)
    layer = stretto.accelerate(make()).double()
    if dim == "mesh":
        return layer, [a.requires_grad_() if a.is_floating_point() else a for a in mesh_inputs("unsorted")]
    if dim == "lengths":
        x, index, attr = inputs(3)
        return layer, [x, index, attr.detach()[:, 0].abs().requires_grad_(), attr]
    return layer, inputs(dim)


@pytest.mark.parametrize("name", MODES)
def test_backward_after_another_mode(name):
    layer, args = prepared(*MODES[name])
    found = []
    for later in (layer.training, not layer.training):
        torch.manual_seed(3)
        modes = [module.training for module in layer.modules()]
        out = layer(*args)
        assert record_of(layer).path == "fast", record_of(layer).reason
        layer.train(later)
        leaves = [a for a in args if a.is_floating_point()] + list(layer.parameters())
        wanted = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        assert {module.training for module in layer.modules()} == {later}
        for module, mode in zip(layer.modules(), modes, strict=True):
            module.training = mode
        found.append(wanted)
    assert "in blocks" in record_of(layer).plan
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_functional_call(name):
    """Parameters that a layer has for the time of its forward: their gradients, at their values."""
    make, dim = LAYERS[name]
    torch.manual_seed(0)
    stock = make().double()
    given = {key: torch.randn_like(value).requires_grad_() for key, value in stock.named_parameters()}
    found = []
    for layer in (stock, stretto.accelerate(copy.deepcopy(stock))):
        args = inputs(dim)
        out = functional_call(layer, given, tuple(args))
        leaves = [a for a in args if a.is_floating_point()] + list(given.values())
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert record_of(layer).path == "fast"
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9 * float(wanted.detach().abs().max()))


def test_backward_after_other_modules():
    """Submodules and activations put into the layer since its forward have no part in its backward."""
    changes = {
        "EdgeConv": lambda layer: layer.nn.__setitem__(4, Linear(6, 4).double()),
        "NNConv": lambda layer: layer.nn.__setitem__(0, Linear(3, 5).double()),
        "NNConv max": lambda layer: setattr(layer, "nn", _net(3, 5, 24).double()),
        "FiLMConv": lambda layer: setattr(layer, "act", ReLU()),
        "ResGated": lambda layer: setattr(layer, "act", ReLU()),
        "CFConv": lambda layer: setattr(layer, "cutoff", 3.0),
        "Mesh": lambda layer: layer.net.__setitem__(4, Linear(5, 3).double()),
    }
    for name, change in changes.items():
        found = []
        for later in (None, change):
            layer, args = prepared(*MODES[name])
            leaves = [a for a in args if a.is_floating_point()] + list(layer.parameters())
            torch.manual_seed(3)
            out = layer(*args)
            if later is not None:
                later(layer)
            found.append(torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True))
        for wanted, got in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=name)
