"""Neighbour sampling, slicing and transfer that never leave the trainer waiting."""

from stretto.loader.neighbor_loader import LinkNeighborLoader, NeighborLoader
from stretto.loader.sampler import NeighborSampler
from stretto.loader.store import Store
from stretto.loader.trim import Layer, layers, run_trimmed
from stretto.loader.walk import random_walk

__all__ = [
    "Layer",
    "LinkNeighborLoader",
    "NeighborLoader",
    "NeighborSampler",
    "Store",
    "layers",
    "random_walk",
    "run_trimmed",
]
