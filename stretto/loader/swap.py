"""Swap: PyG's own names for loaders and samplers mean ours, until undone. Part of stretto.patch()."""

import importlib
from typing import Any

from stretto.loader import walk
from stretto.loader.cluster import ClusterData, ClusterLoader
from stretto.loader.datamodule import link_loader, node_loader
from stretto.loader.neighbor_loader import LinkNeighborLoader, NeighborLoader
from stretto.loader.sampler import NeighborSampler
from stretto.loader.shadow import ShaDowKHopSampler

# (module, name) -> ours. Each module that has imported the name is listed: a name bound elsewhere stays PyG's.
NAMES: dict[tuple[str, str], Any] = {
    ("torch_geometric.loader", "NeighborLoader"): NeighborLoader,
    ("torch_geometric.loader", "LinkNeighborLoader"): LinkNeighborLoader,
    ("torch_geometric.loader.neighbor_loader", "NeighborLoader"): NeighborLoader,
    ("torch_geometric.loader.link_neighbor_loader", "LinkNeighborLoader"): LinkNeighborLoader,
    ("torch_geometric.loader", "ClusterData"): ClusterData,
    ("torch_geometric.loader", "ClusterLoader"): ClusterLoader,
    ("torch_geometric.loader", "ShaDowKHopSampler"): ShaDowKHopSampler,
    ("torch_geometric.loader.cluster", "ClusterData"): ClusterData,
    ("torch_geometric.loader.cluster", "ClusterLoader"): ClusterLoader,
    ("torch_geometric.loader.shadow", "ShaDowKHopSampler"): ShaDowKHopSampler,
    ("torch_geometric.data.lightning.datamodule", "NeighborSampler"): NeighborSampler,
    ("torch_geometric.data.lightning.datamodule", "NodeLoader"): node_loader,
    ("torch_geometric.data.lightning.datamodule", "LinkLoader"): link_loader,
}
_before: dict[tuple[str, str], Any] = {}


def install() -> None:
    """Bind PyG's names to ours. Calling it twice is calling it once."""
    for (module, name), ours in NAMES.items():
        place = importlib.import_module(module)
        if (module, name) not in _before and hasattr(place, name):
            _before[module, name] = getattr(place, name)
            setattr(place, name, ours)
    walk.install()


def remove() -> None:
    """Bind every name to what it was."""
    walk.remove()
    for (module, name), stock in _before.items():
        setattr(importlib.import_module(module), name, stock)
    _before.clear()
