"""Swap: PyG's own names for loaders and samplers mean ours, until undone. Part of stretto.patch()."""

import importlib
from typing import Any

from stretto.loader import walk
from stretto.loader.neighbor_loader import LinkNeighborLoader, NeighborLoader
from stretto.loader.sampler import NeighborSampler

# (module, name) -> ours. Each module that has imported the name is listed: a name bound elsewhere stays PyG's.
NAMES: dict[tuple[str, str], Any] = {
    ("torch_geometric.loader", "NeighborLoader"): NeighborLoader,
    ("torch_geometric.loader", "LinkNeighborLoader"): LinkNeighborLoader,
    ("torch_geometric.loader.neighbor_loader", "NeighborLoader"): NeighborLoader,
    ("torch_geometric.loader.link_neighbor_loader", "LinkNeighborLoader"): LinkNeighborLoader,
    ("torch_geometric.data.lightning.datamodule", "NeighborSampler"): NeighborSampler,
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
