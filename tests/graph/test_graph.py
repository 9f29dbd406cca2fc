"""Graph: every input format, the CSR and all that derives from it, what it costs, copies, and clear errors."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_remaining_self_loops, degree

from stretto import Graph, StrettoError, ops
from stretto.kernels import build
from tests.graphs import ZOO, dense, graph_of, random_edges, symmetric_edges

pytestmark = pytest.mark.usefixtures("fresh_memo")


def matrix(edge_index, sizes):
    """The dense matrix, destinations by sources, that an edge_index stands for."""
    out = torch.zeros(sizes[1], sizes[0], dtype=torch.float64)
    return out.index_put((edge_index[1], edge_index[0]), torch.ones(edge_index.size(1), dtype=torch.float64), True)


def sparse_forms(edge_index, sizes):
    """The same graph in every format; destinations are the rows of a sparse matrix."""
    coo = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(edge_index.size(1)), (sizes[1], sizes[0]))
    forms = {
        "edge_index": edge_index,
        "int32": edge_index.int(),
        "not contiguous": edge_index.t().contiguous().t(),
        "EdgeIndex": EdgeIndex(edge_index, sparse_size=sizes),
        "COO": coo,
        "COO coalesced": coo.coalesce(),
        "CSR": coo.to_sparse_csr(),
        "CSC": coo.to_sparse_csc(),
    }
    return forms


@pytest.mark.parametrize("name", ZOO)
def test_structure(name):
    edge_index, sizes = ZOO[name]()
    graph = Graph.of(edge_index, sizes)
    assert (graph.num_cols, graph.num_rows, graph.num_edges) == (*sizes, edge_index.size(1))
    assert torch.equal(graph.edge_index, edge_index)
    assert torch.equal(dense(graph), matrix(edge_index, sizes))
    assert torch.equal(graph.degree, torch.bincount(edge_index[1], minlength=sizes[1]))
    assert torch.equal(graph.T.edge_index, edge_index.flip(0))
    assert torch.equal(dense(graph.T), dense(graph).t())
    assert graph.T.T is graph
    columns, rows = graph.T.csr.columns(), graph.T.csr.rows()
    assert (rows.diff() >= 0).all()
    assert ((rows.diff() > 0) | (columns.diff() >= 0)).all()  # a transpose's rows are in column order
    assert torch.equal(graph.segment_index.long(), edge_index[1])
    assert torch.equal(dense(graph.segments).sum(1).long(), graph.degree)


@pytest.mark.parametrize("form", sparse_forms(random_edges(6, 8, 20, 1), (6, 8)))
@pytest.mark.parametrize("name", ["unsorted", "wide", "tall", "empty", "isolated"])
def test_formats(name, form):
    edge_index, sizes = ZOO[name]()
    given = sparse_forms(edge_index, sizes)[form]
    expected = matrix(edge_index, sizes)
    graph = Graph.of(given, None if form not in ("edge_index", "int32", "not contiguous") else sizes)
    assert (graph.num_cols, graph.num_rows) == sizes
    if form in ("edge_index", "int32", "not contiguous", "EdgeIndex", "COO"):
        assert torch.equal(graph.edge_index, edge_index)  # the order of the edges is the user's
        assert torch.equal(dense(graph), expected)
    else:  # values come in the order in which the format stores them; it may have added up duplicates
        values = given.values() if given.layout != torch.sparse_coo else given._values()
        assert torch.equal(dense(graph, values), expected)
        torch.testing.assert_close(ops.spmm(graph, torch.eye(sizes[0], dtype=torch.float64), values.double()), expected)


def test_the_index_of_an_edge_index():
    """PyG's Index wraps a tensor and has no storage of its own."""
    edge_index = random_edges(6, 8, 20, 1)
    wrapped = EdgeIndex(edge_index, sparse_size=(6, 8))
    source, target = wrapped[0], wrapped[1]
    assert type(source) is not torch.Tensor
    x, messages = torch.randn(6, 3, requires_grad=True), torch.randn(20, 3)
    for reduce in ("sum", "max", "std"):
        ours = ops.segment_reduce(messages, target, 8, reduce=reduce)
        assert torch.equal(ours, ops.segment_reduce(messages, edge_index[1], 8, reduce=reduce))
    assert torch.equal(ops.scatter_rows(messages, target, 8), ops.scatter_rows(messages, edge_index[1], 8))
    gathered = ops.gather_rows(x, source)
    assert torch.equal(gathered, x[edge_index[0]])
    gathered.sum().backward()
    assert torch.equal(x.grad[:, 0], torch.bincount(edge_index[0], minlength=6).float())
    assert Graph.of_segments(target, 8) is Graph.of_segments(target, 8)


def test_sparse_tensor():
    sparse = pytest.importorskip("torch_sparse", reason="torch_sparse is not installed")
    edge_index = random_edges(6, 8, 20, 1)
    adj_t = sparse.SparseTensor(row=edge_index[1], col=edge_index[0], sparse_sizes=(8, 6))
    assert torch.equal(dense(Graph.of(adj_t)), matrix(edge_index, (6, 8)))


def test_anything_with_coo_and_sizes_is_taken_as_a_sparse_tensor():
    class Stored:
        def coo(self):
            return torch.tensor([0, 2]), torch.tensor([1, 0]), None

        def sparse_sizes(self):
            return 3, 2

    graph = Graph.of(Stored())
    assert (graph.num_rows, graph.num_cols) == (3, 2)
    assert torch.equal(graph.edge_index, torch.tensor([[1, 0], [0, 2]]))


@pytest.mark.parametrize("name", ["unsorted", "wide", "tall", "hub"])
def test_flow_is_the_transpose(name):
    edge_index, sizes = ZOO[name]()
    there = Graph.of(edge_index, sizes)
    back = Graph.of(edge_index, sizes, flow="target_to_source")
    assert torch.equal(dense(back), dense(there).t())
    assert torch.equal(back.edge_index, edge_index.flip(0))


def test_sizes():
    edge_index = torch.tensor([[0, 3], [1, 1]])
    assert (Graph.of(edge_index).num_cols, Graph.of(edge_index).num_rows) == (4, 4)
    for given in (7, np.int64(7), torch.tensor(7), (7, 7), [7, 7]):
        assert (Graph.of(edge_index, given).num_cols, Graph.of(edge_index, given).num_rows) == (7, 7)
    assert (Graph.of(edge_index, (9, None)).num_cols, Graph.of(edge_index, (9, None)).num_rows) == (9, 2)
    assert (Graph.of(edge_index, (None, 5)).num_cols, Graph.of(edge_index, (None, 5)).num_rows) == (4, 5)


def test_the_sizes_of_an_edge_index_belong_to_it():
    """Same content, other sizes: never one graph for both."""
    edge_index = torch.tensor([[0, 3], [1, 1]])
    assert Graph.of(edge_index).num_rows == 4
    assert Graph.of(EdgeIndex(edge_index, sparse_size=(9, 9))).num_rows == 9
    assert Graph.of(EdgeIndex(edge_index.clone(), sparse_size=(4, 6))).num_rows == 6
    assert Graph.of(EdgeIndex(edge_index, sparse_size=(9, 9)), 12).num_rows == 12
    assert Graph.of(EdgeIndex(edge_index)).num_rows == 4


@pytest.mark.parametrize("name", ["symmetric", "self_loops", "unsorted", "symmetric_unsorted", "empty", "wide"])
def test_symmetric_structure_shares_its_arrays(name):
    graph = graph_of(name)
    if name in ("symmetric", "empty"):
        assert graph.is_symmetric
        assert graph.T.csr.col.data_ptr() == graph.csr.col.data_ptr()
    if graph.is_symmetric:
        assert torch.equal(dense(graph), dense(graph).t())
    # Edge order is not shared: values on the edges are transposed with them.
    weight = torch.rand(graph.num_edges, dtype=torch.float64)
    assert torch.equal(dense(graph.T, weight), dense(graph, weight).t())
    eye = torch.eye(graph.num_rows, dtype=torch.float64)
    torch.testing.assert_close(ops.spmm(graph.T, eye, weight), dense(graph, weight).t())


def test_memory():
    """CSR and transpose: 4 bytes an edge when symmetric, 8 otherwise, 4 more for the order of unsorted edges."""
    n, pairs = 2000, 100_000
    edge_index = symmetric_edges(n, pairs)
    e = edge_index.size(1)
    graph = Graph.of(edge_index, n)
    ops.spmm(graph, torch.randn(n, 4, requires_grad=True)).sum().backward()
    assert graph.is_symmetric
    assert graph.memory()["csr"] + graph.memory()["transpose"] <= 4 * e + 16 * (n + 2) + 65_536

    ordered = random_edges(n, n, 200_000)
    ordered = ordered[:, ordered[1].argsort(stable=True)].contiguous()
    directed = Graph.of(ordered, n)
    ops.spmm(directed, torch.randn(n, 4, requires_grad=True)).sum().backward()
    held = directed.memory()
    assert held["csr"] + held["transpose"] <= 8 * 200_000 + 16 * (n + 2) + 65_536
    assert directed.nbytes == sum(held.values())
    before = directed.nbytes
    assert directed.with_self_loops.nbytes > 0
    assert directed.degree_power(-0.5, torch.float32).shape == (n,)
    assert directed.segments.T.num_rows == 200_000
    assert directed.nbytes > before + 4 * 200_000
    assert f"{directed.nbytes} bytes" in repr(directed)
    assert "2000x2000" in repr(directed)


def test_int64_inside(monkeypatch):
    """What graphs beyond 2^31 edges use, forced on small ones."""
    for name in ("hub", "unsorted", "wide", "symmetric", "empty"):
        edge_index, sizes = ZOO[name]()
        x = torch.randn(sizes[0], 37, dtype=torch.float64)
        weight = torch.rand(edge_index.size(1), dtype=torch.float64)
        outcomes = []
        for index in ("int32", "int64"):
            monkeypatch.setenv("STRETTO_INDEX", index)
            Graph.cache_clear()
            graph = Graph.of(edge_index, sizes)
            assert graph.csr.col.dtype == getattr(torch, index)
            out = []
            for reduce in ("sum", "mean", "max"):
                a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
                value = ops.spmm(graph, a, w, reduce=reduce)
                out += [value, *torch.autograd.grad(value.sum(), (a, w))]
            rows = torch.ones(sizes[1], 37, dtype=torch.float64).cumsum(1)
            out += [ops.sddmm(graph, rows, x), ops.edge_softmax(graph, weight), ops.segment_reduce(weight, graph)]
            outcomes.append(out)
        for a, b in zip(*outcomes, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_degrees_and_scales():
    graph = graph_of("isolated")
    assert torch.equal(graph.mean_scale(torch.float64), 1 / graph.degree.clamp(min=1).double())
    root = graph.degree_power(-0.5, torch.float64)
    assert root[graph.degree == 0].eq(0).all()
    torch.testing.assert_close(root[graph.degree > 0], graph.degree[graph.degree > 0].double().pow(-0.5))
    assert graph.degree_power(-0.5, torch.float64) is root
    assert torch.equal(graph.degree, degree(graph.edge_index[1], 9, torch.long))


@pytest.mark.parametrize("name", ["self_loops", "duplicates", "unsorted", "isolated", "empty", "one_loop", "no_nodes"])
def test_self_loops(name):
    """Every node with one loop, in PyG's order; weights of kept edges are found by `kept_edges`."""
    graph = graph_of(name)
    looped = graph.with_self_loops
    expected, _ = add_remaining_self_loops(graph.edge_index, num_nodes=graph.num_rows)
    assert torch.equal(looped.edge_index, expected)
    assert torch.equal(graph.edge_index[:, graph.kept_edges], expected[:, : graph.kept_edges.numel()])
    assert graph.has_self_loops == bool((graph.edge_index[0] == graph.edge_index[1]).any())
    assert graph.with_self_loops is looped


def test_from_pointers():
    reference = graph_of("sorted")
    graph = Graph.of_pointers(reference.csr.rowptr, reference.csr.col, 12)
    assert torch.equal(graph.edge_index, reference.edge_index)
    one_each = Graph.of_pointers(torch.tensor([0, 2, 3]), None, 3)
    assert torch.equal(ops.spmm(one_each, torch.tensor([1.0, 2.0, 4.0])), torch.tensor([3.0, 4.0]))


def test_rows_in_column_order_are_recognised():
    assert build.rows_sorted(graph_of("symmetric").csr)
    assert build.rows_sorted(graph_of("empty").csr)
    assert not build.rows_sorted(Graph.of(torch.tensor([[2, 1], [0, 0]]), 3).csr)
    assert build.rows_sorted(Graph.of(torch.tensor([[2, 1], [0, 1]]), 3).csr)


@pytest.mark.parametrize("name", ["hub", "wide", "symmetric", "empty"])
def test_pickle_and_deepcopy(name):
    graph = graph_of(name)
    x = torch.randn(graph.num_cols, 5, dtype=torch.float64)
    expected = ops.spmm(graph, x)
    for other in (pickle.loads(pickle.dumps(graph)), pickle.loads(pickle.dumps(graph.T)).T):
        assert other is not graph
        assert torch.equal(other.edge_index, graph.edge_index)
        torch.testing.assert_close(ops.spmm(other, x), expected)
        assert torch.equal(dense(other.T), dense(graph).t())
    assert copy.deepcopy(graph) is graph  # a graph never changes
    assert copy.copy(graph).num_edges == graph.num_edges


def test_a_transpose_outlives_its_graph():
    transpose = Graph.of(random_edges(6, 8, 20, 1), (6, 8)).T
    Graph.cache_clear()
    assert torch.equal(transpose.T.edge_index, random_edges(6, 8, 20, 1))
    assert transpose.T.T is transpose


def test_a_graph_made_in_inference_mode_trains():
    """Evaluation first, training after: nothing the graph keeps may be an inference tensor."""
    edge_index = random_edges(9, 9, 40, 2)
    x = torch.randn(9, 4)
    for reduce in ("mean", "max"):
        Graph.cache_clear()
        with torch.inference_mode():
            graph = Graph.of(edge_index, 9)
            first = ops.spmm(graph, x, torch.rand(40), reduce=reduce)
            ops.segment_reduce(torch.rand(40, 2), graph, reduce="std")
            assert graph.T.degree.sum() == 40
            assert graph.with_self_loops.num_edges >= 40
        assert first.is_inference()
        a, weight = x.clone().requires_grad_(), torch.rand(40, requires_grad=True)
        ops.spmm(graph, a, weight, reduce=reduce).sum().backward()
        ops.segment_reduce(weight, graph, reduce="std").sum().backward()
        ops.spmm(graph.with_self_loops, a, reduce="mean").sum().backward()
        ops.edge_softmax(graph, weight).sum().backward()
        assert a.grad is not None
        assert weight.grad is not None


BAD = {
    "float": (lambda: Graph.of(torch.zeros(2, 3)), ["torch.float32", "[2, 3]", "int64"]),
    "shape": (lambda: Graph.of(torch.zeros(3, 2, dtype=torch.long)), ["[3, 2]", "[2, E]"]),
    "one dimension": (lambda: Graph.of(torch.zeros(4, dtype=torch.long)), ["[4]", "[2, E]"]),
    "negative": (lambda: Graph.of(torch.tensor([[0, -2], [1, 1]]), 3), ["source index -2", "0 <= index < 3"]),
    "negative and no size": (lambda: Graph.of(torch.tensor([[0, 1], [1, -1]])), ["destination index -1"]),
    "source": (lambda: Graph.of(torch.tensor([[5], [0]]), (5, 9)), ["source index 5", "0 <= index < 5"]),
    "destination": (lambda: Graph.of(torch.tensor([[0], [9]]), (5, 9)), ["destination index 9", "0 <= index < 9"]),
    "flow": (lambda: Graph.of(torch.tensor([[0], [0]]), 1, flow="up"), ["'flow' is 'up'", "source_to_target"]),
    "list": (lambda: Graph.of([[0], [0]]), ["'edges' is list", "edge_index"]),
    "sizes": (lambda: Graph.of(torch.tensor([[0], [0]]), (1, 2, 3)), ["'num_nodes' is (1, 2, 3)"]),
    "size text": (lambda: Graph.of(torch.tensor([[0], [0]]), "two"), ["'num_nodes' is 'two'"]),
    "size negative": (lambda: Graph.of(torch.tensor([[0], [0]]), -1), ["'num_nodes' is -1"]),
    "sparse size": (
        lambda: Graph.of(torch.eye(3).to_sparse(), 4),
        ["sparse matrix is 3x3", "'num_nodes' says 4x4"],
    ),
    "sparse dimensions": (lambda: Graph.of(torch.ones(2, 2, 2).to_sparse()), ["[2, 2, 2]", "two dimensions"]),
    "blocks": (lambda: Graph.of(torch.eye(4).to_sparse_bsr((2, 2))), ["wanted an edge_index"]),
    "loops of a bipartite graph": (lambda: graph_of("wide").with_self_loops, ["5x23", "square"]),
    "segments": (lambda: Graph.of_segments(torch.zeros(2, 2).long()), ["'index'", "[2, 2]", "[E]"]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_errors(name):
    call, words = BAD[name]
    with pytest.raises(StrettoError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_batch_made_in_one_call_is_the_graph_made_step_by_step(needs_native, monkeypatch, name, flow, dtype):
    edge_index, sizes = ZOO[name]()
    sizes = sizes if flow == "source_to_target" else sizes[::-1]
    edge_index = edge_index.to(dtype) if flow == "source_to_target" else edge_index.flip(0).to(dtype)
    at_once = Graph.of(edge_index.clone(), sizes, flow=flow)
    assert (at_once._transposed is None) == (edge_index.size(1) == 0)  # an empty one has its own way
    Graph.cache_clear()
    monkeypatch.setattr(build, "FEW_EDGES", 0)
    by_steps = Graph.of(edge_index.clone(), sizes, flow=flow)
    assert by_steps._transposed is None
    assert at_once.is_symmetric == by_steps.is_symmetric
    for one, other in ((at_once, by_steps), (at_once.T, by_steps.T)):
        one, other = one.edge_csr, other.edge_csr
        assert (one.num_rows, one.num_cols, one.num_slots) == (other.num_rows, other.num_cols, other.num_slots)
        for array in ("rowptr", "col", "edge_id", "tasks", "hubs"):
            mine, theirs = getattr(one, array), getattr(other, array)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), array


def test_a_batch_counts_its_transpose_before_anybody_asks_for_it(needs_native):
    edge_index = random_edges(40, 40, 100, 3)
    graph = Graph.of(edge_index, 40)
    before = graph.nbytes
    assert graph.memory()["transpose"] > 0
    assert graph.T.T is graph
    assert graph.nbytes == before + graph.T.handle.nbytes


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_a_batch_out_of_range_names_the_end(needs_native, flow):
    edge_index = torch.tensor([[0, 1, 5], [1, 2, 0]])
    for bad, end in ((edge_index, "source"), (edge_index.flip(0), "destination"), (-edge_index, "source")):
        with pytest.raises(StrettoError, match=f"{end} index"):
            Graph.of(bad, (3, 3), flow=flow)
