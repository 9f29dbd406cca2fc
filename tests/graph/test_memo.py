"""The memo behind Graph.of: same tensor, same content, edits, bounds, threads, fork, and memory that stays flat."""

import gc
import itertools
import multiprocessing
import os
import threading

import pytest
import torch
from torch_geometric import EdgeIndex

from stretto import Graph, ops
from stretto.graph import memo
from stretto.kernels import build
from tests.graphs import ZOO, random_edges

pytestmark = pytest.mark.usefixtures("fresh_memo")


def counts():
    info = Graph.cache_info()
    return info.hits, info.recognised, info.built


def test_the_same_tensor_is_found():
    edge_index = random_edges(9, 9, 30)
    graph = Graph.of(edge_index, 9)
    assert all(Graph.of(edge_index, 9) is graph for _ in range(3))
    assert counts() == (3, 0, 1)
    assert Graph.of(edge_index, 10) is not graph
    assert Graph.of(edge_index, 9, flow="target_to_source") is not graph
    assert Graph.of(graph) is graph


def test_the_same_content_in_a_new_tensor_is_recognised():
    edge_index = random_edges(9, 9, 30)
    graph = Graph.of(edge_index, 9)
    transpose = graph.T
    for other in (
        edge_index.clone(),
        edge_index[:, torch.arange(30)],
        EdgeIndex(edge_index.clone(), sparse_size=(9, 9)),
    ):
        again = Graph.of(other, 9)
        assert again is graph
        assert again.T is transpose
    assert counts() == (0, 3, 1)
    assert Graph.of(edge_index.int(), 9) is not graph


def test_an_edit_in_place_is_noticed():
    edge_index = random_edges(9, 9, 30)
    x = torch.eye(9)
    for edit in (
        lambda: edge_index[0].add_(1).remainder_(9),
        lambda: edge_index.__setitem__((1, 3), 0),
        lambda: edge_index.copy_(edge_index.flip(1).clone()),
        lambda: edge_index.t_().t_(),
        lambda: edge_index.set_(random_edges(9, 9, 12, 3)),
        lambda: edge_index.resize_(2, 10),
    ):
        Graph.of(edge_index, 9)
        edit()
        expected = torch.zeros(9, 9).index_put((edge_index[1], edge_index[0]), torch.ones(edge_index.size(1)), True)
        assert torch.equal(ops.spmm(Graph.of(edge_index, 9), x), expected)


def test_an_edit_through_a_view_is_noticed():
    edge_index = random_edges(9, 9, 30)
    view = edge_index.view(-1)
    graph = Graph.of(edge_index, 9)
    view[0] = (view[0] + 1) % 9
    assert Graph.of(edge_index, 9) is not graph
    assert torch.equal(Graph.of(edge_index, 9).edge_index, edge_index)


def test_inference_tensors_are_known_by_content():
    with torch.inference_mode():
        edge_index = random_edges(9, 9, 30)
        graph = Graph.of(edge_index, 9)
        assert Graph.of(edge_index, 9) is graph
        edge_index[0, 0] = (edge_index[0, 0] + 1) % 9
        assert Graph.of(edge_index, 9) is not graph
    assert Graph.of(edge_index, 9) is not graph
    out = ops.spmm(Graph.of(edge_index, 9), torch.ones(9, 1, requires_grad=True), reduce="mean")
    out.sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_known_by_identity():
    matrix = torch.sparse_coo_tensor(random_edges(9, 9, 30), torch.ones(30), (9, 9))
    compressed = matrix.to_sparse_csr()
    for form in (matrix, compressed):
        assert Graph.of(form) is Graph.of(form)
    assert Graph.cache_info().hits == 2


def test_remember():
    """A loader that knows its batch's CSR tells the memo, which then need not sort."""
    edge_index = random_edges(9, 9, 30)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)].contiguous()
    rowptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(edge_index[1], minlength=9).cumsum(0)])
    graph = Graph.of_pointers(rowptr, edge_index[0].int(), 9)
    Graph.remember(edge_index, graph, 9)
    assert Graph.of(edge_index, 9) is graph
    assert counts() == (1, 0, 0)


def test_the_memo_holds_tensors_weakly_and_graphs_within_bounds(monkeypatch):
    monkeypatch.setenv("STRETTO_GRAPH_CACHE", "5")
    for seed in range(20):
        Graph.of(random_edges(9, 9, 30, seed), 9)
    gc.collect()
    info = Graph.cache_info()
    assert info.graphs == memo.FEW  # of 20 none has come back
    assert info.tensors == 0
    assert info.built == 20
    Graph.of(random_edges(9, 9, 30, 19), 9)
    assert Graph.cache_info().recognised == 1
    Graph.of(random_edges(9, 9, 30, 0), 9)
    assert Graph.cache_info().built == 21  # the oldest had been let go
    for seed in (*range(30, 35), 0):  # but what was met twice is held while others come and go
        Graph.of(random_edges(9, 9, 30, seed), 9)
    assert Graph.cache_info().recognised == 2
    assert Graph.cache_info().graphs <= 5

    kept = random_edges(9, 9, 30, 50)  # a tensor in use keeps its graph whatever the bound
    graph = Graph.of(kept, 9)
    for seed in range(20):
        Graph.of(random_edges(9, 9, 30, seed), 9)
    assert Graph.of(kept, 9) is graph
    monkeypatch.setenv("STRETTO_GRAPH_CACHE_MB", "0")
    Graph.of(random_edges(9, 9, 30, 77), 9)
    assert Graph.cache_info().graphs == 0
    Graph.cache_clear()
    assert Graph.cache_info() == type(info)(0, 0, 0, 0, 0)


def neighbours():
    """Contents that differ by what one graph differs from the next by."""
    for order in itertools.permutations(range(7)):  # every order of a few indices
        yield torch.tensor(order)
    for number in range(4096):  # every choice of few bits, in every lane
        yield torch.tensor([number >> bit & 1 for bit in range(12)])
    for size in range(40):
        yield torch.full((size,), 7, dtype=torch.int32)
    base = torch.arange(70_000) % 1000  # more than two blocks
    yield base
    yield base.roll(32_768)  # the blocks change places
    for at in (*range(200), *range(32_700, 32_800), 69_991):
        for step in (1, 2, 8, 16):
            if at + step < 70_000:
                yield base.index_copy(0, torch.tensor([at, at + step]), base[[at + step, at]])
        yield base.index_fill(0, torch.tensor([at]), 1001)
        yield base[at + 1 :]


def test_hashes_tell_edits_apart():
    """No two of them share their 128 bits, nor either half."""
    torch.set_num_threads(1)
    hashes = [build.content_hash(t) for t in neighbours()]
    assert len(set(hashes)) == len(hashes)
    assert len({low for low, _ in hashes}) == len({high for _, high in hashes}) == len(hashes)


def test_hashes_do_not_depend_on_threads_or_strides():
    index = torch.arange(200_000) * 7 % 1_000_003
    expected = build.content_hash(index)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        assert build.content_hash(index) == expected
    assert build.content_hash(torch.stack([index, index], 1)[:, 0]) == expected


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def step(seed: int) -> None:
    """One graph made, used forward and backward, and freed."""
    n = 300 + seed % 7
    edge_index = random_edges(n, n, 4000, seed)
    x = torch.randn(n, 8, requires_grad=True)
    weight = torch.rand(4000)
    out = ops.spmm(Graph.of(edge_index, n), x, weight, reduce="mean")
    out.sum().backward()
    degree = torch.bincount(edge_index[1], minlength=n).clamp(min=1)
    expected = torch.zeros(n).index_add_(0, edge_index[0], weight / degree[edge_index[1]])
    torch.testing.assert_close(x.grad[:, 0], expected)


def test_a_thousand_graphs_leave_memory_flat():
    """Addresses are reused all the time; every result is right and nothing piles up."""
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc: resident memory cannot be read")
    torch.set_num_threads(1)
    for seed in range(200):  # thrice the memo's bound, and the allocator's own warm-up
        step(seed)
    gc.collect()
    before = resident()
    for seed in range(200, 1200):
        step(seed)
    gc.collect()
    assert resident() <= before * 1.05


def test_four_threads_on_different_graphs():
    failures = []

    def work(number: int) -> None:
        try:
            for seed in range(15):
                step(1000 * number + seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_four_threads_on_one_graph():
    """Transpose, edge order and degrees are asked for by all at once; each gets the same, right answer."""
    edge_index, sizes = ZOO["hub"]()
    x, weight = torch.randn(40, 8, dtype=torch.float64), torch.rand(edge_index.size(1), dtype=torch.float64)
    expected = torch.zeros(40, 40, dtype=torch.float64).index_put((edge_index[0], edge_index[1]), weight, True)
    for _ in range(5):
        Graph.cache_clear()
        graph = Graph.of(edge_index, sizes)
        start, failures = threading.Barrier(4), []

        def work(graph=graph, start=start, failures=failures) -> None:
            start.wait()
            try:
                for _ in range(5):
                    a = x.clone().requires_grad_()
                    ops.spmm(graph, a, weight).sum().backward()
                    torch.testing.assert_close(a.grad, expected.sum(1, keepdim=True).expand(-1, 8))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]


def _in_child(edge_index, x, expected, queue) -> None:
    torch.set_num_threads(2)
    known = ops.spmm(Graph.of(edge_index, 40), x)
    fresh = ops.spmm(Graph.of(edge_index.flip(1), 40), x)
    queue.put((torch.equal(known, expected), bool(torch.allclose(fresh, expected))))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_use():
    """A child made by fork runs kernels on several threads, on graphs known and new, although OpenMP's are gone."""
    torch.set_num_threads(2)
    edge_index, _ = ZOO["hub"]()
    x = torch.randn(40, 16, dtype=torch.float64)
    expected = ops.spmm(Graph.of(edge_index, 40), x)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(edge_index, x, expected, queue))
    child.start()
    assert queue.get(timeout=60) == (True, True)
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(ops.spmm(Graph.of(edge_index, 40), x), expected)


@pytest.mark.parametrize("way", ["numpy", ".data"])
def test_an_edit_behind_torchs_back_is_seen_once_the_memo_is_cleared(way, fresh_memo):
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])
    x = torch.arange(5.0).unsqueeze(1)
    assert ops.spmm(Graph.of(edge_index, 5), x).flatten().tolist() == [0, 0, 1, 2, 0]
    if way == "numpy":
        edge_index.numpy()[0] = 4
    else:
        edge_index.data[0] = 4
    assert ops.spmm(Graph.of(edge_index, 5), x).flatten().tolist() == [0, 0, 1, 2, 0]  # as the documentation says
    Graph.cache_clear()
    assert ops.spmm(Graph.of(edge_index, 5), x).flatten().tolist() == [0, 4, 4, 4, 0]
