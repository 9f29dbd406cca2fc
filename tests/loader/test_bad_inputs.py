"""What native code would read wrongly is refused by name before it is read: a table of every entry and argument.

`random_calls.py` makes the same kinds of calls at random.
"""

import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ClusterData as PygClusterData
from torch_geometric.nn import GraphSAGE
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from stretto import inference
from stretto.errors import StrettoError
from stretto.loader import ClusterLoader, LinkNeighborLoader, NeighborLoader, Store, random_walk
from stretto.loader.cluster import metis
from stretto.loader.engine import Engine
from stretto.loader.native_sampler import NativeSampler, NodeType, Relation, Sampling, Slice, running_weights
from stretto.loader.sampler import NeighborSampler
from stretto.loader.shadow import ShaDowKHopSampler
from stretto.loader.trim import layers, run_trimmed
from tests.loader.data import check, heterogeneous, homogeneous
from tests.loader.graphs import csc

N, E = 40, 200
GENERATOR = torch.Generator().manual_seed(0)
EDGES = torch.randint(0, N, (2, E), generator=GENERATOR)
COLPTR, ROW, ORDER = csc(EDGES, N)
X = torch.arange(N * 6, dtype=torch.float32).view(N, 6)
INT = torch.int64


def gone(x):
    """A tensor whose memory was let go."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def decreasing(pointers):
    out = pointers.clone()
    out[1] = out[-1]
    return out


def with_value(x, value):
    out = x.clone()
    out[0] = value
    return out


def native(*, colptr=COLPTR, row=ROW, fanout=(3, 2), hops=2, flags=Sampling.EDGE_ID, num_nodes=N, slices=(), **more):
    relation = Relation(colptr, row, list(fanout), **more)
    return NativeSampler([NodeType(num_nodes, more.get("node_time"))], [relation], hops, flags, slices)


RELATIONS = [
    ({"colptr": COLPTR.int()}, "'colptr' is int32"),
    ({"colptr": COLPTR[:-1]}, "'colptr' has shape"),
    ({"colptr": COLPTR + 1}, "'colptr' goes from 1"),
    ({"colptr": decreasing(COLPTR)}, "colptr decreases"),
    ({"colptr": torch.stack([COLPTR, COLPTR], 1)[:, 0]}, "'colptr' is int64 of shape .* with strides"),
    ({"colptr": COLPTR.to("meta")}, "'colptr' is int64 of shape .* on meta"),
    ({"colptr": gone(COLPTR)}, "'colptr'"),
    ({"colptr": COLPTR.tolist()}, "'colptr' is list"),
    ({"row": ROW[:-1]}, f"to {E}, wanted from 0 to {E - 1}"),
    ({"row": ROW.short()}, "'row' is int16"),
    ({"row": ROW.float()}, "'row' is float32"),
    ({"row": ROW.view(2, -1)}, "'row' is int32 of shape"),
    ({"row": with_value(ROW, -1)}, "comes from node -1"),
    ({"row": with_value(ROW.long(), 2**40)}, "comes from node"),
    ({"row": gone(ROW)}, "'row'"),
    ({"edge_id": ORDER[:-1]}, "'edge_id'"),
    ({"edge_id": ORDER.short()}, "'edge_id' is int16"),
    ({"edge_id": ORDER.expand(2, -1).t()[:, 0][::2]}, "'edge_id'"),
    ({"time": torch.zeros(E - 1, dtype=INT), "flags": Sampling.DISJOINT}, "'time'"),
    ({"time": torch.zeros(E), "flags": Sampling.DISJOINT}, "'time' is float32"),
    ({"running": torch.zeros(E - 1, dtype=torch.float64)}, "'running'"),
    ({"running": torch.zeros(E)}, "'running' is float32"),
    ({"source": 1}, "'source' is 1"),
    ({"target": -1}, "'target' is -1"),
    ({"num_nodes": -1}, "'num_nodes' is -1"),
    ({"num_nodes": 2.5}, "'num_nodes' is 2.5"),
    ({"hops": -1}, "'num_hops' is -1"),
    ({"fanout": (3,)}, "hops"),
    ({"fanout": (3, -2)}, "'fanout' is -2"),
    ({"fanout": (3, 2**60), "flags": Sampling.REPLACE}, "'fanout' is 1152921504606846976"),
    ({"fanout": (3, 1.5)}, "'fanout' is 1.5"),
    ({"flags": Sampling.CSR | Sampling.LAYERED}, "CSR and LAYERED"),
    ({"slices": [Slice(X[:-1])]}, f"39 rows, wanted {N}"),
    ({"slices": [Slice(X.t())]}, "6 rows|side by side"),
    ({"slices": [Slice(X[:, ::2])]}, "side by side"),
    ({"slices": [Slice(X.to("meta"))]}, "on meta"),
    ({"slices": [Slice(X.to_sparse())]}, "sparse_coo"),
    ({"slices": [Slice(gone(X))]}, "'value'"),
    ({"slices": [Slice(torch.tensor(1.0))]}, "'value'"),
    ({"slices": [Slice(X, type=1)]}, "'type' is 1"),
    ({"slices": [Slice(X, of_edges=True)]}, f"wanted {E}"),
    ({"slices": [Slice(torch.zeros(E, 2), of_edges=True)], "edge_id": ORDER + 1}, "edge ids of value"),
    ({"slices": [Slice(X, scale=torch.ones(6))]}, "wanted int8"),
    ({"slices": [Slice(X.to(torch.int8), scale=torch.ones(5))]}, "value.scale"),
    ({"slices": [Slice(X.to(torch.int8), scale=torch.ones(6).double())]}, "value.scale"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(RELATIONS)))
def test_native_sampler(number):
    arguments, text = RELATIONS[number]
    with pytest.raises(StrettoError, match=text):
        native(**arguments)


SEEDS = [
    ([torch.tensor([0.5])], [None], "'seeds' is float32"),
    ([torch.tensor([True])], [None], "'seeds' is bool"),
    ([torch.tensor([[0]])], [None], "'seeds' is int64 of shape"),
    ([torch.tensor([0], device="meta")], [None], "on meta"),
    ([torch.tensor([N])], [None], f"seed {N} is not a node"),
    ([torch.tensor([-(2**63)])], [None], "is not a node"),
    ([torch.tensor([0]), torch.tensor([0])], [None, None], "2 node types, wanted 1"),
    ([], [], "0 node types"),
    ([torch.tensor([0, 1])], [torch.tensor([5])], "2 seeds, but 1 times"),
    ([torch.tensor([0])], [torch.tensor([5.0])], "'times' is float32"),
]


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_seeds_of_a_batch(number):
    seeds, times, text = SEEDS[number]
    sampler = native()
    engine = Engine(sampler, threads=1, memory=1 << 20)
    with pytest.raises(StrettoError, match=text):
        sampler.sample(0, 0, 0, seeds, times)
    with pytest.raises(StrettoError, match=text):
        (engine.submit(0, 0, 0, seeds, times), engine.next())
    assert sampler.sample(0, 0, 0, [torch.tensor([3])], [None]).n_id()[0] == 3


def data(**changes):
    out = Data(x=X, edge_index=EDGES, y=torch.arange(N), edge_attr=torch.rand(E, 3), num_nodes=N)
    for name, value in changes.items():
        out[name] = value
    return out


def first(loader):
    return next(iter(loader))


def replaced(name, value, *, hetero=False):
    """A batch of a loader whose data was changed after it was made."""
    given = heterogeneous() if hetero else Data(x=X, edge_index=EDGES)
    loader = NeighborLoader(given, [3], batch_size=8, input_nodes=("paper", None) if hetero else None)
    part = given["paper"] if hetero else given
    part[name] = value
    return first(loader)


def sparse(layout, a, b, values=None):
    values = torch.ones(len(b if layout == torch.sparse_csr else a)) if values is None else values
    if layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(torch.stack([a, b]), values, (N, N), check_invariants=False)
    make = torch.sparse_csr_tensor if layout == torch.sparse_csr else torch.sparse_csc_tensor
    return make(a, b, torch.ones(b.numel()), (N, N), check_invariants=False)


def adj(matrix):
    return lambda: NeighborLoader(Data(x=X, adj_t=matrix, num_nodes=N), [2])


def graph_stores(layout, row, col, size=(N, N)):
    features, graph = MyFeatureStore(), MyGraphStore()
    features.put_tensor(X, group_name=None, attr_name="x", index=None)
    graph.put_edge_index((row, col), edge_type=None, layout=layout, size=size)
    return NeighborLoader((features, graph), [2], input_nodes=torch.arange(N))


def hetero_with(kind, name, value):
    given = heterogeneous()
    given[kind][name] = value
    return given


WRITES = ("author", "writes", "paper")
LOADERS = {
    "replaced x, shorter": (lambda: replaced("x", X[:10]), "'x' has 10 rows, wanted 40"),
    "replaced x, longer": (lambda: replaced("x", torch.cat([X, X])), "'x' has 80 rows, wanted 40"),
    "replaced x, gone": (lambda: replaced("x", gone(X)), "memory was let go"),
    "replaced x of a type": (lambda: replaced("x", torch.zeros(3, 2), hetero=True), "'x' of 'paper' has 3 rows"),
    "edge_index of float": (lambda: NeighborLoader(data(edge_index=EDGES.float()), [2]), "'edge_index' is float32"),
    "edge_index of int8": (lambda: NeighborLoader(data(edge_index=EDGES.to(torch.int8)), [2]), "'edge_index' is int8"),
    "edge_index of 3 rows": (lambda: NeighborLoader(data(edge_index=EDGES[[0, 1, 0]]), [2]), "shape \\[3, 200\\]"),
    "edge_index out of range": (lambda: NeighborLoader(data(edge_index=EDGES + 1), [2]), "wanted 0 <="),
    "coo row": (adj(sparse(torch.sparse_coo, EDGES[1] + 1, EDGES[0])), "'adj_t' has target 40"),
    "coo col": (adj(sparse(torch.sparse_coo, EDGES[1], EDGES[0] - 1)), "'adj_t' has source -1"),
    "csr col": (adj(sparse(torch.sparse_csr, COLPTR, ROW.long() + 2**40)), "'adj_t' has source"),
    "csr pointers": (adj(sparse(torch.sparse_csr, decreasing(COLPTR), ROW.long())), "'adj_t' decreases"),
    "csc pointers": (adj(sparse(torch.sparse_csc, decreasing(COLPTR), ROW.long())), "'adj_t' decreases"),
    "csc row": (adj(sparse(torch.sparse_csc, COLPTR, ROW.long() - 1)), "'adj_t' has target -1"),
    "adj_t of another size": (lambda: NeighborLoader(Data(adj_t=torch.eye(3).to_sparse(), num_nodes=N), [2]), "adj_t"),
    "stores, coo": (lambda: graph_stores("coo", EDGES[0] + 2**40, EDGES[1]), "has source"),
    "stores, coo target": (lambda: graph_stores("coo", EDGES[0], EDGES[1] - 1), "has target -1"),
    "stores, csc": (lambda: graph_stores("csc", ROW.long() - 1, COLPTR), "has source -1"),
    "stores, csc pointers": (lambda: graph_stores("csc", ROW.long(), decreasing(COLPTR)), "decreases"),
    "stores, csr pointers": (lambda: graph_stores("csr", decreasing(COLPTR), ROW.long()), "decreases"),
    "time of nodes, short": (
        lambda: NeighborLoader(hetero_with("author", "time", torch.arange(3)), [2], time_attr="time",
                               input_nodes=("paper", None)),
        "'time' has 3 times, wanted",
    ),
    "time of edges, long": (
        lambda: NeighborLoader(hetero_with(WRITES, "when", torch.arange(10**4)), [2], time_attr="when",
                               input_nodes=("paper", None)),
        "'time_attr' has 10000 values",
    ),
    "time of two columns": (
        lambda: NeighborLoader(data(when=torch.zeros(N, 2, dtype=INT)), [2], time_attr="when"), "80 times, wanted 40",
    ),
    "time of fractions": (lambda: NeighborLoader(data(when=torch.rand(N)), [2], time_attr="when"), "wanted integers"),
    "weights of two columns": (
        lambda: NeighborLoader(data(w=torch.rand(E, 2)), [2], weight_attr="w"), "'weight_attr' has 400",
    ),
    "weights, complex": (
        lambda: NeighborLoader(data(w=torch.ones(E, dtype=torch.complex64)), [2], weight_attr="w"), "real numbers",
    ),
    "weights without a sum": (
        lambda: NeighborLoader(data(w=torch.full((E,), 1e308, dtype=torch.float64)), [2], weight_attr="w"),
        "no finite sum",
    ),
    "input_nodes of float": (lambda: NeighborLoader(data(), [2], input_nodes=torch.rand(4)), "'input_nodes' is float"),
    "input_nodes out of range": (lambda: NeighborLoader(data(), [2], input_nodes=torch.tensor([N])), "has node 40"),
    "input_time, short": (
        lambda: NeighborLoader(data(when=torch.arange(N)), [2], time_attr="when", input_time=torch.arange(N - 1)),
        "'input_time' has 39 times",
    ),
    "input_time of float": (
        lambda: NeighborLoader(data(when=torch.arange(N)), [2], time_attr="when", input_time=torch.rand(N)),
        "'input_time' is float32",
    ),
    "fan-out, replaced": (lambda: NeighborLoader(data(), [2**60], replace=True), "at most 2147483647 with 'replace'"),
    "fan-out, the largest, replaced": (lambda: NeighborLoader(data(), [2**63 - 1], replace=True), "with 'replace'"),
    "fan-out that no batch holds": (
        lambda: first(NeighborLoader(data(), [2**31 - 1], replace=True, batch_size=8)), "more than 2\\^31 nodes",
    ),
    "fan-out of float": (lambda: NeighborLoader(data(), [1.5]), "'num_neighbors' holds 1.5"),
    "num_threads": (lambda: NeighborLoader(data(), [2], num_threads=2**31), "'num_threads' is 2147483648"),
    "num_threads, negative": (lambda: NeighborLoader(data(), [2], num_threads=-1), "'num_threads' is -1"),
    "num_threads of float": (lambda: NeighborLoader(data(), [2], num_threads=1.5), "'num_threads' is 1.5"),
    "num_workers": (lambda: NeighborLoader(data(), [2], num_workers=10**6), "'num_workers' is 1000000"),
    "memory": (lambda: NeighborLoader(data(), [2], memory=2**63), "'memory' is 9223372036854775808"),
    "prefetch_factor": (lambda: NeighborLoader(data(), [2], prefetch_factor=-1), "'prefetch_factor' is -1"),
    "batch_dependency": (lambda: NeighborLoader(data(), [2], batch_dependency="a"), "'batch_dependency' is 'a'"),
    "edge_label_index": (
        lambda: LinkNeighborLoader(data(), [2], edge_label_index=EDGES.float()), "'edge_label_index' is float32",
    ),
    "edge_label_time": (
        lambda: LinkNeighborLoader(data(when=torch.arange(N)), [2], edge_label_index=EDGES, time_attr="when",
                                   edge_label_time=torch.arange(E - 1)),
        "'edge_label_time' has 199",
    ),
    "engine threads": (lambda: Engine(native(), threads=2**31, memory=1), "'threads' is 2147483648"),
    "engine memory": (lambda: Engine(native(), threads=1, memory=2**63), "'memory'"),
    "running_weights, pointers": (lambda: running_weights(decreasing(COLPTR), torch.rand(E)), "colptr does not rise"),
    "running_weights, end": (lambda: running_weights(COLPTR, torch.rand(E - 1)), "to 200, wanted from 0 to 199"),
    "running_weights, type": (lambda: running_weights(COLPTR.int(), torch.rand(E)), "'colptr' is int32"),
    "shadow, root": (lambda: ShaDowKHopSampler(data(), 2, 3, torch.tensor([N])), "'node_idx' has node 40"),
    "shadow, depth": (lambda: ShaDowKHopSampler(data(), 2.5, 3), "'depth' is 2.5"),
    "metis": (lambda: metis(EDGES + 1, N, 2), "'edge_index' has"),
    "metis, parts": (lambda: metis(EDGES, N, 0), "'num_parts' is 0"),
    "inference, mask": (lambda: infer(input_nodes=torch.ones(N + 1, dtype=torch.bool)), "mask of shape \\[41\\]"),
    "inference, node": (lambda: infer(input_nodes=torch.tensor([-1])), "'input_nodes' has node -1"),
    "inference, batch_size": (lambda: infer(batch_size=0), "'batch_size' is 0"),
    "inference, rows": (
        lambda: infer(num_neighbors=[2], forward=lambda model, batch: batch.x[:1]), "wanted 40 rows, one for each seed",
    ),
}  # fmt: skip


def infer(**arguments):
    return inference(GraphSAGE(6, 4, 1), data(), **arguments)


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_samplers_and_inference(name):
    call, text = LOADERS[name]
    with pytest.raises(StrettoError, match=text):
        call()


def test_what_is_unusual_and_right_is_still_served():
    given = data()
    assert first(NeighborLoader(given, [2**63 - 1, -1], batch_size=4)).num_edges > 0  # all there are
    empty = Data(x=X, edge_index=torch.tensor([[], []]))
    assert first(NeighborLoader(empty, [2], batch_size=4)).num_edges == 0
    at = NeighborSampler(given, [3]).sample_from_nodes
    for dtype in (torch.int32, torch.uint8):
        from torch_geometric.sampler import NodeSamplerInput

        assert at(NodeSamplerInput(None, torch.arange(5, dtype=dtype))).node[:5].tolist() == list(range(5))


def test_the_last_edges_with_replacement_are_as_many_as_asked():
    """Drawn from the last of them, as PyG draws; one edge is drawn five times."""
    edge_index = torch.stack([torch.arange(1, 11), torch.tensor([0] * 9 + [11])])
    given = Data(edge_index=edge_index, num_nodes=12, time=torch.cat([torch.arange(11), torch.tensor([99])]))
    options = {"replace": True, "time_attr": "time", "temporal_strategy": "last", "batch_size": 1}
    for root, k, last in ((0, 5, range(5, 10)), (0, 20, range(1, 10)), (11, 5, [10])):
        seen = set()
        for _ in range(40):
            one = first(
                NeighborLoader(given, [k], input_nodes=torch.tensor([root]), input_time=torch.tensor([100]), **options)
            )
            assert one.num_edges == k
            seen |= set(one.n_id[one.edge_index[0]].tolist())
        assert seen == set(last)


# ---- views ----

VIEWS = {
    "every second column": lambda: torch.rand(N, 12)[:, ::2],
    "transposed": lambda: torch.rand(6, N).t(),
    "some columns": lambda: torch.rand(N, 12)[:, 3:9],
    "one column": lambda: torch.rand(N, 12)[:, 4:5],
    "a column": lambda: torch.rand(N, 12)[:, 4],
    "every second row": lambda: torch.rand(2 * N, 6)[::2],
    "backwards": lambda: torch.rand(N, 6).flip(0),
    "one row for all": lambda: torch.rand(1, 6).expand(N, 6),
    "one column for all": lambda: torch.rand(N, 1).expand(N, 6),
    "one value for all": lambda: torch.rand(1, 1).expand(N, 6),
    "with an offset": lambda: torch.rand(N + 7, 6)[7:],
    "three dimensions": lambda: torch.rand(N, 5, 4)[:, 1:3],
    "no columns": lambda: torch.rand(N, 0),
    "half a type": lambda: torch.randint(0, 9, (N, 6), dtype=torch.int16)[:, :3],
    "imaginary": lambda: torch.rand(N, 6, dtype=torch.complex64).conj(),
    "negative": lambda: torch.rand(N, 6, dtype=torch.complex64).conj().imag,
    "a parameter": lambda: torch.nn.Parameter(torch.rand(N, 6)),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store.create(tmp_path_factory.mktemp("store") / "s", data())


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_as_they_are(view, store):
    x, wide = VIEWS[view](), torch.rand(2 * E, 8)
    for batch in NeighborLoader(data(x=x, edge_attr=wide[::2, 1:4]), [3, 2], batch_size=16):
        assert torch.equal(batch.x, x[batch.n_id])
        assert torch.equal(batch.edge_attr, wide[::2, 1:4][batch.e_id])
    if x.is_conj() or x.is_neg():
        return
    for batch in NeighborLoader(store.with_features(x), [3, 2], batch_size=16):
        assert torch.equal(batch.x, x[batch.n_id])


def test_views_of_many_rows_are_streamed_with_their_stride():
    x = torch.rand(N, 300)[:, 100:200]
    seeds = torch.randint(0, N, ((9 << 20) // 400,), generator=GENERATOR)
    slot = native(slices=[Slice(x)], fanout=(0, 0)).sample(0, 0, 0, [seeds], [None])
    assert torch.equal(slot.slice(0), x[seeds])


def test_what_was_replaced_between_passes_is_seen():
    given = data()
    loader = NeighborLoader(given, [3], batch_size=16)

    def right():
        for batch in loader:
            check_all(batch, given)

    right()
    for change in (
        lambda: given.__setattr__("x", torch.rand(N, 3)),
        lambda: given.x.mul_(2),
        lambda: setattr(given.x, "data", torch.rand(N, 3)),
        lambda: given.x.set_(torch.rand(N, 5)),
        lambda: given.x.resize_(N, 2),
        lambda: given.__setattr__("z", torch.rand(N, 2)),
        lambda: given.__delattr__("z"),
        lambda: given.__setattr__("edge_attr", torch.rand(E, 1)),
        lambda: given.__setattr__("x", torch.rand(N, 3)[:, ::2]),
    ):
        change()
        right()


def check_all(batch, given):
    assert ("z" in batch) == ("z" in given)
    for name in ("x", "y", "z"):
        if name in given:
            assert torch.equal(batch[name], given[name][batch.n_id]), name
    assert torch.equal(batch.edge_attr, given.edge_attr[batch.e_id])


def test_memory_that_threads_read_is_not_moved_by_torch():
    given = data(x=X.clone())
    iterator = iter(NeighborLoader(given, [3], batch_size=4))
    next(iterator)
    with pytest.raises(RuntimeError, match="not resizable"):
        given.x.resize_(100 * N, 6)
    for batch in iterator:
        assert torch.equal(batch.x, X[batch.n_id])


# ---- random walks ----

RP, COL = COLPTR, ROW.long()
WALKS = [
    ({"start": torch.tensor([0.5])}, "'start' is float32"),
    ({"start": torch.tensor([True])}, "'start' is bool"),
    ({"start": torch.tensor([N])}, "'start' has node 40"),
    ({"start": torch.tensor([-1], dtype=torch.int8)}, "'start' has node -1"),
    ({"start": [0]}, "'start' is list"),
    ({"rowptr": RP.float()}, "'rowptr' is float32"),
    ({"rowptr": decreasing(RP)}, "'rowptr' decreases"),
    ({"rowptr": RP[:-1]}, "'rowptr' goes from 0"),
    ({"rowptr": torch.empty(0, dtype=INT)}, "'rowptr'"),
    ({"col": COL + N}, "'col' has node"),
    ({"col": COL[1:]}, "'rowptr' goes from 0 to 200"),
    ({"walk_length": 1.5}, "'walk_length' is 1.5"),
    ({"walk_length": -1}, "'walk_length' is -1"),
    ({"p": 5e-324}, "'p' is"),
    ({"q": float("inf")}, "'q' is inf"),
    ({"q": float("nan")}, "'q' is nan"),
    ({"p": "1"}, "'p' is '1'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WALKS)))
def test_random_walk(number):
    change, text = WALKS[number]
    arguments = {"rowptr": RP, "col": COL, "start": torch.arange(4), "walk_length": 3, **change}
    with pytest.raises(StrettoError, match=text):
        random_walk(**arguments)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_walks_start_where_they_are_told(dtype):
    walks = random_walk(RP.int(), COL.int(), torch.arange(N, dtype=dtype), 2)
    assert walks[:, 0].tolist() == list(range(N))
    RP_edited = RP.clone()
    random_walk(RP_edited, COL, torch.arange(3), 2)
    RP_edited[1] = 2**40
    with pytest.raises(StrettoError, match="'rowptr' decreases"):
        random_walk(RP_edited, COL, torch.arange(3), 2)


@pytest.mark.parametrize(("p", "q"), [(1e-300, 1.0), (1e300, 1.0), (1.0, 1e-300), (1.0, 1e300), (1e-300, 1e300)])
def test_walks_of_any_weights_end(p, q):
    """0 and 1 know each other and 2; 3 hangs on 1: the second step goes where its weight says, if only a little."""
    rowptr, col = torch.tensor([0, 2, 5, 7, 8]), torch.tensor([1, 2, 0, 2, 3, 0, 1, 1])
    walks = random_walk(rowptr, col, torch.zeros(500, dtype=INT), 2, p, q)
    by_way = walks[walks[:, 1] == 1, 2]  # from 0 to 1: back to 0 by 1 / p, 2 by 1, 3 by 1 / q
    weight = {0: 1 / p, 2: 1.0, 3: 1 / q}
    likely = {node for node, w in weight.items() if w == max(weight.values())}
    assert set(by_way.tolist()) == likely


# ---- stores ----


def edited(change):
    """An edit of meta.json."""
    return lambda folder: _rewrite(folder, change)


def _rewrite(folder, change):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def array(meta, name):
    return next(a for a in meta["arrays"] if a["name"] == name)


def resized(name, rows):
    """An array with other rows, in meta.json and in its file, so that sizes and checksums agree."""

    def change(folder):
        path = folder / f"{name}.bin"

        def edit(meta):
            entry = array(meta, name)
            size = entry["bytes"] // entry["shape"][0]
            entry["shape"][0], entry["bytes"] = rows, rows * size
            path.write_bytes(path.read_bytes()[: rows * size].ljust(rows * size, b"\0"))

        _rewrite(folder, edit)

    return change


def linked(folder):
    shutil.copy(folder / "x.bin", folder.parent / "elsewhere.bin")
    (folder / "x.bin").unlink()
    (folder / "x.bin").symlink_to(folder.parent / "elsewhere.bin")


def piped(folder):
    (folder / "x.bin").unlink()
    os.mkfifo(folder / "x.bin")


STORES = {
    "more rows than the file": (edited(lambda m: array(m, "x").update(shape=[10**9, 6])), "has 960 bytes, wanted"),
    "more bytes than the file": (edited(lambda m: array(m, "x").update(shape=[400, 6], bytes=9600)), "truncated"),
    "more nodes": (edited(lambda m: m["node_types"][0].update(num_nodes=10**9)), "wanted \\[1000000001\\]"),
    "x, short": (resized("x", 10), "'x' has 10 rows, wanted 40"),
    "y, long": (resized("y", 80), "'y' has 80 rows"),
    "row, short": (resized("row", 100), "'colptr' goes from 0 to 200, wanted from 0 to 100"),
    "colptr, short": (resized("colptr", 10), "'colptr' has shape"),
    "edge_attr, short": (resized("edge_attr", 100), "'edge_attr' has 100 rows"),
    "absolute path": (edited(lambda m: array(m, "x").update(file="/etc/passwd")), "own folder"),
    "path upwards": (edited(lambda m: array(m, "x").update(file="../elsewhere.bin")), "own folder"),
    "folder itself": (edited(lambda m: array(m, "x").update(file="..")), "own folder"),
    "no name": (edited(lambda m: array(m, "x").update(file="")), "own folder"),
    "link": (linked, "it is a link"),
    "pipe": (piped, "is no file"),
    "two arrays of one file": (edited(lambda m: array(m, "x").update(file="y.bin")), "same file"),
    "two arrays of one name": (edited(lambda m: m["arrays"].append(m["arrays"][0])), "same name"),
    "dtype": (edited(lambda m: array(m, "x").update(dtype="float8")), "has dtype 'float8'"),
    "dtype of colptr": (edited(lambda m: array(m, "colptr").update(dtype="float64")), "'colptr' is float64"),
    "dtype of row": (edited(lambda m: array(m, "row").update(dtype="float32")), "'row' is float32"),
    "shape": (edited(lambda m: array(m, "x").update(shape=[-40, -6])), "whole numbers"),
    "shape of floats": (edited(lambda m: array(m, "x").update(shape=[40.0, 6])), "whole numbers"),
    "bytes": (edited(lambda m: array(m, "x").update(bytes=True)), "'bytes' is True"),
    "scale": (
        edited(lambda m: m["arrays"].append({**array(m, "y"), "name": "x.scale", "file": "z.bin"})), "z.bin is missing",
    ),
    "arrays": (edited(lambda m: m.update(arrays={})), "'arrays' is dict"),
    "an array": (edited(lambda m: m["arrays"].append(3)), "'name' is int"),
    "no row": (edited(lambda m: m.update(arrays=[a for a in m["arrays"] if a["name"] != "row"])), "no array 'row'"),
    "no x": (edited(lambda m: m.update(arrays=[a for a in m["arrays"] if a["name"] != "x"])), "no array 'x'"),
    "node types": (edited(lambda m: m.update(node_types=[])), "no node type"),
    "num_nodes": (edited(lambda m: m["node_types"][0].update(num_nodes="40")), "'num_nodes' is str"),
    "edge types": (edited(lambda m: m.update(edge_types=[["a", "b", "c"]])), "joins no two node types"),
    "no edge types": (edited(lambda m: m.update(edge_types=[])), "no edge type"),
    "attribute": (edited(lambda m: m["attributes"][0].update(type="paper")), "which is no node type"),
    "of_edges": (edited(lambda m: m["attributes"][0].update(of_edges=1)), "'of_edges' is int"),
    "format": (edited(lambda m: m.update(format=True)), "format True"),
    "a list": (lambda folder: (folder / "meta.json").write_text("[]"), "format None"),
    "deep": (lambda folder: (folder / "meta.json").write_text("[" * 10**5), "cannot be read"),
    "no text": (lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", STORES)
def test_a_store_that_lies_is_not_opened(name, store, tmp_path):
    change, text = STORES[name]
    folder = shutil.copytree(store.folder, tmp_path / "s")
    change(folder)
    with pytest.raises(StrettoError, match=text):
        Store(folder, verify=False)


def batch_of(opened):
    return first(NeighborLoader(opened, [2]))


def test_indices_that_lie_are_told_before_they_are_followed(store, tmp_path):
    for name, text in (("colptr", "decreases"), ("row", "comes from node|has node")):
        folder = shutil.copytree(store.folder, tmp_path / name)
        dtype = np.int64 if name == "colptr" else np.int32
        values = np.fromfile(folder / f"{name}.bin", dtype)
        values[1] = 10**8
        values.tofile(folder / f"{name}.bin")
        opened = Store(folder, verify=False)
        for call in (opened.load, partial(batch_of, opened), partial(opened.read, weight_attr="edge_attr")):
            with pytest.raises(StrettoError, match=text):
                call()
        with pytest.raises(StrettoError, match="checksum"):
            Store(folder)


def test_scales_and_features_of_a_store(tmp_path, store):
    small = Store.create(tmp_path / "small", data(), features="int8")
    path = small.folder / "meta.json"
    _rewrite(small.folder, lambda m: array(m, "x.scale").update(shape=[3], bytes=12))
    (small.folder / "x.scale.bin").write_bytes(b"\0" * 12)
    with pytest.raises(StrettoError, match=r"x\.scale"):
        Store(small.folder, verify=False)
    assert path.is_file()
    for bad in (X[:-1], X.to("meta"), X.to_sparse(), X.tolist(), torch.tensor(1.0), gone(X), None):
        with pytest.raises(StrettoError, match="Store: 'x' is"):
            store.with_features(bad)
    for bad, text in ((X.to("meta"), "dense"), (X.to_sparse(), "dense"), (X.to(torch.complex64), "complex64")):
        with pytest.raises(StrettoError, match=text):
            Store.create(tmp_path / "bad", data(x=bad))


def test_names_that_look_alike_have_files_of_their_own(tmp_path):
    given = HeteroData()
    for kind, name in (("a", "b_x"), ("a_b", "x"), ("A_b", "x"), ("../up", "x"), ("c:d", "x")):
        given[kind][name], given[kind].num_nodes = torch.rand(3, 2), 3
    given["a", "to", "a_b"].edge_index = torch.tensor([[0], [1]])
    loaded = Store.create(tmp_path / "s", given).load()
    for kind in given.node_types:
        for name in set(given[kind].keys()) - {"num_nodes"}:
            assert torch.equal(loaded[kind][name], given[kind][name])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


# ---- parts and layers ----


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
