"""Failures reach the caller with their message; nothing hangs and nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from stretto import StrettoError
from stretto.dist import launch
from stretto.machine.ranks import own_cores
from tests.conftest import ROOT
from tests.dist.ranks import (
    cores,
    dies_in_one_rank,
    fails_in_one_rank,
    never_ends,
    one_rank_stops_training,
    policies,
    raises_sigterm_in_the_parent,
    sample,
)
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
    assert not ranks_in(tmp_path)


def ranks_in(folder: Path) -> list[Path]:
    """The processes that were told to work in this folder."""
    found = []
    for path in commands():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [path] if str(folder).encode() in path.read_bytes() else []
    return found


def test_cores_are_shared_out_evenly():
    assert [own_cores(rank, 2, {4, 5, 8, 9}) for rank in (0, 1)] == [{4, 5}, {8, 9}]
    assert [own_cores(rank, 2, {0, 1, 2}) for rank in (0, 1)] == [{0}, {1}]
    assert own_cores(3, 4, {0, 1}) == {0, 1}  # fewer cores than ranks: nobody has one to itself


def test_every_rank_keeps_to_its_own_cores():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system does not say on which cores a process may run")
    mine = os.sched_getaffinity(0)
    found = launch(cores, 2, limit=100)
    assert found == [own_cores(rank, 2, mine) for rank in (0, 1)]
    assert os.sched_getaffinity(0) == mine


def test_threads_of_gloo_interrupt_nobody():
    if not (hasattr(os, "SCHED_BATCH") and Path("/proc/self/task").exists()):
        pytest.skip("this system has no batch threads")
    for (of_gloo, of_others), (of_engine, beside_engine) in launch(policies, 2, limit=100):
        assert set(of_gloo) == set(of_engine) == {os.SCHED_BATCH}
        assert set(of_others) == set(beside_engine) == {os.SCHED_OTHER}
        assert len(of_engine) > len(of_gloo) > 0  # the engine has process groups of its own


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


LAUNCH = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from stretto.dist import launch
from tests.dist.ranks import never_ends
launch(never_ends, 2, limit=200)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_launch_that_is_ended_leaves_no_folder_and_no_process(tmp_path, number):
    """The fixture looks at the end; ranks whose parent was killed find out within a second or two."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    ) as launcher:
        until = time.monotonic() + 100
        while len(list(tmp_path.glob("stretto-*/said*"))) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        launcher.send_signal(number)
        status = launcher.wait(20)
    assert status == -number or (number is signal.SIGINT and status == 130)
    if number is signal.SIGTERM:  # at once, not after a while
        assert not list(tmp_path.glob("stretto-*"))
    until = time.monotonic() + 100
    while (list(tmp_path.glob("stretto-*")) or ranks_in(tmp_path)) and time.monotonic() < until:
        time.sleep(0.05)


def test_sigterm_of_a_user_stays_theirs(monkeypatch):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        launch(raises_sigterm_in_the_parent, 1, os.getpid(), limit=100)
        assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    launch(cores, 1, limit=100)
    assert signal.getsignal(signal.SIGTERM) is before
