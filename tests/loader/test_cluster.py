"""ClusterData, ClusterLoader and ShaDowKHopSampler beside PyG's own code and beside the subgraphs they stand for."""

import sys
from typing import Any

import pytest
import torch
import torch_geometric.loader as pyg
from torch_geometric.data import Data
from torch_geometric.utils import subgraph, to_undirected

from stretto import StrettoError
from stretto.graph import Graph
from stretto.loader import ClusterData, ClusterLoader, ShaDowKHopSampler, cluster, swap
from tests.loader.data import homogeneous

PARTS = 7


def by_rule(edge_index, num_nodes, num_parts, *, recursive=False):
    """In the place of METIS: any assignment will do to compare what is made of it. Part 3 stays empty."""
    part = torch.arange(num_nodes) * 31 % num_parts
    part[part == 3] = 0
    return part


@pytest.fixture
def data(monkeypatch) -> Data:
    monkeypatch.setattr(cluster, "metis", by_rule)
    found = homogeneous()
    found.edge_index = torch.cat([found.edge_index[:, :-3], torch.tensor([[5, 5, 9], [5, 6, 9]])], dim=1)
    found.edge_index[:, 7] = found.edge_index[:, 6]  # a duplicate
    return found


def same(a: Any, b: Any) -> None:
    assert sorted(a.keys()) == sorted(b.keys())
    for key, value in a.items():
        assert torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key], key


@pytest.mark.parametrize("sparse_format", ["csr", "csc"])
@pytest.mark.parametrize("size", [1, 3, PARTS])
def test_batches_are_pygs(data, sparse_format, size):
    cut = ClusterData(data, PARTS, log=False, sparse_format=sparse_format)
    ours, stock = ClusterLoader(cut, batch_size=size), pyg.ClusterLoader(cut, batch_size=size)
    assert len(ours) == len(stock) == -(-PARTS // size)
    if size == 1:  # stock fails on an empty part alone
        assert [b.num_nodes for b in ours] == cut.partition.partptr.diff().tolist()
        return
    for _ in range(2):
        for a, b in zip(ours, stock, strict=True):
            same(a, b)
    for batch in ([2], [6, 0], [1, 3, 5]):
        same(ours._collate(batch), stock._collate(batch))


def test_shuffled_batches_follow_the_generator(data):
    cut = ClusterData(data, PARTS, log=False)
    seen = []
    for loader in (ClusterLoader, pyg.ClusterLoader):
        generator = torch.Generator().manual_seed(3)
        seen.append(list(loader(cut, batch_size=2, shuffle=True, drop_last=True, generator=generator)))
    for a, b in zip(*seen, strict=True):
        same(a, b)


def test_a_batch_is_the_induced_subgraph(data):
    cut = ClusterData(data, PARTS, log=False)
    perm, ends = cut.partition.node_perm, cut.partition.partptr
    for parts, batch in zip(
        ([0, 1], [2, 3], [4, 5], [6]), ClusterLoader(cut, batch_size=2, num_workers=2), strict=True
    ):
        nodes = torch.cat([perm[ends[p] : ends[p + 1]] for p in parts])
        assert torch.equal(batch.x, data.x[nodes])
        want, _, mask = subgraph(nodes, data.edge_index, return_edge_mask=True)
        got = nodes[batch.edge_index]
        assert sorted(zip(*got.tolist(), strict=True)) == sorted(zip(*want.tolist(), strict=True))
        assert torch.equal(batch.edge_weight.sort().values, data.edge_weight[mask].sort().values)


def test_edges_by_target_carry_their_csr(data):
    cut = ClusterData(data, PARTS, log=False, sparse_format="csc")
    batch = next(iter(ClusterLoader(cut, batch_size=3)))
    graph = Graph.of(batch.edge_index, batch.num_nodes)
    assert graph.csr.edge_id is None
    counts = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
    assert torch.equal(graph.csr.rowptr.diff(), counts)


def test_parts_of_pygs_own_data(data):
    """Our loader takes PyG's ClusterData, whose __getitem__ gives one part alone."""
    cut = ClusterData(data, PARTS, log=False)
    cut.__class__ = pyg.ClusterData
    for part, batch in enumerate(ClusterLoader(cut, batch_size=1)):
        same(batch, cut[part])


def test_a_graph_without_edges_and_one_of_one_node(monkeypatch):
    monkeypatch.setattr(cluster, "metis", by_rule)
    for n in (1, 4):
        data = Data(x=torch.randn(n, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))
        batches = list(ClusterLoader(ClusterData(data, 2, log=False), batch_size=2))
        assert len(batches) == 1
        assert batches[0].edge_index.shape == (2, 0)
        assert batches[0].x.shape == (n, 2)


def test_saved_parts_are_found_again(data, tmp_path):
    first = ClusterData(data, PARTS, save_dir=str(tmp_path), log=False)
    again = ClusterData(data, PARTS, save_dir=str(tmp_path), log=False)
    assert torch.equal(first.partition.node_perm, again.partition.node_perm)


def test_metis_cuts_communities_apart():
    pytest.importorskip("pymetis", reason="pymetis is not installed")
    g = torch.Generator().manual_seed(0)
    size, groups = 60, 4
    inside = torch.randint(0, size, (2, groups * 900), generator=g) + torch.arange(groups).repeat_interleave(900) * size
    between = torch.randint(0, groups * size, (2, 40), generator=g)
    edge_index = to_undirected(torch.cat([inside, between], dim=1))
    part = cluster.metis(edge_index, groups * size, groups)
    assert part.min() == 0
    assert part.max() == groups - 1
    cut = (part[edge_index[0]] != part[edge_index[1]]).sum()
    assert cut <= 2 * between.size(1)
    directed = cluster.metis(inside, groups * size, groups, recursive=True)  # as if undirected, instead of a crash
    assert torch.bincount(directed).numel() == groups


def test_without_metis_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(StrettoError, match="pymetis"):
        cluster.metis(torch.tensor([[0, 1], [1, 0]]), 2, 2)


def test_pygs_names_are_ours_under_patch():
    swap.install()
    try:
        assert pyg.ClusterData is ClusterData
        assert pyg.ClusterLoader is ClusterLoader
        assert pyg.ShaDowKHopSampler is ShaDowKHopSampler
    finally:
        swap.remove()
    assert pyg.ClusterLoader is not ClusterLoader


@pytest.mark.parametrize("neighbors", [1000, 2])
def test_shadow_subgraphs_are_induced(neighbors):
    data = homogeneous()
    depth, roots = 2, torch.tensor([4, 0, 299, 17, 17])
    batch = ShaDowKHopSampler(data, depth, neighbors, node_idx=roots, batch_size=5).__collate__(roots.tolist())
    assert torch.equal(batch.y, data.y[roots])
    assert torch.equal(batch.x[batch.root_n_id], data.x[roots])
    names = {tuple(row): i for i, row in enumerate(data.x.tolist())}
    nodes = torch.tensor([names[tuple(row)] for row in batch.x.tolist()])
    assert torch.equal(batch.ptr.diff(), torch.bincount(batch.batch, minlength=5))
    total = 0
    for tree, root in enumerate(roots.tolist()):
        low, high = int(batch.ptr[tree]), int(batch.ptr[tree + 1])
        held = nodes[low:high]
        assert torch.equal(held, held.unique())  # by id, each once
        reached = {root}
        for _ in range(depth):
            ends = torch.isin(data.edge_index[1], torch.tensor(sorted(reached)))
            reached |= set(data.edge_index[0, ends].tolist())
        assert set(held.tolist()) <= reached
        if neighbors == 1000:
            assert set(held.tolist()) == reached
        want, _, mask = subgraph(held, data.edge_index, relabel_nodes=False, return_edge_mask=True)
        inside = (batch.edge_index[0] >= low) & (batch.edge_index[0] < high)
        got = nodes[batch.edge_index[:, inside]]
        assert sorted(zip(*got.tolist(), strict=True)) == sorted(zip(*want.tolist(), strict=True))
        assert torch.equal(batch.edge_weight[inside].sort().values, data.edge_weight[mask].sort().values)
        total += int(inside.sum())
    assert total == batch.edge_index.size(1)
    keys = batch.edge_index[0] * batch.num_nodes + batch.edge_index[1]
    assert torch.equal(keys, keys.sort().values)


def test_shadow_loader_covers_its_roots_and_repeats_by_seed():
    data = homogeneous()
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        loader = ShaDowKHopSampler(data, 2, 3, node_idx=data.train_mask, batch_size=32)
        seen.append(list(loader))
        assert sum(b.root_n_id.numel() for b in seen[-1]) == int(data.train_mask.sum())
    for a, b in zip(*seen, strict=True):
        same(a, b)
