"""LinkNeighborLoader, the remote stores, and PyG's documented examples with only the import changed."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.loader as pyg
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.sampler import NegativeSampling
from torch_geometric.testing import MyFeatureStore, MyGraphStore
from torch_geometric.utils import sort_edge_index

from stretto.loader import LinkNeighborLoader, NeighborLoader, NeighborSampler
from tests.loader.data import check, check_hetero, equal, heterogeneous, homogeneous


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
def test_links_of_a_homogeneous_graph(negatives, disjoint):
    data = homogeneous()
    sampling = None if negatives is None else NegativeSampling(negatives, 2)
    loader = LinkNeighborLoader(data, [4, 3], batch_size=100, neg_sampling=sampling, disjoint=disjoint, num_threads=2)
    assert isinstance(loader, pyg.LinkNeighborLoader)
    seen = []
    for batch in loader:
        check(batch, data)
        seen.append(batch.input_id)
        wanted = data.edge_index[:, batch.input_id]
        n = batch.input_id.numel()
        if negatives == "triplet":
            assert torch.equal(batch.n_id[batch.src_index], wanted[0])
            assert torch.equal(batch.n_id[batch.dst_pos_index], wanted[1])
            assert batch.dst_neg_index.shape == (n, 2)
        else:
            assert torch.equal(batch.n_id[batch.edge_label_index[:, :n]], wanted)
            if negatives == "binary":
                assert batch.edge_label_index.shape == (2, 3 * n)
                assert torch.equal(batch.edge_label, torch.cat([torch.ones(n), torch.zeros(2 * n)]))
        if disjoint:
            assert int(batch.batch.max()) < n
            if negatives is None:
                assert torch.equal(batch.batch[batch.edge_label_index[0]], batch.batch[batch.edge_label_index[1]])
    assert torch.equal(torch.cat(seen), torch.arange(data.num_edges))


def test_link_labels_and_times():
    data = homogeneous()
    label = torch.arange(2400) % 3
    loader = LinkNeighborLoader(data, [3], edge_label=label, batch_size=200, neg_sampling="binary", shuffle=True)
    for batch in loader:
        n = batch.input_id.numel()
        assert torch.equal(batch.edge_label[:n], label[batch.input_id] + 1)  # zero now means negative
        assert not batch.edge_label[n:].any()
    times = torch.full((2400,), 60)
    loader = LinkNeighborLoader(
        data, [3, 3], edge_label_time=times, time_attr="time", batch_size=300, neg_sampling="binary"
    )
    for batch in loader:
        seeds = batch.num_sampled_nodes[0]
        assert (batch.time[seeds:] <= 60).all()
        assert torch.equal(batch.edge_label_time, torch.full_like(batch.edge_label_time, 60))


def test_link_stream_does_not_touch_the_global_generator_and_is_reproducible():
    data = homogeneous()
    runs = []
    for threads in (1, 4):
        torch.manual_seed(3)
        loader = LinkNeighborLoader(data, [4], batch_size=100, neg_sampling="binary", shuffle=True, num_threads=threads)
        iterator = iter(loader)
        state = torch.get_rng_state()
        runs.append(list(iterator))
        assert torch.equal(state, torch.get_rng_state())
    assert all(equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
@pytest.mark.parametrize("edge_type", [("author", "writes", "paper"), ("paper", "cites", "paper")])
@pytest.mark.parametrize("disjoint", [False, True])
def test_links_of_a_heterogeneous_graph(edge_type, negatives, disjoint):
    data = heterogeneous()
    loader = LinkNeighborLoader(
        data, [4, 3], edge_label_index=(edge_type, None), batch_size=64, neg_sampling=negatives, disjoint=disjoint
    )
    for batch in loader:
        check_hetero(batch, data)
        store = batch[edge_type]
        source, target = batch[edge_type[0]], batch[edge_type[2]]
        wanted = data[edge_type].edge_index[:, store.input_id]
        if negatives == "triplet":
            assert torch.equal(source.n_id[source.src_index], wanted[0])
            assert torch.equal(target.n_id[target.dst_pos_index], wanted[1])
        else:
            n = store.input_id.numel()
            assert torch.equal(source.n_id[store.edge_label_index[0, :n]], wanted[0])
            assert torch.equal(target.n_id[store.edge_label_index[1, :n]], wanted[1])


@pytest.mark.parametrize("negatives", [None, "binary", "triplet"])
def test_streamed_link_batch_is_what_pygs_own_filter_makes(negatives):
    data = homogeneous()
    loader = LinkNeighborLoader(data, [4, 3], batch_size=32, neg_sampling=negatives)
    iterator = iter(loader)
    slot, task = iterator._stream.next()
    ours = loader._batch(slot, task)
    out = loader.sampler_.output(slot)
    out.metadata = task.metadata
    stock = loader.filter_fn(loader.sampler_.finish(out))
    assert equal(ours, stock)
    assert list(ours.keys()) == list(stock.keys())


def test_pyg_link_loader_with_our_sampler():
    data = homogeneous()
    sampler = NeighborSampler(data, [4, 3])
    for batch in pyg.LinkNeighborLoader(data, [4, 3], neighbor_sampler=sampler, batch_size=500, neg_sampling="binary"):
        check(batch, data)


def test_homogeneous_stores():
    data = homogeneous()
    order = torch.argsort(data.edge_index[1], stable=True)
    edge_index = data.edge_index[:, order]
    features, graph = MyFeatureStore(), MyGraphStore()
    features.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    features.put_tensor(data.y, group_name=None, attr_name="y", index=None)
    graph.put_edge_index(edge_index, edge_type=None, layout="coo", size=(300, 300), is_sorted=True)
    loader = NeighborLoader((features, graph), [4, 3], input_nodes=torch.arange(100), batch_size=20, num_threads=2)
    count = 0
    pairs = set(map(tuple, data.edge_index.t().tolist()))
    for batch in loader:
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.y, data.y[batch.n_id])
        assert all(tuple(e) in pairs for e in batch.n_id[batch.edge_index].t().tolist())
        count += batch.batch_size
    assert count == 100


def test_heterogeneous_stores():
    data = heterogeneous()
    features, graph = MyFeatureStore(), MyGraphStore()
    for node_type in ("paper", "author", "venue"):
        features.put_tensor(data[node_type].x, group_name=node_type, attr_name="x", index=None)
    for edge_type in data.edge_types:
        sizes = data[edge_type[0]].num_nodes, data[edge_type[2]].num_nodes
        graph.put_edge_index(
            sort_edge_index(data[edge_type].edge_index, sort_by_row=False),
            edge_type=edge_type, layout="coo", size=sizes, is_sorted=True,
        )  # fmt: skip
    loader = NeighborLoader((features, graph), [4, 3], input_nodes=("paper", torch.arange(50)), batch_size=20)
    for batch in loader:
        assert isinstance(batch, HeteroData)
        for node_type in ("paper", "author", "venue"):
            assert torch.equal(batch[node_type].x, data[node_type].x[batch[node_type].n_id])
        store = batch["author", "writes", "paper"].edge_index
        assert int(store[0].max()) < batch["author"].num_nodes


def test_node_classification_as_documented():
    torch.manual_seed(0)
    data = homogeneous()
    loader = NeighborLoader(data, num_neighbors=[10, 5], batch_size=64, input_nodes=data.train_mask, shuffle=True)
    convs = torch.nn.ModuleList([SAGEConv(9, 16), SAGEConv(16, 4)])
    optimizer = torch.optim.Adam(convs.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            h = convs[1](convs[0](batch.x, batch.edge_index).relu(), batch.edge_index)
            loss = F.cross_entropy(h[: batch.batch_size], batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * batch.batch_size
        losses.append(total)
    assert losses[-1] < losses[0]


def test_hetero_model_as_documented():
    torch.manual_seed(0)
    data = heterogeneous()
    del data["lonely"]
    del data["venue"]  # to_hetero wants every node type to have in-edges
    del data["venue", "prints", "paper"]

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 3)

        def forward(self, x, edge_index):
            return self.b(self.a(x, edge_index).relu(), edge_index)

    model = to_hetero(Net(), data.metadata())
    loader = NeighborLoader(data, num_neighbors=[5, 5], input_nodes=("paper", None), batch_size=50)
    for batch in loader:
        out = model(batch.x_dict, batch.edge_index_dict)["paper"]
        loss = F.cross_entropy(out[: batch["paper"].batch_size], batch["paper"].y[: batch["paper"].batch_size])
        loss.backward()
        assert torch.isfinite(loss)
