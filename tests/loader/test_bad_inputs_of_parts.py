"""Parts of clusters, and layers of a batch, that somebody changed are refused by name."""

import pytest
import torch
from torch_geometric.loader import ClusterData as PygClusterData
from torch_geometric.nn import GraphSAGE

from stretto.errors import StrettoError
from stretto.loader import ClusterLoader, NeighborLoader
from stretto.loader.trim import layers, run_trimmed
from tests.loader.bad_values import COLPTR, ROW, N, data, decreasing, first
from tests.loader.data import check, homogeneous


def clusters(**changes):
    given = data()
    parts = PygClusterData.__new__(PygClusterData)
    partition = type("Partition", (), {})()
    partition.indptr, partition.index, partition.sparse_format = COLPTR, ROW.long(), "csc"
    partition.partptr = torch.tensor([0, 20, N])
    for name, value in changes.items():
        setattr(partition, name, value)
    parts.partition, parts.data, parts.num_parts = partition, given, 2
    return parts


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"indptr": decreasing(COLPTR)}, "'colptr' decreases"),
        ({"index": ROW.long() - 1}, "'row' has source -1"),
        ({"index": ROW.float()}, "'row' is float32"),
        ({"partptr": torch.tensor([0, 50, N])}, "'partptr' decreases"),
        ({"partptr": torch.tensor([0, N + 1])}, "'partptr' goes from 0 to 41"),
    ],
)
def test_parts_of_clusters(changes, text):
    with pytest.raises(StrettoError, match=text):
        first(ClusterLoader(clusters(**changes), batch_size=1))
    assert first(ClusterLoader(clusters(), batch_size=1)).num_nodes == 20
    with pytest.raises(StrettoError, match="'parts' has part -1"):
        ClusterLoader(clusters(), batch_size=1)._collate([-1])
    with pytest.raises(StrettoError, match="'num_threads'"):
        ClusterLoader(clusters(), num_threads=2**31)


def test_layers_of_a_batch_that_was_changed():
    given = homogeneous()
    batch = first(NeighborLoader(given, [4, 3], batch_size=16))
    check(batch, given)
    model = GraphSAGE(given.x.size(1), 8, 2, 4)
    batch.edge_index = batch.edge_index[:, ::2]
    assert torch.allclose(run_trimmed(model, batch), model(batch.x, batch.edge_index)[:16])
    with pytest.raises(StrettoError, match="'edge_index' has"):
        layers(batch)
    batch = first(NeighborLoader(given, [4, 3], batch_size=16))
    batch.num_sampled_nodes = [n + (i == 0) for i, n in enumerate(batch.num_sampled_nodes)]
    with pytest.raises(StrettoError, match="num_sampled_nodes"):
        layers(batch)
