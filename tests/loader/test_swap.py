"""PyG's names bound to ours and back, and PyG's Lightning datamodule over our sampler."""

import inspect

import pytest
import torch
import torch_geometric.loader
from torch_geometric.data.lightning import datamodule

from stretto.loader import LinkNeighborLoader, NeighborLoader, NeighborSampler, swap
from stretto.plug.accelerate import patch, unpatch
from tests.loader.data import check, homogeneous


def test_names_are_swapped_and_put_back():
    loader, link = torch_geometric.loader.NeighborLoader, torch_geometric.loader.LinkNeighborLoader
    sampler = datamodule.NeighborSampler
    swap.install()
    swap.install()
    try:
        assert torch_geometric.loader.NeighborLoader is NeighborLoader
        assert torch_geometric.loader.LinkNeighborLoader is LinkNeighborLoader
        assert datamodule.NeighborSampler is NeighborSampler
        data = homogeneous()
        for batch in torch_geometric.loader.NeighborLoader(data, num_neighbors=[4, 3], batch_size=64):
            check(batch, data)
    finally:
        swap.remove()
    assert torch_geometric.loader.NeighborLoader is loader
    assert torch_geometric.loader.LinkNeighborLoader is link
    assert datamodule.NeighborSampler is sampler


def test_patch_swaps_the_loaders_too():
    stock = torch_geometric.loader.NeighborLoader
    patch()
    try:
        assert torch_geometric.loader.NeighborLoader is NeighborLoader
    finally:
        unpatch()
    assert torch_geometric.loader.NeighborLoader is stock


def test_signatures_are_pygs():
    for ours in (NeighborLoader, LinkNeighborLoader):
        stock = inspect.signature(getattr(torch_geometric.loader, ours.__name__).__init__).parameters
        found = inspect.signature(ours.__init__).parameters
        assert [(p.name, p.default, p.kind) for p in found.values()] == [
            (p.name, p.default, p.kind) for p in stock.values()
        ]


@pytest.mark.parametrize("wrap", [torch_geometric.loader.PrefetchLoader, torch_geometric.loader.CachedLoader])
def test_pygs_wrappers_take_our_loader(wrap):
    data = homogeneous()
    loader = wrap(NeighborLoader(data, [4, 3], batch_size=64), device=torch.device("cpu"))
    for _ in range(2):
        seen = []
        for batch in loader:
            check(batch, data)
            seen.append(batch.input_id)
        assert torch.equal(torch.cat(seen), torch.arange(300))


def test_a_node_loader_as_the_datamodule_makes_it():
    data = homogeneous()
    loader = torch_geometric.loader.NodeLoader(
        data, node_sampler=NeighborSampler(data, num_neighbors=[3, 3], share_memory=False), input_nodes=data.train_mask,
        batch_size=16, shuffle=True, num_workers=0, pin_memory=False,
    )  # fmt: skip
    seen = []
    for batch in loader:
        check(batch, data)
        seen.append(batch.input_id)
    assert torch.equal(torch.cat(seen).sort().values, data.train_mask.nonzero().view(-1))
