"""Failures reach the caller with their message; nothing hangs and nothing is left behind."""

import tempfile
from pathlib import Path

import pytest
import torch

from stretto import StrettoError
from stretto.dist import launch
from tests.dist.ranks import dies_in_one_rank, fails_in_one_rank, never_ends, one_rank_stops_training, sample
from tests.graphs import symmetric_edges


def commands():
    """The command lines of all processes, where the system shows them."""
    return list(Path("/proc").glob("[0-9]*/cmdline"))


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """No folder and no process after a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("stretto-*"))
    running = [path.read_bytes() for path in commands() if path.exists()]
    assert not any(str(tmp_path).encode() in command for command in running)


@pytest.mark.parametrize(
    ("function", "message"),
    [(fails_in_one_rank, "rank 1: ValueError: no such column: 'price'"), (dies_in_one_rank, "rank 1 .*signal 9")],
)
def test_a_failed_rank_is_told(function, message):
    with pytest.raises(StrettoError, match=message):
        launch(function, 2, limit=100, timeout=60)


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(StrettoError, match="2 ranks did not end within 1 s"):
        launch(never_ends, 2, limit=1)


def test_a_rank_that_stops_is_not_waited_for_for_ever():
    data = sample(symmetric_edges(20, 40), 20, 4, 3, torch.float32)
    with pytest.raises(StrettoError, match=r"rank 0: .*exchange of layer 1, step 1, forward, (failed|did not end)"):
        launch(one_rank_stops_training, 2, data, torch.arange(20) // 10, limit=100)


def test_what_cannot_travel_is_told():
    with pytest.raises(StrettoError, match="cannot be given their arguments"):
        launch(never_ends, 2, lambda: None)
    with pytest.raises(StrettoError, match="'ranks' is 0"):
        launch(never_ends, 0)
    assert Path(tempfile.gettempdir()).exists()
