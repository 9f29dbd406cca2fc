"""Layers over several types of nodes beyond the table of all layers: dropout, changed graphs, real data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto import datasets
from stretto.nn import record_of
from tests.nn.inputs import hetero
from tests.nn.options import SPECS
from tests.nn.options_attention import CHANNELS, METADATA


def test_dropout_of_han():
    """Equal in eval, reproducible by a seed in training, and right on average."""
    torch.manual_seed(0)
    stock = pyg.HANConv(CHANNELS, 4, METADATA, heads=2, dropout=0.4).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    args = hetero("unsorted", SPECS[pyg.HANConv], torch.float64).args
    exact = stock.eval()(*args)
    for kind, value in fast.eval()(*args).items():
        torch.testing.assert_close(value, exact[kind])
    fast.train()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(fast(*args))
    assert record_of(fast).path == "fast"
    for kind in exact:
        torch.testing.assert_close(runs[0][kind], runs[1][kind])
        assert not torch.equal(runs[0][kind], exact[kind])


def test_a_changed_relation_is_seen():
    torch.manual_seed(0)
    stock = pyg.HGTConv(CHANNELS, 4, METADATA, heads=2).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    x, relations = hetero("unsorted", SPECS[pyg.HGTConv], torch.float64).args
    for change in range(3):
        for kind, value in stock(x, relations).items():
            torch.testing.assert_close(fast(x, relations)[kind], value)
        if change == 0:
            relations["a", "to", "b"][0, 0] = 1 - relations["a", "to", "b"][0, 0].clamp(max=1)
        else:
            relations["b", "among", "b"] = relations["b", "among", "b"].flip(0)
    assert record_of(fast).path == "fast"


@pytest.mark.parametrize("name", ["hetero-acm", "hetero-dblp"])
@pytest.mark.parametrize("make", [pyg.HGTConv, pyg.HANConv], ids=lambda c: c.__name__)
def test_real_relations(name, make):
    if name not in datasets.names():
        pytest.skip(f"no {name}.npz in the data folder")
    data = datasets.load(name)
    generator = torch.Generator().manual_seed(0)
    kinds = list(data.num_nodes)
    x = {k: torch.randn(n, 8, generator=generator, dtype=torch.float64) for k, n in data.num_nodes.items()}
    torch.manual_seed(0)
    stock = make(8, 8, (kinds, list(data.edge_index)), heads=2).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    found = []
    for layer in (stock, fast):
        leaves = {k: v.clone().requires_grad_() for k, v in x.items()}
        out = {k: v for k, v in layer(leaves, data.edge_index).items() if v is not None}
        total = sum((v * v).sum() for v in out.values())
        wanted = [*leaves.values(), *layer.parameters()]
        grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        found.append([*out.values(), *grads])
    assert record_of(fast).path == "fast"
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8 * max(float(wanted.abs().max()), 1.0))
