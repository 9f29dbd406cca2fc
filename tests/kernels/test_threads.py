"""No bit of any result depends on the number of threads, hubs included; torch's own setting is left alone."""

import pytest
import torch

from stretto import Graph
from stretto.kernels import build, cpu, native
from tests.graphs import graph_of, random_edges

pytestmark = pytest.mark.usefixtures("isa")
THREADS = (1, 2, 5)


def large() -> Graph:
    """Enough edges for dozens of tasks, a row cut into pieces, a column cut in the transpose."""
    edges = torch.cat(
        [
            random_edges(3000, 2000, 60_000, 1),
            torch.stack([torch.randint(3000, (30_000,)), torch.full((30_000,), 7)]),
            torch.stack([torch.full((30_000,), 9), torch.randint(2000, (30_000,))]),
        ],
        1,
    )
    return Graph.of(edges[:, torch.randperm(edges.size(1))], (3000, 2000))


def for_each_count(function):
    """The function's results with 1, 2 and 5 threads."""
    results = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        results.append(function())
        assert torch.get_num_threads() == threads
    return results


def all_equal(results):
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("graph", [large, lambda: graph_of("hub")], ids=["large", "hub"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_results_are_bitwise_the_same(graph, dtype):
    graph = graph()
    csr, csr_t = graph.edge_csr, graph.T.edge_csr
    assert csr.num_slots > 0
    assert csr_t.num_slots > 0
    x, y = torch.randn(graph.num_cols, 21).to(dtype), torch.randn(graph.num_rows, 21).to(dtype)
    weight, score = torch.rand(graph.num_edges), torch.randn(graph.num_edges, 2)
    share = torch.rand(graph.num_rows, 21)

    def run():
        most, ties = cpu.spmm(csr, x, weight, reduce="max", count_ties=True)
        alpha = cpu.edge_softmax(csr, score)
        return [
            cpu.spmm(csr, x)[0],
            cpu.spmm(csr, x, weight)[0],
            cpu.spmm(csr_t, y, weight)[0],
            most,
            ties,
            *cpu.spmm_extremum_grad(csr_t, x, weight, most, share, need_x=True, need_weight=True),
            cpu.sddmm(csr, y.unsqueeze(1), x.unsqueeze(1)),
            alpha,
            cpu.edge_softmax_grad(csr, alpha, score),
            cpu.spmm(graph.segments.csr, score, reduce="mul")[0],
            cpu.mul_grad(graph.segments.edge_csr, score, torch.ones(graph.num_rows, 2)),
            cpu.gather_rows(x, graph.edge_index[0]),
        ]

    all_equal(for_each_count(run))


def test_construction_is_the_same():
    edge_index = random_edges(5000, 4000, 300_000, 2)
    in_order = edge_index[:, edge_index[1].argsort(stable=True)].contiguous()

    def run():
        found = []
        for source, target in (edge_index, in_order):
            rowptr, col, edge_id = build.compress(target, source, 4000, torch.int32)
            found += [rowptr, col, torch.empty(0) if edge_id is None else edge_id, torch.tensor(build.minmax(source))]
        graph = Graph.of_pointers(found[0], found[1], 5000, edge_id=found[2])
        found += [*build.transpose(graph.csr), graph.csr.tasks, graph.csr.hubs]
        return [*found, torch.tensor(build.rows_sorted(graph.csr))]

    all_equal(for_each_count(run))


def test_the_threads_are_torchs():
    assert native.threads_runtime() == "openmp (borrowed)"
