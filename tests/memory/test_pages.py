"""Large pages: memory is moved, contents and addresses are not, and only what is large and used again."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto import Graph, ops
from stretto.memory import pages

ROWS = 3 * pages.PAGE // 4


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(pages, "_uses", {})
    pages._madvise.cache_clear()
    yield
    pages._madvise.cache_clear()


def large_bytes(x: torch.Tensor) -> int:
    """Bytes of x's mapping that lie in large pages."""
    address = x.data_ptr() + x.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def lent() -> bool:
    """Whether this system gives large pages at all: a page of our own is asked for."""
    probe = torch.ones(4 * pages.PAGE)
    pages.enlarge(probe.data_ptr(), probe.nbytes)
    return large_bytes(probe) > 0


def test_the_third_use_moves_the_array_and_keeps_its_contents():
    if not lent():
        pytest.skip("this system lends no large pages")
    memory = mmap.mmap(-1, 16 * ROWS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # torch's may lie in large pages
    x = torch.frombuffer(memory, dtype=torch.float32).view(ROWS, 4).normal_()
    before, address = x.clone(), x.data_ptr()
    for _ in range(pages.USES - 1):
        pages.read_at_random(x)
    moved_early = large_bytes(x)
    pages.read_at_random(x)
    assert large_bytes(x) >= moved_early + pages.PAGE
    assert x.data_ptr() == address
    assert torch.equal(x, before)


def test_what_is_to_be_written_comes_in_large_pages():
    if not lent():
        pytest.skip("this system lends no large pages")
    memory = mmap.mmap(-1, 16 * ROWS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    x = torch.frombuffer(memory, dtype=torch.float32)
    pages.written_at_random(x, None, torch.empty(3))
    assert large_bytes(x) == 0
    x.fill_(1.0)
    assert large_bytes(x) >= pages.PAGE


def test_results_stay_the_same_over_the_move():
    n = 1 << 17
    torch.manual_seed(0)
    graph = Graph.of(torch.randint(n, (2, 4 * n)), n)
    x = torch.randn(n, 16)
    wanted = ops.spmm(graph, x)
    for _ in range(pages.USES + 1):
        assert torch.equal(ops.spmm(graph, x), wanted)


@pytest.mark.parametrize(("size", "count"), [(pages.LEAST // 4, 1), (pages.LEAST // 4 - 1, 0)])
def test_small_arrays_are_not_counted(size, count):
    pages.read_at_random(torch.zeros(size), None)
    assert len(pages._uses) == count


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(pages, "MOST_REMEMBERED", 2)
    kept = [torch.zeros(pages.LEAST // 4) for _ in range(5)]
    for x in kept:
        pages.read_at_random(x)
        assert len(pages._uses) <= 2


def test_a_mapped_file_is_left_alone(monkeypatch, tmp_path):
    moved = []
    monkeypatch.setattr(pages, "enlarge", lambda *where: moved.append(where))
    size = pages.LEAST // 4
    mapped = torch.from_numpy(np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(size,)))
    own = torch.zeros(size)
    for _ in range(pages.USES + 2):
        pages.read_at_random(mapped, own)
    assert moved == ([(own.data_ptr(), own.nbytes)] if pages._madvise() is not None else [])


def test_it_can_be_refused(monkeypatch):
    monkeypatch.setenv("STRETTO_PAGES", "leave")
    assert pages._madvise() is None
    x = torch.ones(4 * pages.PAGE)
    pages.enlarge(x.data_ptr(), x.nbytes)
    assert torch.equal(x, torch.ones(4 * pages.PAGE))
