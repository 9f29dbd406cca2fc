"""The sums over neighbours that a training step really takes, counted at the kernel: calls and widths."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.compile import CHOOSER, HOIST

# Widths of a two-layer net -> widths of all sums in one epoch, forward and backward, in units of E: none in the first
# layer, whose A X is kept, and the second's at its narrower side each way.
NETS = {(602, 32, 41): 32, (100, 256, 47): 47, (128, 256, 40): 40, (1433, 16, 7): 7}


@pytest.fixture(autouse=True)
def _predicted(fresh_memo, monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "analytic")
    CHOOSER.clear()
    HOIST.clear()
    yield
    CHOOSER.clear()
    HOIST.clear()


def _net(kind, widths):
    i, h, o = widths
    return pyg.Sequential("x, e", [(kind(i, h), "x, e -> x"), torch.nn.ReLU(), (kind(h, o), "x, e -> x")])


@pytest.mark.parametrize("kind", [pyg.GCNConv, pyg.SAGEConv, pyg.GraphConv], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("widths", NETS, ids=str)
def test_an_epoch_takes_no_more_than_the_full_space_holds(kind, widths, sums):
    torch.manual_seed(0)
    n = 3000
    x, edge_index = torch.randn(n, widths[0]), torch.randint(n, (2, 30_000))
    net = stretto.accelerate(_net(kind, widths))
    optimizer = torch.optim.Adam(net.parameters())
    for epoch in range(5):
        sums.clear()
        optimizer.zero_grad()
        net(x, edge_index).square().mean().backward()
        optimizer.step()
        if epoch > 2:
            assert sums == [NETS[widths]] * 2
    assert HOIST.nbytes() == x.numel() * 4


@pytest.mark.parametrize("widths", NETS, ids=str)
def test_beyond_the_budget_the_first_layer_sums_once_an_epoch(widths, sums, monkeypatch):
    monkeypatch.setenv("STRETTO_HOIST_MB", "0")
    torch.manual_seed(0)
    x, edge_index = torch.randn(3000, widths[0]), torch.randint(3000, (2, 30_000))
    net = stretto.accelerate(_net(pyg.GCNConv, widths))
    for _ in range(4):
        sums.clear()
        net(x, edge_index).square().mean().backward()
    i, h, _ = widths
    first = [i] if i < 2 * h else [h, h]  # dX is not needed: (A X) W' once, or A (X W') and its gradient
    assert sorted(sums) == sorted([*first, NETS[widths], NETS[widths]])


@pytest.mark.parametrize(
    ("make", "widths"),
    [
        (lambda: pyg.SGConv(64, 16, K=2), [16] * 4),  # A (A (X W')), and back
        (lambda: pyg.SGConv(16, 64, K=2), [16] * 4),
        (lambda: pyg.TAGConv(64, 8, K=3), [8] * 6),  # Horner: three hops at the narrow side each way
        (lambda: pyg.TAGConv(8, 64, K=3), [8] * 6),
        (lambda: pyg.ChebConv(64, 8, K=4), [8] * 6),  # Clenshaw
        (lambda: pyg.ChebConv(8, 64, K=4), [8] * 6),
        (lambda: pyg.APPNP(5, 0.1), [64] * 10),
        (lambda: pyg.SSGConv(64, 16, alpha=0.1, K=2), [16] * 4),
        (lambda: pyg.GINConv(torch.nn.Linear(64, 16)), [16] * 2),
        (lambda: pyg.GINConv(torch.nn.Linear(16, 64)), [16] * 2),
    ],
    ids=["SGC", "SGC wide", "TAG", "TAG wide", "Cheb", "Cheb wide", "APPNP", "SSG", "GIN", "GIN wide"],
)
def test_a_hidden_layer_sums_at_its_narrow_side_both_ways(make, widths, sums):
    conv = stretto.accelerate(make())
    channels = getattr(conv, "in_channels", None) or (conv.nn.in_features if hasattr(conv, "nn") else 64)
    torch.manual_seed(0)
    x = torch.randn(3000, channels, requires_grad=True)
    edge_index = torch.randint(3000, (2, 30_000))
    for _ in range(2):
        sums.clear()
        conv(x, edge_index).square().mean().backward()
        assert sums == widths
