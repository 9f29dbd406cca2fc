"""The engine in bad company: breaks, exceptions, Ctrl-C, exit, fork, many loaders, little memory, slow readers."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections import deque

import pytest
import torch

from stretto.errors import StrettoError
from stretto.loader import NeighborLoader
from stretto.loader.abi import PIN, UNPIN
from stretto.loader.engine import Engine
from stretto.loader.native_sampler import Sampling, Slice
from tests.loader.data import check, homogeneous
from tests.loader.graphs import awkward, sampler


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    """A shell that starts the tests in the background has them ignore Ctrl-C, and every process they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch_geometric.data import Data
from stretto.loader import NeighborLoader
g = torch.Generator().manual_seed(0)
data = Data(x=torch.randn(20000, 64), edge_index=torch.randint(0, 20000, (2, 400000), generator=g))
loader = NeighborLoader(data, [10, 10], batch_size=256, num_threads=2)
"""


def run(body: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=timeout)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def settle(wanted: int) -> int:
    """Threads of this process, once those that are ending have ended."""
    for _ in range(100):
        if threads() <= wanted:
            break
        time.sleep(0.02)
    return threads()


def test_break_drop_and_continue():
    data = homogeneous()
    loader = NeighborLoader(data, [4, 3], batch_size=16, num_threads=2)
    for _ in range(20):
        for i, batch in enumerate(loader):
            check(batch, data)
            if i == 2:
                break
    assert sum(b.batch_size for b in loader) == 300
    iterator = iter(loader)
    next(iterator)
    del loader  # the iterator keeps what it needs
    assert sum(b.batch_size for b in iterator) == 284


def test_two_hundred_loaders_leave_no_threads_and_no_memory():
    data = homogeneous()
    list(NeighborLoader(data, [4, 3], batch_size=50, num_threads=3))
    gc.collect()
    before = threads()
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * page

    used = 0
    for i in range(200):
        loader = NeighborLoader(data, [4, 3], batch_size=50, num_threads=3)
        iterator = iter(loader)
        next(iterator)
        if i % 2:
            list(iterator)
        del loader, iterator
        if i == 40:
            used = resident()
    gc.collect()
    assert settle(before) <= before
    assert resident() - used < 32 << 20


def test_close_stops_the_threads_and_iterating_starts_new_ones():
    loader = NeighborLoader(homogeneous(), [4], batch_size=50, num_threads=3)
    before = threads()
    list(loader)
    loader.close()
    assert settle(before) <= before
    assert sum(b.batch_size for b in loader) == 300


def test_exception_in_the_loop_body_leaves_the_loader_usable():
    data = homogeneous()
    loader = NeighborLoader(data, [4], batch_size=50)
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in loader]
    assert sum(b.batch_size for b in loader) == 300


def test_exit_in_the_middle_of_an_epoch():
    done = run("it = iter(loader); kept = [next(it) for _ in range(3)]; raise RuntimeError('mine')")
    assert done.returncode == 1
    assert "RuntimeError: mine" in done.stderr
    assert "Fatal" not in done.stderr


@pytest.mark.slow
def test_exit_by_sys_exit_and_by_the_end_of_the_script():
    done = run("it = iter(loader); next(it); print('leaving')")
    assert (done.returncode, done.stdout.strip()) == (0, "leaving"), done.stderr
    done = run("for b in loader:\n    sys.exit(3)")
    assert done.returncode == 3, done.stderr


def test_ctrl_c_is_heard_while_waiting_and_the_loader_survives():
    body = """
slow = NeighborLoader(data, [-1, -1], input_nodes=torch.arange(20000), batch_size=20000, num_threads=1)
try:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    while True:
        for b in slow: pass
except KeyboardInterrupt:
    print('heard')
assert sum(b.batch_size for b in loader) == 20000
print('alive')
"""
    done = run(body)
    assert done.stdout.split() == ["heard", "alive"], done.stderr


def test_letting_a_batch_go_runs_no_python():
    """An exception raised there would be lost, Ctrl-C's too."""
    loader = NeighborLoader(homogeneous(), [4, 3], batch_size=16)
    x = [next(iter(loader)).x]
    called = []
    sys.setprofile(lambda frame, event, arg: called.append(event))
    x.clear()
    sys.setprofile(None)
    assert "call" not in called


def test_forked_child_makes_its_own_threads():
    body = """
it = iter(loader); next(it)
child = os.fork()
if child == 0:
    total = sum(b.batch_size for b in loader)
    os._exit(0 if total == 20000 else 1)
assert os.waitpid(child, 0)[1] == 0
assert sum(b.batch_size for b in it) == 20000 - 256
child = os.fork()
if child == 0:
    del it, loader      # letting go in the child must not wait for threads that are not there
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print('both')
"""
    done = run(body)
    assert done.stdout.strip() == "both", done.stderr


def test_engine_refuses_to_work_across_a_fork():
    edge_index, n = awkward("random")
    engine = Engine(sampler(edge_index, n, [3]), threads=1, memory=1 << 20)
    engine.submit(0, 0, 0, [torch.arange(3)], [None])
    child = os.fork()
    if child == 0:
        try:
            engine.next()
        except StrettoError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.next().num_nodes() >= 3


def test_a_bad_batch_is_an_error_in_its_turn_and_the_others_arrive():
    edge_index, n = awkward("random")
    engine = Engine(sampler(edge_index, n, [3]), threads=2, memory=1 << 20)
    for i in range(6):
        seeds = torch.tensor([n + 5 if i == 3 else i])
        engine.submit(0, 0, i, [seeds], [None])
    for i in range(6):
        if i == 3:
            with pytest.raises(StrettoError, match=f"seed {n + 5} is not a node"):
                engine.next()
        else:
            assert engine.next().n_id()[0] == i
    with pytest.raises(StrettoError, match="no batch was submitted"):
        engine.next()


def test_memory_is_bounded_in_bytes_while_the_reader_sleeps():
    edge_index, n = awkward("random")
    native = sampler(edge_index, n, [10, 10], slices=[Slice(torch.randn(n, 1000))])
    size = native.sample(0, 0, 0, [torch.arange(100)], [None]).table[1]
    limit = 4 * size
    engine = Engine(native, threads=3, memory=limit)
    for i in range(40):
        engine.submit(0, 0, i, [torch.arange(100)], [None])
    time.sleep(0.3)
    prepared = engine.state()["prepared"]
    assert 1 <= prepared < 10  # the rest waits for room
    for _ in range(40):
        engine.next()
        assert engine.state()["waiting"] <= limit
    assert engine.state()["peak"] <= 1.05 * limit
    assert engine.state()["kept"] <= limit
    tiny = Engine(native, threads=3, memory=1)
    for i in range(5):
        tiny.submit(0, 0, i, [torch.arange(100)], [None])
    assert [tiny.next().num_nodes() > 0 for _ in range(5)] == [True] * 5


def places(engine: Engine, count: int, *, hold: int, ahead: int = 3, rest: float = 0.0) -> set[int]:
    """Where `count` batches lay for a reader that holds the last `hold`, with `ahead` submitted at any time."""
    found, held, submitted = set(), deque(maxlen=hold), 0
    for done in range(count):
        while submitted < min(done + ahead, count):
            engine.submit(0, 0, submitted, [torch.arange(100)], [None])
            submitted += 1
        held.append(engine.next())
        found.add(held[-1].table[0])
        time.sleep(rest)
    return found


def thick(n_threads: int = 2) -> Engine:
    """An engine whose batches are all of one size, nearly all of it features."""
    edge_index, n = awkward("random")
    native = sampler(edge_index, n, [-1], slices=[Slice(torch.randn(n, 1000))])
    return Engine(native, threads=n_threads, memory=1 << 28)


@pytest.mark.parametrize("rest", [0.0, 0.005])
def test_a_loop_that_holds_one_batch_takes_memory_for_one_more_than_threads(rest):
    assert len(places(thick(), 60, hold=1, rest=rest)) <= 3


def test_a_reader_that_keeps_batches_gets_memory_for_them():
    assert len(places(thick(), 60, hold=5)) <= 7
    engine = thick()
    for i in range(12):
        engine.submit(0, 0, i, [torch.arange(100)], [None])
    kept = [engine.next() for _ in range(12)]
    assert len({slot.table[0] for slot in kept}) == 12


def test_batches_submitted_ahead_have_memory_while_the_reader_is_away():
    engine = thick()
    for i in range(8):
        engine.submit(0, 0, i, [torch.arange(100)], [None])
    for _ in range(100):
        if engine.state()["prepared"] >= 7:
            break
        time.sleep(0.02)
    assert engine.state()["prepared"] >= 7  # one less than were asked for: the last waits for what the reader lets go


def test_threads_that_wait_for_memory_stop_at_once():
    for _ in range(20):
        engine, held = thick(3), []
        for i in range(4):
            engine.submit(0, 0, i, [torch.arange(100)], [None])
        held.append(engine.next())
        time.sleep(0.01)  # by now they have sampled what is left and wait for a slot
        engine.cancel()
        engine.submit(0, 0, 7, [torch.arange(100)], [None])
        assert engine.next().n_id()[:100].equal(torch.arange(100))
        engine.close()


def test_a_sleeping_reader_costs_no_cpu_time():
    loader = NeighborLoader(homogeneous(), [4], batch_size=20, num_threads=2)
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.2)
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.1


def test_slots_are_pinned_once_and_unpinned_at_the_end():
    calls: list[tuple[str, int]] = []
    pin = PIN(lambda address, size, flags: calls.append(("pin", address)) or 0)
    unpin = UNPIN(lambda address: calls.append(("unpin", address)) or 0)
    edge_index, n = awkward("random")
    engine = Engine(sampler(edge_index, n, [3], Sampling.EDGE_ID), threads=1, memory=1 << 24, pin=pin, unpin=unpin)
    for i in range(20):
        engine.submit(0, 0, i, [torch.arange(50)], [None])
        engine.next()
    assert 1 <= sum(kind == "pin" for kind, _ in calls) <= 3  # reused, not pinned for every batch
    held = None
    engine.submit(0, 0, 0, [torch.arange(50)], [None])
    held = engine.next()
    engine.close()
    with pytest.raises(StrettoError, match="closed"):
        engine.next()
    assert held.n_id()[3] == 3  # still valid after the engine is gone
    del held
    gc.collect()
    pinned = [address for kind, address in calls if kind == "pin"]
    unpinned = [address for kind, address in calls if kind == "unpin"]
    assert sorted(pinned) == sorted(unpinned)


def test_interrupt_is_not_lost_on_worker_threads():
    """Workers block signals: SIGINT always reaches the interpreter."""
    loader = NeighborLoader(homogeneous(), [4], batch_size=20, num_threads=4)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT) or time.sleep(1)
    assert len(list(iterator)) == 14
