"""What is not finite at a node that no edge reads stays out of every gradient that stock keeps finite."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto.layers import CONVS
from tests.layers.sized_layers import LAYERS, gradients_of, inputs

NODES, EDGES, WIDTH = 60, 400, 16
ALONE, SILENT, DEAF = NODES - 5, NODES - 15, NODES - 25  # no edges; only edges that arrive; only edges that leave


def test_every_layer_is_in_the_table():
    made = {type(module) for layer in LAYERS.values() for module in layer.make(WIDTH).modules()}
    assert set(CONVS) <= made


def edges() -> Tensor:
    """The last ten nodes have none, ten before them none that leave, ten more none that arrive."""
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(NODES - 20, (EDGES,), generator=generator)
    target = torch.randint(NODES - 20, (EDGES,), generator=generator)
    source = torch.where(source >= NODES - 30, source - 25, source)
    target = torch.where(target >= NODES - 30, target + 10, target)
    source[:10], target[10:20] = torch.arange(NODES - 30, NODES - 20), torch.arange(NODES - 20, NODES - 10)
    return torch.stack([source, target])


def features(given: list[Any]) -> list[Tensor]:
    """All features of nodes among the arguments of a call."""
    first = [*given[0].values()] if isinstance(given[0], dict) else [given[0]]
    return first + [t for t in given[1:2] if isinstance(t, Tensor) and t.is_floating_point()]


def test_the_graph_is_what_it_says():
    source, target = edges()
    for node, sends, receives in ((ALONE, False, False), (SILENT, False, True), (DEAF, True, False)):
        assert bool((source == node).any()) == sends
        assert bool((target == node).any()) == receives


@pytest.mark.parametrize("blocks", [False, True], ids=["at once", "in blocks"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_finite_where_stock_has_them_finite(name, blocks, monkeypatch):
    if blocks:
        monkeypatch.setattr("stretto.layers.edges.streaming.LARGE", 1)
        monkeypatch.setattr("stretto.ops.edge_layer.MOST", 1)
    layer = LAYERS[name]
    torch.manual_seed(0)
    stock = layer.make(WIDTH).double().eval()
    fast = stretto.accelerate(copy.deepcopy(stock))
    for node, value in itertools.product((ALONE, SILENT, DEAF), (float("nan"), float("inf"))):
        given, learned = inputs(layer, edges(), NODES, WIDTH)
        for x in features(given):
            x[node] = value
        wanted, found = (gradients_of(model, given, learned) for model in (stock, fast))
        for key, theirs in wanted.items():
            finite = theirs.isfinite()
            what = f"{name}: {key} with {value} at node {node}"
            assert not (finite & ~found[key].isfinite()).any(), f"{what}: not finite where stock is"
            scale = max(float(theirs[finite].abs().max()) if finite.any() else 0.0, 1e-3)
            close = (found[key] - theirs)[finite].abs() <= 1e-9 * scale
            assert close.all(), f"{what}: another value than stock's"
