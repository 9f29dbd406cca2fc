"""PyG's Lightning datamodules over our loaders: what they call NodeLoader and LinkLoader, while patch() is in force."""

from typing import Any

import torch_geometric.loader as pyg

from stretto.loader.neighbor_loader import LinkNeighborLoader, NeighborLoader
from stretto.loader.sampler import NeighborSampler


def node_loader(data: Any, node_sampler: Any, **kwargs: Any) -> Any:
    """A NodeLoader: our threaded one where the sampler is ours, PyG's for any other."""
    if not isinstance(node_sampler, NeighborSampler):
        return pyg.NodeLoader(data, node_sampler=node_sampler, **kwargs)
    return NeighborLoader(data, node_sampler.num_neighbors, **_of(node_sampler), **kwargs)


def link_loader(data: Any, link_sampler: Any, **kwargs: Any) -> Any:
    """A LinkLoader: our threaded one where the sampler is ours, PyG's for any other."""
    if not isinstance(link_sampler, NeighborSampler):
        return pyg.LinkLoader(data, link_sampler=link_sampler, **kwargs)
    return LinkNeighborLoader(data, link_sampler.num_neighbors, **_of(link_sampler), **kwargs)


def _of(sampler: NeighborSampler) -> dict[str, Any]:
    """Times of seeds are taken only together with the attribute that holds those of the graph."""
    return {"neighbor_sampler": sampler, "time_attr": sampler.time_attr}
