"""Ctrl-C at a random moment of a loop over a loader is always heard, and never falls into what lets objects go."""

import ctypes
import gc
import weakref

import pytest
import torch

from stretto import Graph
from stretto.kernels import native
from stretto.lifetime import Owned, popped_from

LOOPS = """
import os, random, signal, sys, threading, time, traceback
import torch, stretto
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from stretto.loader import NeighborLoader

count, moments = int(sys.argv[1]), random.Random(3)
torch.set_num_threads(1)
data = Data(x=torch.randn(2000, 4), edge_index=torch.randint(2000, (2, 20000)), edge_weight=torch.rand(20000))
model = stretto.accelerate(GCNConv(4, 3))
lost, fell_into = [], []
sys.unraisablehook = lambda what: fell_into.append(f"{what.exc_type.__name__} in {what.object!r}")
begun, heard, done = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

def interrupt():
    for number in range(count):
        begun.acquire()
        time.sleep(moments.random() / 50)
        os.kill(os.getpid(), signal.SIGINT)
        if not heard.acquire(timeout=30):  # a slow machine is no fault
            frame = sys._current_frames()[threading.main_thread().ident]
            lost.append((number, "".join(traceback.format_stack(frame))))
            break
    done.set()

def loops(number):
    kept = NeighborLoader(data, [5, 5], batch_size=256, num_threads=2)
    while not done.is_set():
        loader = NeighborLoader(data, [5, 5], batch_size=256, num_threads=2) if number % 2 else kept
        for i, batch in enumerate(loader):
            model(batch.x, batch.edge_index, batch.edge_weight).sum().backward()
            if i == number % 7:
                break

threading.Thread(target=interrupt, daemon=True).start()
for number in range(count):
    try:
        begun.release()
        loops(number)
    except KeyboardInterrupt:
        torch.set_grad_enabled(True)  # torch leaves it off where an interrupt falls into no_grad's own __enter__
        heard.release()
print(lost, fell_into)
"""


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_every_interrupt_is_heard(run_python, count):
    if native.library() is None:
        pytest.skip(native.why_not())
    finished = run_python(LOOPS.replace("sys.argv[1]", str(count)), STRETTO_TUNE="off")
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.splitlines()[-1] == "[] []"


def test_a_table_loses_what_goes():
    class Thing:
        pass

    table = {}
    first, second = Thing(), Thing()
    table["first"] = popped_from(table, "first", first)
    table["second"] = popped_from(table, "second", second)
    del first
    assert list(table) == ["second"]
    number = Graph.of(torch.tensor([[0], [1]]), 2).number
    Graph.cache_clear()
    gc.collect()
    with pytest.raises(ValueError, match=f"graph {number} is gone"):
        Graph.numbered(number)


def test_a_native_object_goes_once_and_before_what_it_uses():
    """Dropped, in a circle or not; a C function's calls are noted by a Python one that stands for it."""
    log = []

    class Memory:
        pass

    def memory(name):
        made = Memory()
        weakref.finalize(made, log.append, f"memory {name}")
        return made

    noted = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda handle: log.append(f"handle {handle}"))
    noted.argtypes = (ctypes.c_void_p,)
    owned = Owned(noted, 1 << 40, memory("a"))
    assert owned.alive
    assert not log
    owned = None
    assert log == [f"handle {1 << 40}", "memory a"]
    log.clear()
    circle = [Owned(noted, 7, memory("b"))]
    circle.append(circle)
    del circle
    gc.collect()
    assert owned is None
    assert log == ["handle 7", "memory b"]
