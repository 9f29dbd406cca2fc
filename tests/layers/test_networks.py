"""GIN's and GINE's networks on graphs large enough for ReLU and Linear to be one step: as stock, hooks and all."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import MLP, GINConv, GINEConv

from stretto.kernels import native
from stretto.layers import gin
from stretto.ops import edge_layer
from stretto.plug.accelerate import accelerate

NODES = 4000
NETWORKS = {
    "sequential": lambda: nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8)),
    "three": lambda: nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)),
    "no bias": lambda: nn.Sequential(nn.Linear(24, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False)),
    "in place": lambda: nn.Sequential(nn.Linear(24, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)),
    "wide": lambda: nn.Sequential(nn.Linear(24, 160), nn.ReLU(), nn.Linear(160, 8)),
    "normed": lambda: nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)),
    "other": lambda: nn.Sequential(nn.Linear(24, 32), nn.ELU(), nn.Linear(32, 8)),
    "relu last": lambda: nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU()),
    "mlp": lambda: MLP([24, 32, 32, 8], norm=None),
    "mlp, batch norm": lambda: MLP([24, 32, 8]),
    "mlp, dropout": lambda: MLP([24, 32, 8], norm=None, dropout=0.5),
    "mlp, not plain": lambda: MLP([24, 32, 8], norm=None, plain_last=False),
    "mlp, act first": lambda: MLP([24, 32, 8], norm="batch_norm", act_first=True),
}


def _inputs(edge: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(NODES, 24, dtype=torch.float64, requires_grad=True)
    index = torch.randint(NODES, (2, 5 * NODES))
    return [x, index, *([torch.randn(5 * NODES, 24, dtype=torch.float64, requires_grad=True)] if edge else [])]


def _results(conv: nn.Module, edge: bool) -> list[torch.Tensor]:
    inputs = _inputs(edge)
    torch.manual_seed(2)  # dropout
    out = conv(*inputs)
    leaves = [t for t in inputs if t.requires_grad] + list(conv.parameters())
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", [GINConv, GINEConv])
def test_networks_equal_stock(kind, name, train, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(edge_layer, "MOST", 0)  # tests/layers/test_one_step.py has layers that are one step
    stock = kind(NETWORKS[name]()).double().train(train)
    ours = accelerate(copy.deepcopy(stock))
    for _ in range(2):
        for got, wanted in zip(_results(ours, kind is GINEConv), _results(stock, kind is GINEConv), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(native.library() is None, reason="libstretto is not loaded")
def test_relu_and_linear_are_one_step(monkeypatch):
    seen = []
    real = gin.relu_dense
    monkeypatch.setattr(edge_layer, "MOST", 0)
    monkeypatch.setattr(gin, "relu_dense", lambda *a: (seen.append(len(a)), real(*a))[1])
    for kind in (GINConv, GINEConv):
        _results(accelerate(kind(NETWORKS["three"]()).double()), kind is GINEConv)
    assert len(seen) == 4


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", [GINConv, GINEConv])
def test_a_watched_module_is_called(kind, place):
    seen = []
    conv = kind(NETWORKS["sequential"]()).double()
    conv.nn[place].register_forward_hook(lambda *a: seen.append(place))
    _results(accelerate(conv), kind is GINEConv)
    assert seen == [place]
