"""The benchmarks that use a loader: a training epoch, inference, the first batch and the memory of a pass."""

import mmap

import pytest
import torch

from benchmarks.suites import loader_models
from benchmarks.suites.loader_setting import OURS, Setting, make_data

GRAPH = "rmat:9:2000"


@pytest.fixture(scope="module")
def setting():
    torch.set_num_threads(1)
    return Setting(make_data(GRAPH, 8), [4, 3], 32, 2, 1, 2, GRAPH)


@pytest.mark.parametrize("measure", [loader_models.epoch, loader_models.inference])
def test_ours_and_stock_are_timed(setting, measure):
    rows = measure(setting)
    assert {row.candidate for row in rows} >= {OURS}
    assert len({row.candidate for row in rows}) >= 2
    assert all(row.timing.median > 0 and row.work > 0 for row in rows)


def test_first_batch_and_memory_in_processes_of_their_own(setting):
    rows = loader_models.first_batch(setting)
    measures = ("first batch", "memory of a pass", "peak memory, construction included")
    assert [row.measure for row in rows] == [m for m in measures for _ in range(2)]
    assert rows[4].work >= rows[2].work > 0
    assert all(row.timing.median > 0 for row in rows)


def test_memory_of_this_process():
    before, size = loader_models.held_bytes(), 1 << 26
    with mmap.mmap(-1, size) as block:  # not from an allocator, which may have as much at hand
        block.write(b"1" * size)
        assert loader_models.held_bytes() - before > 0.9 * size
