"""Freed memory is kept while something is accelerated, and the allocator is itself again afterwards."""

import gc
import textwrap

import pytest
import torch
from torch_geometric.nn import GCN

import stretto
from stretto.memory import allocator

glibc = pytest.mark.skipif(allocator._libc() is None, reason="the C library is not glibc")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the allocator is left alone")
pytestmark = [glibc, no_gpu]


@pytest.fixture(autouse=True)
def _usual():
    """Models of other tests may still live: what they asked for is forgotten."""
    for name in list(allocator._owners):
        allocator._drop(name)
    yield
    for name in list(allocator._owners):
        allocator._drop(name)


def _fail_while_kept():
    assert allocator.is_kept()
    raise ZeroDivisionError


def test_the_doors_switch_it_on_and_off():
    one, two = GCN(4, 8, 2, 3), GCN(4, 8, 2, 3)
    assert not allocator.is_kept()
    stretto.accelerate(one)
    stretto.accelerate(two)
    stretto.restore(one)
    assert allocator.is_kept()  # the other still runs
    stretto.restore(two)
    assert not allocator.is_kept()
    with pytest.raises(ZeroDivisionError), stretto.accelerated(one):
        _fail_while_kept()
    assert not allocator.is_kept()
    stretto.patch()
    assert allocator.is_kept()
    stretto.unpatch()
    assert not allocator.is_kept()


def test_a_model_that_is_gone_wants_nothing():
    model = stretto.accelerate(GCN(4, 8, 2, 3))
    assert allocator.is_kept()
    del model
    gc.collect()
    assert not allocator.is_kept()


def test_what_has_no_layer_of_ours_changes_nothing():
    stretto.accelerate(torch.nn.Linear(2, 2))
    assert not allocator.is_kept()


def test_it_can_be_refused(monkeypatch):
    monkeypatch.setenv("STRETTO_MALLOC", "leave")
    stretto.accelerate(GCN(4, 8, 2, 3))
    assert not allocator.is_kept()
    monkeypatch.setenv("STRETTO_MALLOC", "perhaps")
    with pytest.raises(stretto.StrettoError, match="STRETTO_MALLOC"):
        stretto.accelerate(GCN(4, 8, 2, 3))


def test_large_tensors_stop_faulting_and_free_memory_goes_back(run_python):
    """Counted in a process of its own: page faults of a large tensor made again and again, and resident memory."""
    program = """
        import resource, torch
        from stretto.memory import allocator

        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(4):
                torch.ones(24 << 20)  # 96 MiB
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1])

        usual = faults()
        owner = allocator.Owner()
        allocator.keep_for(owner)
        faults()
        kept, held = faults(), resident()
        allocator.let_go(owner)
        freed = held - resident()
        print(usual > 10000, kept < 1000, freed > 20000, faults() > 10000)
    """
    done = run_python(textwrap.dedent(program))
    assert done.stdout.split() == ["True"] * 4, done.stderr
