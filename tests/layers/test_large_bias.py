"""A bias much larger than what it is added to, or not finite: it must not cost the gradients of the rest a digit."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.layers import record_of
from stretto.ops import folded_bias
from tests.compare import judge
from tests.graphs import random_edges

LAYERS = {
    "GATConv": lambda **o: pyg.GATConv(8, 4, heads=2, **o),
    "GATConv wide input": lambda **o: pyg.GATConv(8, 2, **o),
    "GATConv edges": lambda **o: pyg.GATConv(8, 4, heads=2, edge_dim=3, **o),
    "GATv2Conv": lambda **o: pyg.GATv2Conv(8, 4, heads=2, **o),
    "GATv2Conv shared": lambda **o: pyg.GATv2Conv(8, 4, share_weights=True, **o),
}
EDGES = random_edges(60, 60, 500, 3)


def layers_of(name: str, bias: float):
    """The untouched layer and an accelerated copy, fp32."""
    torch.manual_seed(1)
    stock = LAYERS[name]()
    torch.nn.init.constant_(stock.bias, bias)
    return stock, stretto.accelerate(copy.deepcopy(stock))


def gradients(layer, name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 8, generator=generator).to(dtype).requires_grad_()
    attr = [torch.randn(500, 3, generator=generator).to(dtype)] if "edges" in name else []
    out = layer(x, EDGES, *attr)
    cotangent = torch.randn(out.shape, generator=generator).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], cotangent)]


@pytest.mark.parametrize("bias", [0.1, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_keep_their_digits(name, bias):
    stock, fast = layers_of(name, bias)
    truth = gradients(copy.deepcopy(stock).double(), name, torch.float64)
    for k, (mine, theirs, true) in enumerate(zip(gradients(fast, name), gradients(stock, name), truth, strict=True)):
        judge(mine, theirs, true, f"{name} {k}", terms=60)
    assert record_of(fast).path == "fast"


@pytest.mark.parametrize("bias", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_not_finite_reaches_no_gradient(name, bias):
    stock, fast = layers_of(name, bias)
    for mine, theirs in zip(gradients(fast, name)[1:], gradients(stock, name)[1:], strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs)


def test_only_a_bias_beyond_the_values_is_added_afterwards(monkeypatch):
    """On the way as long as it is small: no further pass, no copy of the result."""
    seen = []
    monkeypatch.setattr(import_module("stretto.ops.attention"), "plus", lambda x, bias: seen.append(1) or x + bias)
    for bias, calls in ((0.0, 0), (0.1, 0), (100.0, 1)):
        _, fast = layers_of("GATConv", bias)
        gradients(fast, "GATConv")
        assert len(seen) == calls
    with torch.no_grad():  # nothing is taken off again
        fast(torch.randn(60, 8), EDGES)
    assert len(seen) == 1


def test_a_device_is_asked_now_and_then(monkeypatch):
    """Where the host would wait for the answer: the answer in between is the last one."""
    asked, found, answers = [], [], iter([True] + [False] * 100)
    monkeypatch.setattr(folded_bias, "_compare", lambda bias, values: asked.append(len(found)) or next(answers))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: len(found) == 4)
    bias = torch.empty(3, device="meta")
    for _ in range(600):
        found.append(folded_bias.larger(bias, lambda: bias))
    assert asked == [0, 1, 2, 8, 16, 32, 64, 128, 256, 512]  # 4: a graph is being captured
    assert found == [True] + [False] * 599
