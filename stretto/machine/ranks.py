"""Ranks on this machine: one process each, joined by gloo; their results, or the message of the one that failed.

The processes run run_rank below, not the caller's script, so that no script needs a guard. Function, arguments and
results travel by pickle, in files that these processes write themselves, in a folder that nobody else may enter: their
modules must be importable. Whatever happens, no process and no file is left behind: SIGTERM ends the ranks first, and
ranks whose parent or folder is gone end themselves and remove what they find.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import expect, fail
from stretto.memory import allocator

logger = logging.getLogger("stretto")

Rows = list[tuple[int, Tensor]]  # peer, tensor
LIMIT = 300.0  # seconds until ranks that do not end are ended
# What a process starts with: the caller's places to import from, before anything is imported.
ENTRY = """import pickle, sys
with open(sys.argv[1] + "/path.pickle", "rb") as file:
    sys.path[:] = pickle.load(file)
from stretto.machine.ranks import run_rank
run_rank(*sys.argv[1:])"""
POLL, GRACE = 0.02, 0.5  # seconds between looks, and for other ranks' messages after the first failure


def launch(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    limit: float = LIMIT,
    timeout: float = 60.0,
    threads: int = 1,
) -> list[Any]:
    """function(*args) in `ranks` processes with a process group; their results by rank.

    limit: seconds for all of it. timeout: seconds that torch.distributed waits for another rank. threads: of each rank.
    """
    expect(ranks >= 1, f"launch: 'ranks' is {ranks}, wanted 1 or more")
    expect(dist.is_available() and dist.is_gloo_available(), "launch: this torch has no torch.distributed with gloo")
    if function.__module__ == "__main__":
        fail(f"launch: {function.__qualname__} is in the script itself, where other processes cannot import it")
    with _sigterm_noted() as noted, tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        try:
            Path(folder, "path.pickle").write_bytes(pickle.dumps(sys.path))
            torch.save((function, args, timeout, threads), Path(folder, "inputs.pt"))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            fail(f"launch: the ranks cannot be given their arguments: {error}")
        return _Ranks(Path(folder), ranks, noted).results(time.monotonic() + limit, limit)


@contextmanager
def _sigterm_noted() -> Iterator[list[int]]:
    """SIGTERM, where nobody handles it, is noted in the list, and ends this process once the block has cleaned up."""
    noted: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield noted
        return
    signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if noted:
            signal.raise_signal(signal.SIGTERM)


class _Ranks:
    def __init__(self, folder: Path, count: int, noted: list[int]) -> None:
        self.folder, self.count, self.noted = folder, count, noted
        self.children: list[subprocess.Popen[bytes]] = []

    def results(self, deadline: float, limit: float) -> list[Any]:
        command = [sys.executable, "-c", ENTRY, str(self.folder), str(self.count), str(os.getpid())]
        try:
            for rank in range(self.count):
                with open(self.folder / f"said{rank}", "wb") as said:
                    child = subprocess.Popen([*command, str(rank)], stdin=subprocess.DEVNULL, stdout=said, stderr=said)
                self.children.append(child)
            while any(child.poll() is None for child in self.children):
                if any(child.returncode for child in self.children):
                    time.sleep(GRACE)
                    break
                if self.noted:
                    fail("launch: SIGTERM has come")
                if time.monotonic() > deadline:
                    fail(f"launch: {self.count} ranks did not end within {limit:g} s")
                time.sleep(POLL)
            self._complain()
            return [torch.load(self.folder / f"result{r}.pt", weights_only=False) for r in range(self.count)]
        finally:
            for child in self.children:
                child.kill()
                child.wait()

    def _complain(self) -> None:
        """Raise what went wrong first: a rank that died without a word, else the earliest message."""
        ended = [child.poll() for child in self.children]
        told = {r: self.folder / f"error{r}.pickle" for r in range(self.count)}
        for rank, status in enumerate(ended):
            if status and not told[rank].exists():
                said = (self.folder / f"said{rank}").read_text(errors="replace").strip().splitlines()
                how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                fail(f"rank {rank} {how}" + (f": {said[-1]}" if said else ""))
        errors = [(*pickle.loads(path.read_bytes()), rank) for rank, path in told.items() if path.exists()]
        if errors:
            _, message, rank = min(errors)
            fail(f"rank {rank}: {message}")


def _end_with(parent: int, folder: Path) -> None:
    """End this process when its parent is gone, or has gone on without it."""
    while not _alone(parent, folder):
        time.sleep(1.0)
    os._exit(1)


def _alone(parent: int, folder: Path) -> bool:
    """Whether nobody waits for this rank any more; then what is left of the folder goes."""
    if os.getppid() == parent and folder.exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def own_cores(rank: int, ranks: int, cores: set[int]) -> set[int]:
    """The cores that a rank keeps to: an even share of them, or all where there are fewer than ranks."""
    each = len(cores) // ranks
    return set(sorted(cores)[rank * each : (rank + 1) * each]) or cores


def _settle(rank: int, ranks: int) -> None:
    """Keep this process and all its threads to its own cores.

    A rank that wakes up when a message comes is put where the sender runs, and two ranks on one core take turns of
    some milliseconds: more than an exchange takes.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, own_cores(rank, ranks, os.sched_getaffinity(0)))


def run_rank(place: str, count: str, parent: str, number: str) -> None:
    """What each of the processes does."""
    folder, rank = Path(place), int(number)
    _settle(rank, int(count))  # before any thread is made: threads start with their maker's cores
    threading.Thread(target=_end_with, args=(int(parent), folder), daemon=True).start()
    try:
        function, args, timeout, threads = torch.load(folder / "inputs.pt", weights_only=False)
        torch.set_num_threads(threads)
        allocator.switch(True)  # nobody waits in every step for memory that the system clears anew
        wait = timedelta(seconds=timeout)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=int(count), timeout=wait)
        calm_gloo()
        torch.save(function(*args), folder / f"result{rank}.pt")
        dist.barrier()  # a rank that leaves early would close connections that others still read from
        dist.destroy_process_group()
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        if not _alone(int(parent), folder):
            beside = folder / f"error{rank}.tmp"
            beside.write_bytes(pickle.dumps((time.monotonic(), message)))
            beside.rename(folder / f"error{rank}.pickle")
        sys.stdout.flush()
        os._exit(1)  # threads that wait for other ranks must not keep this one


def swap(sends: Rows, receives: Rows, *, group: dist.ProcessGroup | None = None, tag: int = 0) -> None:
    """Send and receive at once, and wait for all of it."""
    handles = [dist.irecv(tensor, peer, group=group, tag=tag) for peer, tensor in receives]
    handles += [dist.isend(tensor, peer, group=group, tag=tag) for peer, tensor in sends]
    for handle in handles:
        if handle is not None:
            handle.wait()


def calm_gloo() -> int:
    """Let gloo's threads that there are now interrupt nobody; how many there are.

    While a message is handed over under a lock, gloo's thread asks for that lock again and again without sleeping.
    Where a message that comes in wakes it up on the core of the thread that holds the lock, it runs for a whole turn of
    the scheduler, milliseconds, before the holder can go on. As a batch thread it waits until the core is free or its
    turn comes (Linux 6.18, two cores, a training step of two ranks: 7 ms so, 16 to 20 ms otherwise). As an idle thread
    it is no faster, and never has a turn where other programs keep the cores busy: 62 ms instead of 24.
    """
    count = 0
    for comm in Path("/proc/self/task").glob("*/comm"):
        try:
            if hasattr(os, "SCHED_BATCH") and comm.read_text().startswith("gloo"):
                os.sched_setscheduler(int(comm.parent.name), os.SCHED_BATCH, os.sched_param(0))
                count += 1
        except OSError as error:  # a thread that has ended meanwhile, or a system that does not allow it
            logger.debug("stretto: thread %s stays as it is: %s", comm.parent.name, error)
    return count
