"""NeighborLoader on heterogeneous graphs and on sparse adjacency matrices."""

import pytest
import torch
from torch_geometric.data import Data

from stretto.graph import Graph
from stretto.loader import NeighborLoader
from tests.loader.data import check_hetero, equal, heterogeneous, homogeneous


def test_hetero_stream_is_the_same_for_any_number_of_threads():
    streams = []
    for threads in (1, 2, 16):
        torch.manual_seed(5)
        loader = NeighborLoader(
            heterogeneous(), [4, 4], ("paper", None), batch_size=20, shuffle=True, num_threads=threads
        )
        streams.append(list(loader))
    for other in streams[1:]:
        assert all(equal(a, b) for a, b in zip(streams[0], other, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disjoint": True},
        {"subgraph_type": "induced"},
        {"time_attr": "time"},
        {"replace": True},
        {"method": "labor"},
    ],
    ids=str,
)
def test_hetero_batches_hold_what_they_say(options):
    data = heterogeneous()
    if "time_attr" in options:
        del data["lonely"]
    loader = NeighborLoader(data, [4, 3], input_nodes=("paper", None), batch_size=32, num_threads=2, **options)
    seen = []
    for batch in loader:
        check_hetero(batch, data)
        paper = batch["paper"]
        assert torch.equal(paper.n_id[: paper.batch_size], paper.input_id)
        seen.append(paper.input_id)
        if "time_attr" in options:
            time = paper.time[: paper.batch_size]
            for node_type in data.node_types:
                assert (batch[node_type].time <= time[batch[node_type].batch]).all()
        if options.get("subgraph_type") != "induced":
            for edge_type in data.edge_types:
                assert sum(batch[edge_type].num_sampled_edges) == batch[edge_type].edge_index.size(1)
    assert torch.equal(torch.cat(seen), torch.arange(200))


def test_hetero_fanout_per_edge_type():
    data = heterogeneous()
    fanout = {t: [0, 0] for t in data.edge_types}
    fanout["author", "writes", "paper"] = [3, 0]
    batch = next(iter(NeighborLoader(data, fanout, ("paper", torch.arange(10)), batch_size=10)))
    check_hetero(batch, data)
    assert batch["paper", "cites", "paper"].edge_index.size(1) == 0
    assert batch["author", "writes", "paper"].edge_index.size(1) > 0
    assert batch["venue"].num_nodes == 0


def test_hetero_edge_index_brings_its_csr():
    batch = next(iter(NeighborLoader(heterogeneous(), [4, 3], "paper", batch_size=32)))
    for edge_type in batch.edge_types:
        sizes = batch[edge_type[0]].num_nodes, batch[edge_type[2]].num_nodes
        built = Graph.cache_info().built
        graph = Graph.of(batch[edge_type].edge_index, sizes)
        assert Graph.cache_info().built == built
        assert torch.equal(graph.edge_index, batch[edge_type].edge_index)


def test_sparse_adjacency():
    data = homogeneous()
    order = torch.argsort(data.edge_index[1] * 1000 + data.edge_index[0], stable=True)
    row, col = data.edge_index[1][order], data.edge_index[0][order]
    matrix = torch.sparse_coo_tensor(torch.stack([row, col]), torch.arange(1.0, 2401.0), (300, 300), is_coalesced=True)
    sparse = Data(x=data.x, adj_t=matrix.to_sparse_csr())
    batch = next(iter(NeighborLoader(sparse, [4], batch_size=20)))
    dense = matrix.to_dense()
    coo = batch.adj_t.to_sparse_coo()
    rows, cols = coo.indices()
    assert coo._nnz() > 0
    assert (dense[batch.n_id[rows], batch.n_id[cols]] != 0).all()
