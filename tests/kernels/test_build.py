"""Building a CSR: sorted by counting, transposed, cut into tasks; against torch.sort on every graph of the zoo."""

import pytest
import torch

from stretto import Graph
from stretto.kernels import build, native
from tests.graphs import ZOO, random_edges

pytestmark = pytest.mark.usefixtures("needs_native")


@pytest.fixture(params=["native", "torch"])
def sorter(request, monkeypatch):
    """Both ways to build: the library's, and torch's for when there is none."""
    if request.param == "torch":
        monkeypatch.setattr(build, "is_native", lambda tensor: False)
    Graph.cache_clear()
    yield request.param
    Graph.cache_clear()  # a graph built by torch has no tasks, and would be found again by its content


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("given", [torch.int32, torch.int64], ids=["from int32", "from int64"])
@pytest.mark.parametrize("name", ZOO)
def test_compress(name, given, index, sorter):
    edge_index, (_, num_dst) = ZOO[name]()
    source, target = edge_index.to(given)
    rowptr, col, edge_id = build.compress(target, source, num_dst, index)
    order = torch.sort(target.long(), stable=True).indices
    assert torch.equal(rowptr.diff(), torch.bincount(target, minlength=num_dst))
    assert rowptr[0] == 0
    assert torch.equal(col, source[order].to(index))
    assert (edge_id is None) == bool((target.diff() >= 0).all())
    if edge_id is not None:
        assert torch.equal(edge_id, order.to(index))
    only_order = build.compress(target, None, num_dst, index)
    assert only_order[1] is None
    assert torch.equal(only_order[0], rowptr)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [33, 65_537, 400_000])
def test_compress_in_several_chunks(count, threads):
    torch.set_num_threads(threads)
    target, source = torch.randint(0, 5000, (count,)), torch.randint(0, 2**31 - 1, (count,))
    rowptr, col, edge_id = build.compress(target, source, 5000, torch.int32)
    order = torch.sort(target, stable=True).indices
    assert torch.equal(rowptr.diff(), torch.bincount(target, minlength=5000))
    assert torch.equal(edge_id, order.int())
    assert torch.equal(col, source[order].int())


@pytest.mark.parametrize("name", ZOO)
def test_transpose(name, sorter):
    edge_index, (num_src, num_dst) = ZOO[name]()
    graph = Graph.of(edge_index, (num_src, num_dst))
    rowptr, col, edge_id = build.transpose(graph.csr)
    assert torch.equal(rowptr.diff(), torch.bincount(edge_index[0], minlength=num_src))
    rows = torch.repeat_interleave(torch.arange(num_src), rowptr.diff())
    assert torch.equal(edge_index[:, edge_id.long()], torch.stack([rows, col.long()]))
    keys = rows * max(num_dst, 1) + col
    assert (keys.diff() >= 0).all()


def test_minmax(sorter):
    for dtype in (torch.int32, torch.int64):
        index = torch.randint(-1000, 1000, (200_000,)).to(dtype)
        assert build.minmax(index) == (int(index.min()), int(index.max()))
        assert build.minmax(index[:0]) == (0, -1)
        assert build.minmax(index[::3]) == (int(index[::3].min()), int(index[::3].max()))
    assert build.minmax(torch.tensor([2**40, -(2**40)])) == (-(2**40), 2**40)


@pytest.mark.parametrize("name", ZOO)
def test_tasks_cover_every_row_and_edge_once(name):
    edge_index, sizes = ZOO[name]()
    csr = Graph.of(edge_index, sizes).csr
    rows, edges, slots = torch.zeros(csr.num_rows), torch.zeros(csr.num_edges), []
    for row_begin, row_end, begin, end, slot in csr.tasks.tolist():
        edges[begin:end] += 1
        assert end - begin <= 2 * build.LEAST_GRAIN + int(csr.rowptr.diff().max())
        if slot < 0:
            rows[row_begin:row_end] += 1
            assert (begin, end) == (int(csr.rowptr[row_begin]), int(csr.rowptr[row_end]))
        else:
            assert row_end == row_begin + 1
            assert end - begin <= build.LEAST_GRAIN
            slots.append((row_begin, slot))
    for row, first, last in csr.hubs.tolist():
        rows[row] += 1
        assert [s for r, s in slots if r == row] == list(range(first, last))
    assert rows.eq(1).all()
    assert edges.eq(1).all()
    assert csr.num_slots == len(slots)
    assert (csr.num_slots > 0) == (name == "hub")


def test_a_large_graph_is_cut_into_a_bounded_number_of_tasks():
    csr = Graph.of(random_edges(1000, 1000, 3_000_000), 1000).csr
    assert 100 < csr.tasks.size(0) <= 2 * build.MOST_TASKS


def test_bad_arguments_become_errors():
    with pytest.raises(ValueError, match="instruction set 'mmx' is not available"):
        native.set_isa("mmx")
    with pytest.raises(ValueError, match="dtype 9"):
        native.call("stretto_sddmm_add", 0, 9, 0, 0, 1, 0, 1)
    with pytest.raises(ValueError, match="row_bytes 12"):
        native.call("stretto_gather_ceiling", 0, 12, 0, 0, 0, 1, 0)
