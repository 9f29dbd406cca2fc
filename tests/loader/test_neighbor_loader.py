"""NeighborLoader: PyG's contract, attribute by attribute, and what it adds."""

import copy
import pickle

import pytest
import torch
import torch_geometric.loader as pyg
from torch_geometric.data import Data
from torch_geometric.loader import ImbalancedSampler
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from stretto.errors import StrettoError
from stretto.graph import Graph
from stretto.loader import LinkNeighborLoader, NeighborLoader, NeighborSampler, layers
from tests.loader.data import check, equal, homogeneous

OPTIONS = [
    {},
    {"replace": True},
    {"disjoint": True},
    {"subgraph_type": "induced"},
    {"subgraph_type": "bidirectional"},
    {"subgraph_type": "induced", "disjoint": True},
    {"weight_attr": "edge_weight"},
    {"time_attr": "time"},
    {"time_attr": "edge_time", "input_time": torch.arange(300)},
    {"time_attr": "time", "temporal_strategy": "last"},
    {"time_attr": "time", "weight_attr": "edge_weight"},
    {"method": "labor"},
    {"semantics": "layered"},
    {"transform_sampler_output": lambda out: out},
]


def described(options: dict) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items() if isinstance(v, (str, bool))) or "plain"


@pytest.mark.parametrize("options", OPTIONS, ids=described)
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_hold_what_they_say(options, threads):
    data = homogeneous()
    loader = NeighborLoader(data, [4, 3], batch_size=32, num_threads=threads, **options)
    assert isinstance(loader, pyg.NeighborLoader)
    assert len(loader) == 10
    seen = []
    for batch in loader:
        assert type(batch) is Data
        bidirectional = options.get("subgraph_type") == "bidirectional"
        if not bidirectional:
            check(batch, data)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        seen.append(batch.input_id)
        if options.get("subgraph_type", "directional") == "directional":
            assert sum(batch.num_sampled_nodes) == batch.num_nodes
            assert sum(batch.num_sampled_edges) == batch.num_edges
            assert batch.num_sampled_nodes[0] == batch.batch_size
        if options.get("disjoint") or "time_attr" in options:
            assert torch.equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
        else:
            assert batch.batch is None
    assert torch.equal(torch.cat(seen), torch.arange(300))


@pytest.mark.parametrize("options", OPTIONS, ids=described)
def test_streamed_batch_is_what_pygs_own_filter_makes(options):
    """The engine's batch and PyG's filter_fn over the same sample agree in every attribute, in PyG's order."""
    data = homogeneous()
    loader = NeighborLoader(data, [4, 3], batch_size=32, **options)
    iterator = iter(loader)
    stream = iterator._stream
    slot, task = stream.next()
    ours = loader._batch(slot, task)
    out = loader.sampler_.output(slot)
    out.metadata = task.metadata
    stock = loader.filter_fn(loader.sampler_.finish(out))
    assert equal(ours, stock)
    assert list(ours.keys()) == list(stock.keys())


def test_temporal_constraint_holds_for_node_times():
    data = homogeneous()
    for batch in NeighborLoader(data, [5, 5], batch_size=50, time_attr="time"):
        assert (batch.time <= batch.time[: batch.batch_size][batch.batch]).all()


@pytest.mark.parametrize("name", ["mask", "index", "list", "none"])
def test_input_nodes(name):
    data = homogeneous()
    nodes = {
        "mask": data.train_mask,
        "index": torch.tensor([5, 3, 9, 3]),
        "list": [4, 2, 7],
        "none": None,
    }[name]
    wanted = {"mask": data.train_mask.nonzero().view(-1), "none": torch.arange(300)}.get(
        name, torch.as_tensor(nodes if nodes is not None else 0)
    )
    loader = NeighborLoader(data, [3], input_nodes=nodes, batch_size=7)
    got = torch.cat([b.n_id[: b.batch_size] for b in loader])
    assert torch.equal(got, wanted)
    ids = torch.cat([b.input_id for b in loader])
    assert torch.equal(ids, wanted if name == "mask" else torch.arange(len(wanted)))


def test_shuffle_covers_every_seed_once_and_differs_between_epochs():
    loader = NeighborLoader(homogeneous(), [3], batch_size=32, shuffle=True)
    first, second = (torch.cat([b.input_id for b in loader]) for _ in range(2))
    assert torch.equal(first.sort().values, torch.arange(300))
    assert torch.equal(second.sort().values, torch.arange(300))
    assert not torch.equal(first, second)


def test_drop_last_and_batch_sampler_and_sampler():
    data = homogeneous()
    assert [b.batch_size for b in NeighborLoader(data, [2], batch_size=64, drop_last=True)] == [64] * 4
    chosen = [[1, 2, 3], [7], [3, 3, 8]]
    batches = list(NeighborLoader(data, [2], batch_sampler=chosen))
    assert [b.input_id.tolist() for b in batches] == chosen
    sampler = ImbalancedSampler(data.y, num_samples=100)
    loader = NeighborLoader(data, [2], sampler=sampler, batch_size=10)
    for batch in loader:  # draws with replacement: duplicate seeds
        check(batch, data)
        assert torch.equal(batch.y[: batch.batch_size], data.y[batch.input_id])
    assert sum(1 for _ in loader) == 10


def test_datasets_worker_arguments_are_accepted():
    loader = NeighborLoader(
        homogeneous(), [2], batch_size=64, num_workers=2, persistent_workers=True, prefetch_factor=3,
        filter_per_worker=True, pin_memory=False, worker_init_fn=print, multiprocessing_context="fork",
    )  # fmt: skip
    assert loader.num_threads == 2
    with loader.enable_cpu_affinity([0]), loader.enable_multithreading():
        assert sum(b.batch_size for b in loader) == 300


def test_same_stream_for_any_number_of_threads_and_after_a_restart():
    streams = []
    for threads in (1, 2, 16, 2):
        torch.manual_seed(5)
        loader = NeighborLoader(homogeneous(), [4, 4], batch_size=20, shuffle=True, num_threads=threads)
        streams.append([batch for _ in range(3) for batch in loader])
    for other in streams[1:]:
        assert all(equal(a, b) for a, b in zip(streams[0], other, strict=True))


def test_manual_seed_and_generator_reproduce_a_pass():
    data = homogeneous()
    loader = NeighborLoader(data, [4], batch_size=50, shuffle=True)
    torch.manual_seed(1)
    first = list(loader)
    again = list(loader)
    torch.manual_seed(1)
    assert all(equal(a, b) for a, b in zip(first, loader, strict=True))
    assert all(equal(a, b) for a, b in zip(again, loader, strict=True))
    torch.manual_seed(2)
    assert not all(equal(a, b) for a, b in zip(first, loader, strict=True))
    passes = []
    for _ in range(2):
        loader = NeighborLoader(data, [4], batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(3))
        torch.rand(7)  # the global generator plays no part
        passes.append(list(loader))
    assert all(equal(a, b) for a, b in zip(*passes, strict=True))


def test_state_dict_continues_the_run():
    data = homogeneous()
    loader = NeighborLoader(data, [4], batch_size=50, shuffle=True)
    list(loader)
    state = copy.deepcopy(loader.state_dict())
    rest = [list(loader), list(loader)]
    torch.manual_seed(12345)
    other = NeighborLoader(data, [4], batch_size=50, shuffle=True)
    other.load_state_dict(state)
    for wanted in rest:
        assert all(equal(a, b) for a, b in zip(wanted, other, strict=True))


def test_batches_outlive_the_loader_and_are_never_overwritten():
    data = homogeneous()
    loader = NeighborLoader(data, [4, 3], batch_size=16, num_threads=2)
    kept = list(loader)
    for _ in range(3):
        list(loader)
    del loader
    for batch in kept:
        check(batch, data)


def test_two_passes_at_once():
    data = homogeneous()
    loader = NeighborLoader(data, [4], batch_size=50)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 6
    for a, b in pairs:
        assert torch.equal(a.input_id, b.input_id)


def test_data_changed_between_passes_is_seen():
    data = homogeneous()
    loader = NeighborLoader(data, [4], batch_size=50)
    list(loader)
    data.x += 1
    for batch in loader:
        check(batch, data)
    data.x = torch.randn(300, 2)
    for batch in loader:
        check(batch, data)


def test_edge_index_brings_its_csr():
    data = homogeneous()
    for batch in NeighborLoader(data, [4, 3], batch_size=64):
        built = Graph.cache_info().built
        graph = Graph.of(batch.edge_index, batch.num_nodes)
        assert Graph.cache_info().built == built
        assert torch.equal(graph.edge_index, batch.edge_index)


def test_attributes_of_a_batch_are_independent_of_each_other():
    """They share memory, but a change of one in place is no change of another, to autograd or to Graph.of."""
    data = homogeneous()
    batch = next(iter(NeighborLoader(data, [4, 3], batch_size=64)))
    weight = torch.randn(9, 2, requires_grad=True)
    out = (batch.x @ weight).sum()
    batch.y += 1
    batch.time.zero_()
    out.backward()
    built = Graph.cache_info().built
    Graph.of(batch.edge_index, batch.num_nodes)
    assert Graph.cache_info().built == built


def test_inference_mode():
    data = homogeneous()
    with torch.inference_mode():
        loader = NeighborLoader(data, [4, 3], batch_size=64)
        for _ in range(2):
            for batch in loader:
                check(batch, data)
                built = Graph.cache_info().built
                Graph.of(batch.edge_index, batch.num_nodes)
                assert Graph.cache_info().built == built
    for batch in loader:
        check(batch, data)


def test_trim_to_layer_and_layers_give_the_full_result():
    torch.manual_seed(0)
    data = homogeneous()
    convs = [SAGEConv(9, 8), SAGEConv(8, 8), SAGEConv(8, 4)]
    for batch in NeighborLoader(data, [4, 3, 2], batch_size=32, trim=True):
        full, cut, bipartite, edge_index = batch.x, batch.x, batch.x, batch.edge_index
        for i, conv in enumerate(convs):
            full = conv(full, batch.edge_index)
            cut, edge_index, _ = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, cut, edge_index)
            cut = conv(cut, edge_index)
            layer = batch.layers[i]
            built = Graph.cache_info().built
            Graph.of(layer.edge_index, layer.size)
            assert Graph.cache_info().built == built
            bipartite = conv((bipartite, bipartite[: layer.size[1]]), layer.edge_index)
        n = batch.batch_size
        assert torch.allclose(cut[:n], full[:n], atol=1e-5)
        assert bipartite.size(0) == n
        assert torch.allclose(bipartite, full[:n], atol=1e-5)


def test_layered_layers_use_one_hop_each():
    batch = next(iter(NeighborLoader(homogeneous(), [4, 3], batch_size=32, semantics="layered")))
    first, last = layers(batch, semantics="layered")
    assert last.size[1] == batch.batch_size
    assert first.edges == (batch.num_sampled_edges[0], batch.num_edges)
    assert int(last.edge_index[1].max()) < last.size[1]
    assert int(first.edge_index[0].max()) < first.size[0]


def test_no_edge_ids_where_not_wanted():
    data = homogeneous()
    batch = next(iter(NeighborLoader(data, [4], batch_size=32, e_id=False)))
    assert "e_id" not in batch
    assert batch.edge_attr is None
    check(batch, data, e_id=False)


def test_call_collate_and_filter():
    data = homogeneous()
    loader = NeighborLoader(data, [4, 3], batch_size=32)
    check(loader([3, 4, 5]), data)
    check(loader.filter_fn(loader.sampler_.sample_from_nodes(loader.input_data[torch.arange(3)])), data)


def test_transform_and_its_exception():
    data = homogeneous()

    def fails_on_third(batch):
        if int(batch.input_id[0]) == 100:
            raise RuntimeError("no third batch")
        batch.seen = True
        return batch

    loader = NeighborLoader(data, [2], batch_size=50, transform=fails_on_third)
    iterator = iter(loader)
    assert next(iterator).seen
    next(iterator)
    with pytest.raises(RuntimeError, match="no third batch"):
        next(iterator)
    assert int(next(iterator).input_id[0]) == 150  # the others are not affected
    with pytest.raises(RuntimeError, match="no third batch"):
        list(loader)


def test_pyg_loader_with_our_sampler():
    data = homogeneous()
    sampler = NeighborSampler(data, [4, 3])
    for batch in pyg.NeighborLoader(data, [4, 3], neighbor_sampler=sampler, batch_size=64, shuffle=True):
        check(batch, data)
    for batch in pyg.NodeLoader(data, node_sampler=sampler, batch_size=64, num_workers=1):
        check(batch, data)


def test_loader_survives_pickle_and_subclasses_survive_loading():
    class Mine(Data):
        pass

    data = Mine.from_dict(homogeneous().to_dict())
    loader = NeighborLoader(data, [3], batch_size=100)
    assert all(type(b) is Mine for b in loader)
    again = pickle.loads(pickle.dumps(NeighborLoader(homogeneous(), [3], batch_size=100)))
    assert sum(b.batch_size for b in again) == 300


def test_graphs_without_edges_and_without_seeds():
    data = Data(x=torch.randn(4, 2), edge_index=torch.empty(2, 0, dtype=torch.int64))
    for batch in NeighborLoader(data, [3, 3], batch_size=3):
        assert batch.num_edges == 0
        assert torch.equal(batch.x, data.x[batch.n_id])
    loader = NeighborLoader(data, [3], input_nodes=torch.empty(0, dtype=torch.int64), batch_size=3)
    assert list(loader) == []
    assert list(loader) == []


def test_bad_arguments_are_told_by_name():
    data = homogeneous()
    for kwargs, text in (
        ({"num_neighbors": [3, -2]}, "num_neighbors"),
        ({"num_neighbors": [2.5]}, "num_neighbors"),
        ({"input_nodes": torch.tensor([300])}, "input_nodes"),
        ({"input_nodes": torch.tensor([-1])}, "input_nodes"),
        ({"time_attr": "nothing"}, "time_attr"),
        ({"time_attr": "x"}, "integers"),
        ({"weight_attr": "nothing"}, "weight_attr"),
        ({"temporal_strategy": "first"}, "temporal_strategy"),
        ({"method": "magic"}, "method"),
        ({"semantics": "other"}, "semantics"),
        ({"num_threads": -1}, "num_threads"),
        ({"memory": -1}, "memory"),
    ):
        with pytest.raises(StrettoError, match=text):
            NeighborLoader(data, **{"num_neighbors": [3], **kwargs})
    with pytest.raises(StrettoError, match="edge_index"):
        NeighborLoader(Data(x=torch.randn(3, 1), edge_index=torch.tensor([[0, 5], [1, 1]])), [2])
    data.edge_weight[5] = -1
    with pytest.raises(StrettoError, match="weight"):
        NeighborLoader(data, [3], weight_attr="edge_weight")
    with pytest.raises(StrettoError, match="edge_label_index"):
        LinkNeighborLoader(data, [3], edge_label_index=torch.tensor([[0], [900]]))
