"""Messages that are exactly 0: torch's scatter counts the zero its result starts from among those that attain a maximum
of 0, so half of a gradient may be at stake. What decides is the whole message, not the part that a plan gathers."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear

import stretto
from stretto import kernels
from stretto.layers import record_of
from stretto.layers.edges import streaming

EDGES = torch.tensor([[0, 0, 1, 4, 2, 5, 4, 0], [1, 2, 2, 2, 4, 4, 1, 4]])  # nodes 0 and 5 hear nobody, nor does 3
DEGREES = torch.tensor([1, 2, 3])


def features(zeros: list[int], width: int = 2) -> torch.Tensor:
    """Some nodes' features are all 0, no two others are equal. [6, width]"""
    x = torch.randn(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[zeros] = 0
    return x


def same_as_stock(conv, *inputs):
    """Results and all gradients in fp64; the accelerated layer's plan."""
    stock = conv.double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    found = []
    for layer in (stock, fast):
        leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
        out = layer(*leaves)
        wanted = [*(t for t in leaves if t.is_floating_point()), *layer.parameters()]
        cotangent = torch.arange(1.0, out.numel() + 1, dtype=torch.float64).view(out.shape).sqrt()
        found.append([out, *torch.autograd.grad(out, wanted, cotangent, allow_unused=True, materialize_grads=True)])
    assert record_of(fast).path == "fast", record_of(fast).reason
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    return record_of(fast).plan


@pytest.fixture(params=["native", "reference"])
def backend(request):
    """Where PNAConv's statistics come from one kernel, and where from one product after the other, as on a GPU."""
    with kernels.forced(kernels.REFERENCE) if request.param == "reference" else contextlib.nullcontext():
        yield


@pytest.mark.parametrize("zeros", [[0], [0, 1, 2, 3, 4, 5], []], ids=["one", "all", "none"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("aggr", ["max", "min", "sum", "mean"])
def test_edge_conv_of_one_linear(aggr, bias, zeros, backend):
    same_as_stock(pyg.EdgeConv(Linear(4, 3, bias=bias), aggr=aggr), features(zeros), EDGES)


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_edge_conv_whose_messages_cancel(aggr, backend):
    """u_i + v_j is 0 and neither part is."""
    conv = pyg.EdgeConv(Linear(2, 1, bias=False), aggr=aggr)
    with torch.no_grad():
        conv.nn.weight.copy_(torch.tensor([[0.0, 2.0]]))  # 2 (x_j - x_i)
    x = torch.tensor([[3.0], [3.0], [4.0], [0.0], [3.0], [-1.0]], dtype=torch.float64)
    same_as_stock(conv, x, EDGES)


@pytest.mark.parametrize("zeros", [[0], [0, 1, 2, 3, 4, 5]], ids=["one", "all"])
@pytest.mark.parametrize("bias", [True, False])
def test_pna_conv(bias, zeros, backend):
    conv = pyg.PNAConv(2, 3, ["max", "min", "mean", "sum"], ["identity", "attenuation"], DEGREES)
    if not bias:
        torch.nn.init.zeros_(conv.pre_nns[0][0].bias)
    same_as_stock(conv, features(zeros), EDGES)


@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "in blocks"])
@pytest.mark.parametrize("biases", [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_pna_conv_with_edge_features(biases, blocks, monkeypatch, backend):
    """The message without u_i is 0 where features of node and edge are and the encoder has no bias."""
    if blocks:
        monkeypatch.setattr(streaming, "LARGE", 0)
        monkeypatch.setattr(streaming, "BLOCK", 3)
    conv = pyg.PNAConv(2, 3, ["max", "min", "mean", "sum"], ["identity"], DEGREES, edge_dim=2)
    torch.nn.init.constant_(conv.pre_nns[0][0].bias, biases[0])
    torch.nn.init.constant_(conv.edge_encoder.bias, biases[1])
    attr = torch.randn(EDGES.size(1), 2, dtype=torch.float64)
    attr[[0, 1, 7]] = 0
    plan = same_as_stock(conv, features([0]), EDGES, attr)
    assert ("in blocks" in plan) == blocks


def test_second_derivatives_of_blocks(monkeypatch):
    """Differentiated twice the blocks are one, through plain PyTorch, and know the zero too."""
    conv = pyg.PNAConv(2, 3, ["max"], ["identity"], DEGREES, edge_dim=2).double()
    torch.nn.init.zeros_(conv.edge_encoder.bias)
    fast = stretto.accelerate(copy.deepcopy(conv))
    monkeypatch.setattr(streaming, "LARGE", 0)
    found = []
    for layer in (conv, fast):
        x, attr = features([0]).requires_grad_(), torch.zeros(EDGES.size(1), 2, dtype=torch.float64)
        (first,) = torch.autograd.grad(layer(x, EDGES, attr).pow(3).sum(), x, create_graph=True)
        found.append(
            [
                first,
                *torch.autograd.grad(first.square().sum(), [x, conv.lin.weight if layer is conv else fast.lin.weight]),
            ]
        )
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
