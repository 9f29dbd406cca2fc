"""Kept buffers: used again when nobody else has them, never before."""

import threading

import pytest
import torch

from stretto import Graph
from stretto.memory import pool
from stretto.ops import spmm

ROWS = pool.LEAST // 64  # of 16 floats: a buffer of exactly the least size that is kept


@pytest.fixture(autouse=True)
def _fresh_pool():
    pool.clear()
    yield
    pool.clear()


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_freed_buffer_is_used_again_and_a_held_one_is_not():
    first = pool.empty((ROWS, 16), torch.float32)
    where = address(first)
    second = pool.empty((ROWS, 16), torch.float32)
    assert address(second) != where
    del first
    assert address(pool.empty((ROWS, 8), torch.float64)) == where  # the same bytes, another shape and type


def test_results_of_about_one_size_share_a_buffer():
    where = address(pool.empty((ROWS * 4 - 5, 16), torch.float32))
    assert address(pool.empty((ROWS * 4 - 300, 16), torch.float32)) == where
    assert address(pool.empty((ROWS * 3, 16), torch.float32)) != where
    assert address(pool.empty((ROWS * 4 - 1, 16), torch.float32)) == where


@pytest.mark.parametrize("nbytes", [pool.LEAST, pool.LEAST + 1, 3_000_001, (1 << 24) - 1, 1 << 24, (1 << 31) + 7])
def test_a_buffer_is_at_most_an_eighth_larger(nbytes):
    assert nbytes <= pool.size_class(nbytes) <= nbytes * 9 / 8
    assert pool.size_class(pool.size_class(nbytes)) == pool.size_class(nbytes)


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[3:5],
        lambda t: t.numpy(),
        lambda t: t.detach(),
        lambda t: torch.utils.dlpack.to_dlpack(t),
        lambda t: t.untyped_storage(),
        lambda t: (t * torch.ones((), requires_grad=True)).grad_fn,
    ],
    ids=["view", "numpy", "detach", "dlpack", "storage", "saved for backward"],
)
def test_whatever_still_sees_a_buffer_keeps_it(hold):
    first = pool.empty((ROWS, 16), torch.float32)
    where = address(first)
    held = hold(first)
    del first
    assert address(pool.empty((ROWS, 16), torch.float32)) != where
    del held


def test_a_buffer_shared_with_other_processes_is_not_used_again():
    first = pool.empty((ROWS, 16), torch.float32).share_memory_()
    where = address(first)
    del first
    assert address(pool.empty((ROWS, 16), torch.float32)) != where


def test_the_limit_holds_and_idle_buffers_make_room(monkeypatch):
    monkeypatch.setenv("STRETTO_POOL_MB", "3")
    held = [pool.empty((ROWS, 16), torch.float32) for _ in range(5)]
    assert pool.kept_bytes() <= 3 << 20
    del held
    pool.empty((ROWS * 2, 16), torch.float32)
    assert pool.kept_bytes() <= 3 << 20
    pool.empty((ROWS * 4, 16), torch.float32)  # more than may be kept
    assert pool.kept_bytes() <= 3 << 20
    monkeypatch.setenv("STRETTO_POOL_MB", "0")
    pool.clear()
    pool.empty((ROWS, 16), torch.float32)
    assert pool.kept_bytes() == 0


def test_results_stay_right_when_buffers_come_back():
    """Results held, dropped and held again over many steps, on several threads."""
    graph = Graph.of(torch.randint(0, 5000, (2, 20000)), num_nodes=5000)
    dense = torch.zeros(5000, 5000).index_put_(
        (graph.edge_index[1], graph.edge_index[0]), torch.ones(20000), accumulate=True
    )
    wrong = []

    def steps(seed):
        draw = torch.Generator().manual_seed(seed)
        kept = []
        for _ in range(12):
            x = torch.randn(5000, 64, generator=draw)
            kept.append((x, spmm(graph, x)))
            if len(kept) == 3:
                x, y = kept.pop(0)
                if not torch.allclose(y, dense @ x, atol=1e-4):
                    wrong.append(seed)

    workers = [threading.Thread(target=steps, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_constant_weights_are_sorted_once_and_edits_are_noticed():
    edges = torch.randint(0, 3000, (2, 1 << 15))
    graph = Graph.of(edges, num_nodes=3000)
    x = torch.randn(3000, 8, dtype=torch.float64)
    weight = torch.rand(1 << 15, dtype=torch.float64)

    def expected():
        return torch.zeros(3000, 8, dtype=torch.float64).index_add_(0, edges[1], weight.unsqueeze(1) * x[edges[0]])

    assert torch.allclose(spmm(graph, x, weight), expected())
    kept = graph.edge_csr.cache["weight"][2]
    spmm(graph, x, weight)
    assert graph.edge_csr.cache["weight"][2] is kept
    weight[:100] = 7.0
    assert torch.allclose(spmm(graph, x, weight), expected())
    weight = torch.rand(1 << 15, dtype=torch.float64)
    assert torch.allclose(spmm(graph, x, weight), expected())
    with torch.inference_mode():
        weight = torch.rand(1 << 15, dtype=torch.float64)
        assert torch.allclose(spmm(graph, x, weight), expected())


def test_a_buffer_is_used_again_where_torch_compile_watches_frames():
    """Its hook, which run-only leaves in place, makes calls from Python to Python keep one name more of an argument."""
    where = address(pool.empty((ROWS, 16), torch.float32))
    assert address(torch._dynamo.run(pool.empty)((ROWS, 16), torch.float32)) == where
    assert pool.in_use() == 0


def test_a_buffer_that_its_user_resized_is_let_go(monkeypatch):
    """PyG's GroupAddRev gives the memory of its input back by resize_(0), and takes it again in backward."""
    pool.clear()
    shape = (1 << 10, 1 << 9)
    for size in (0, 100, 1 << 23):
        given = pool.empty(shape, torch.float32)
        given.untyped_storage().resize_(size)
        del given
        again = pool.empty(shape, torch.float32)
        again.fill_(1.0)
        assert again.untyped_storage().nbytes() == pool.size_class(again.nbytes)
        assert pool.kept_bytes() == pool.size_class(again.nbytes)
        del again
    pool.empty(shape, torch.float32).untyped_storage().resize_(0)
    monkeypatch.setenv("STRETTO_POOL_MB", "4")
    assert pool.empty((1 << 10, 900), torch.float32).numel()  # makes room, by letting the resized one go
    assert pool.kept_bytes() <= 4 << 20
    pool.clear()
    assert pool.kept_bytes() == 0
