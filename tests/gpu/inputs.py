"""What the tests on a GPU share."""

import importlib

import pytest
import torch

from stretto.ops.pick import TRIES, WARM
from stretto.ops.variants import VARIANTS

SETTLED = WARM + TRIES * len(VARIANTS["spmm"]["cuda"]) + 5  # calls after which the tuner has decided


@pytest.fixture(autouse=True)
def no_batch_is_passed_by(monkeypatch):
    """Small graphs run on our kernels at first sight: these tests are of the kernels."""
    adjacency = importlib.import_module("stretto.layers.adjacency")
    monkeypatch.setattr(adjacency, "PASSING", 0)
    monkeypatch.setattr(adjacency, "PASSING_EDGEWISE", 0)
    monkeypatch.setattr(importlib.import_module("stretto.layers.aggr"), "PASSING", 0)


def edges(num_nodes: int, num_edges: int, hub: int = 0) -> torch.Tensor:
    """Random pairs, `hub` of them into node 0."""
    pairs = torch.randint(0, num_nodes, (2, num_edges))
    pairs[1, :hub] = 0
    return pairs
