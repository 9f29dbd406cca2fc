"""What loaders of one edge_index share, and when they must not."""

import copy
import gc
import weakref

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from stretto.errors import StrettoError
from stretto.loader import arrays
from tests.loader.data import homogeneous


def edges(data):
    return arrays.read(data).edges[None]


def same(a, b):
    return all(torch.equal(x, y) for x, y in ((a.colptr, b.colptr), (a.row, b.row), (a.edge_id, b.edge_id)))


def test_the_second_loader_sorts_nothing():
    data = homogeneous()
    first = edges(data)
    assert edges(data) is first
    assert edges(Data(edge_index=data.edge_index, num_nodes=data.num_nodes)) is first
    assert edges(copy.deepcopy(data)) is not first
    assert same(edges(copy.deepcopy(data)), first)


def test_an_edit_in_place_and_other_sizes_are_seen():
    data = homogeneous()
    first = edges(data)
    data.edge_index[:, 0] = torch.tensor([5, 3])
    after = edges(data)
    assert same(after, edges(copy.deepcopy(data)))
    assert not same(after, first)
    assert edges(Data(edge_index=data.edge_index, num_nodes=data.num_nodes + 7)).colptr.numel() == data.num_nodes + 8
    data.edge_index[0, 0] = data.num_nodes
    with pytest.raises(StrettoError, match="source"):
        edges(data)


def test_it_goes_with_the_edge_index():
    data = homogeneous()
    row = weakref.ref(edges(data).row)
    assert row() is not None
    del data
    gc.collect()
    assert row() is None


def test_times_and_weights_are_sorted_for_themselves():
    data = homogeneous()
    data.weight = torch.rand(data.num_edges)
    data.when = torch.arange(data.num_edges)
    plain = edges(data)
    weighted = arrays.read(data, weight_attr="weight").edges[None]
    assert weighted is not plain
    assert weighted.running is not None
    assert edges(data).running is None
    assert arrays.read(data, time_attr="when").edges[None].time is not None
    assert edges(data) is plain
    assert plain.time is None


def test_what_counts_no_versions_is_sorted_again():
    data = homogeneous()
    with torch.inference_mode():
        data.edge_index = data.edge_index.clone()
    first = edges(data)
    with torch.inference_mode():
        data.edge_index[:, 0] = torch.tensor([5, 3])
    assert not same(edges(data), first)


def test_edge_index_of_pyg_is_its_tensor():
    data = homogeneous()
    wrapped = Data(edge_index=EdgeIndex(data.edge_index), num_nodes=data.num_nodes)
    assert same(edges(wrapped), edges(data))
