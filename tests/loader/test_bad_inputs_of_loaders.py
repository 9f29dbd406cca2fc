"""What loaders, samplers and inference would read wrongly is refused by name; what is unusual and right is served."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from stretto import inference
from stretto.errors import StrettoError
from stretto.loader import LinkNeighborLoader, NeighborLoader
from stretto.loader.cluster import metis
from stretto.loader.engine import Engine
from stretto.loader.native_sampler import running_weights
from stretto.loader.sampler import NeighborSampler
from stretto.loader.shadow import ShaDowKHopSampler
from tests.loader.bad_values import COLPTR, EDGES, INT, ROW, E, N, X, data, decreasing, first, gone, native
from tests.loader.data import heterogeneous


def replaced(name, value, *, hetero=False):
    """A batch of a loader whose data was changed after it was made."""
    given = heterogeneous() if hetero else Data(x=X, edge_index=EDGES)
    loader = NeighborLoader(given, [3], batch_size=8, input_nodes=("paper", None) if hetero else None)
    part = given["paper"] if hetero else given
    part[name] = value
    return first(loader)


def sparse(layout, a, b, *, memory=torch.clone):
    if layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(memory(torch.stack([a, b])), torch.ones(E), (N, N), check_invariants=False)
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
    "x, gone, in PyG's filter": (
        lambda: first(NeighborLoader(data(x=gone(X)), [2], subgraph_type="bidirectional")), "memory was let go",
    ),
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
    "csr pointers of floats": (adj(sparse(torch.sparse_csr, COLPTR.float(), ROW.float())), "'adj_t' is float32"),
    "csc pointers of floats": (adj(sparse(torch.sparse_csc, COLPTR.float(), ROW.float())), "'adj_t' is float32"),
    "csr pointers, complex": (adj(sparse(torch.sparse_csr, COLPTR + 0j, ROW + 0j)), "'adj_t' is complex64"),
    "csc pointers, gone": (adj(sparse(torch.sparse_csc, gone(COLPTR), ROW.long())), "'adj_t' is int64 of shape"),
    "csr col, gone": (adj(sparse(torch.sparse_csr, COLPTR, gone(ROW.long()))), "'adj_t' is int64 of shape"),
    "csc row, sparse": (adj(sparse(torch.sparse_csc, COLPTR, ROW.long().to_sparse())), "'adj_t' cannot be read"),
    "coo, gone": (adj(sparse(torch.sparse_coo, EDGES[1], EDGES[0], memory=gone)), "'adj_t' cannot be read"),
    "adj_t of another size": (lambda: NeighborLoader(Data(adj_t=torch.eye(3).to_sparse(), num_nodes=N), [2]), "adj_t"),
    "stores, coo": (lambda: graph_stores("coo", EDGES[0] + 2**40, EDGES[1]), "has source"),
    "stores, coo target": (lambda: graph_stores("coo", EDGES[0], EDGES[1] - 1), "has target -1"),
    "stores, coo of floats": (lambda: graph_stores("coo", EDGES[0].float(), EDGES[1]), "' is float32"),
    "stores, csc, gone": (lambda: graph_stores("csc", ROW.long(), gone(COLPTR)), "' is int64 of shape"),
    "stores, csr, a list": (lambda: graph_stores("csr", COLPTR, ROW.tolist()), "' is list"),
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
    "time, sparse": (lambda: NeighborLoader(data(t=torch.arange(N).to_sparse()), [2], time_attr="t"), "sparse_coo"),
    "time, gone": (lambda: NeighborLoader(data(when=gone(torch.arange(N))), [2], time_attr="when"), "wanted integers"),
    "weights, sparse": (lambda: NeighborLoader(data(w=torch.rand(E).to_sparse()), [2], weight_attr="w"), "sparse_coo"),
    "weights on meta": (lambda: NeighborLoader(data(w=torch.rand(E, device="meta")), [2], weight_attr="w"), "on meta"),
    "weights, gone": (lambda: NeighborLoader(data(w=gone(torch.rand(E))), [2], weight_attr="w"), "real numbers"),
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
    "fan-out, replaced": (lambda: NeighborLoader(data(), [2**60], replace=True), "at most 16777216 with 'replace'"),
    "fan-out, the largest, replaced": (lambda: NeighborLoader(data(), [2**63 - 1], replace=True), "with 'replace'"),
    "fan-out that no batch holds": (
        lambda: first(NeighborLoader(data(), [2**31 - 1], replace=True, batch_size=8)), "at most 16777216 with",
    ),
    "fan-out that no batch holds, of another type": (
        lambda: first(NeighborLoader(heterogeneous(), [2**31 - 1], replace=True, input_nodes=("paper", None))),
        "at most 16777216 with",
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
    "running_weights, none": (lambda: running_weights(COLPTR, None), "'weight' is NoneType"),
    "running_weights, gone": (lambda: running_weights(COLPTR, gone(torch.rand(E))), "'weight' is float32"),
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
