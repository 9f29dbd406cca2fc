"""Neighbour sampling, slicing and transfer that never leave the trainer waiting."""

from stretto.loader.cluster import ClusterData, ClusterLoader
from stretto.loader.neighbor_loader import LinkNeighborLoader, NeighborLoader
from stretto.loader.sampler import NeighborSampler
from stretto.loader.shadow import ShaDowKHopSampler
from stretto.loader.store import Store
from stretto.loader.trim import Layer, layers, run_trimmed
from stretto.loader.walk import random_walk

__all__ = [
    "ClusterData",
    "ClusterLoader",
    "Layer",
    "LinkNeighborLoader",
    "NeighborLoader",
    "NeighborSampler",
    "ShaDowKHopSampler",
    "Store",
    "layers",
    "random_walk",
    "run_trimmed",
]
