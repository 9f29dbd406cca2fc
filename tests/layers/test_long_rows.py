"""A row of 100,000 edges, among destinations and among sources, through whole layers in fp64: results and gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear

import stretto
from stretto.layers import record_of

NODES, EDGES, IN, DIM = 40, 102_000, 4, 2
DEGREES = torch.tensor([0, 10, 20, 9])
PNA = (["mean", "min", "max", "std"], ["identity", "attenuation"], DEGREES)

# name -> (layer, whether it takes edge attributes)
LAYERS = {
    "GATConv": (lambda: pyg.GATConv(IN, 2, heads=2, edge_dim=DIM), True),
    "GATv2Conv": (lambda: pyg.GATv2Conv(IN, 2, heads=2), False),
    "TransformerConv": (lambda: pyg.TransformerConv(IN, 2, heads=2, edge_dim=DIM), True),
    "AGNNConv": (lambda: pyg.AGNNConv(), False),
    "SuperGATConv": (lambda: pyg.SuperGATConv(IN, 2, heads=2), False),
    "GENConv": (lambda: pyg.GENConv(IN, IN, norm="layer"), False),
    "PNAConv": (lambda: pyg.PNAConv(IN, 3, *PNA), False),
    "PNAConv edges": (lambda: pyg.PNAConv(IN, 3, *PNA, edge_dim=DIM), True),
    "GINEConv": (lambda: pyg.GINEConv(Linear(IN, 3), edge_dim=DIM), True),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(IN, 3), False),
    "CGConv": (lambda: pyg.CGConv(IN, DIM), True),
    "NNConv": (lambda: pyg.NNConv(IN, 2, Linear(DIM, 2 * IN)), True),
}


@functools.cache
def edges() -> torch.Tensor:
    """Node 3 hears 100,000 times, in no order; 2,000 edges besides, none to the last node."""
    generator = torch.Generator().manual_seed(5)
    pairs = torch.randint(NODES - 1, (2, EDGES), generator=generator)
    pairs[1, torch.randperm(EDGES, generator=generator)[:100_000]] = 3
    return pairs


@pytest.mark.parametrize("backwards", [False, True], ids=["destination", "source"])
@pytest.mark.parametrize("name", LAYERS)
def test_as_stock(name, backwards):
    make, takes_attr = LAYERS[name]
    torch.manual_seed(0)
    stock = make().double().eval()  # SuperGATConv draws in training
    fast = stretto.accelerate(copy.deepcopy(stock))
    index = edges().flip(0) if backwards else edges()
    generator = torch.Generator().manual_seed(6)
    given = [torch.randn(NODES, IN, generator=generator, dtype=torch.float64)]
    given += [torch.randn(EDGES, DIM, generator=generator, dtype=torch.float64)] if takes_attr else []
    found = []
    for layer in (stock, fast):
        leaves = [t.clone().requires_grad_() for t in given]
        out = layer(leaves[0], index, *leaves[1:])
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        wanted = [*leaves, *(p for p in layer.parameters() if p.requires_grad)]
        found.append([out.detach(), *torch.autograd.grad(out, wanted, cotangent, materialize_grads=True)])
    assert record_of(fast).path == "fast", record_of(fast).reason
    for theirs, ours in zip(*found, strict=True):
        scale = max(float(theirs.abs().max()), 1e-3)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * scale)
