"""Launches by the driver itself: what it is handed, what it is checked against, and who launches what it refuses."""

import ctypes
import struct
import threading
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

CONFIG = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
INFO = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
SIGNATURE = {"x": "*fp32", "n": "i32", "none": "constexpr", "many": "i64", "beta": "fp32", "BLOCK": "constexpr"}
SIZES = [8, 4, 8, 4, 8, 8]  # and two pointers of Triton's own
FUNCTION = 4711


class Fake:
    """A driver that writes down what it is asked for."""

    def __init__(self, sizes=SIZES, refuse=None):
        self.sizes, self.refuse, self.seen = sizes, refuse, []
        self.cuLaunchKernelEx = CONFIG(self._launch)
        self.cuFuncGetParamInfo = INFO(self._info)

    def _info(self, function, k, offset, size):
        assert function == FUNCTION
        if k >= len(self.sizes):
            return 1
        size[0] = self.sizes[k]
        return 0

    def _launch(self, config, function, parameters, extra):
        if self.refuse == len(self.seen):
            return 201
        assert function == FUNCTION
        assert extra is None
        x, y, z, *threads, shared, _, stream, attributes, count = struct.unpack("8I3Q", ctypes.string_at(config, 56))
        assert threads == [64, 1, 1]
        assert attributes == count == 0
        pointers = struct.unpack("6Q", ctypes.string_at(parameters, 48))
        raw = [ctypes.string_at(p, size) for p, size in zip(pointers, self.sizes, strict=True)]
        given = [struct.unpack(code, data)[0] for code, data in zip("QiqfQQ", raw, strict=True)]
        self.seen.append(((x, y, z), shared, stream, *given[:4]))
        assert given[4:] == [0, 0]
        return 0


def kernel(ran=None, **meta):
    metadata = {"num_warps": 2, "num_ctas": 1, "shared": 1024, "launch_pdl": False, "global_scratch_size": 0} | meta
    return SimpleNamespace(
        metadata=SimpleNamespace(**metadata),
        src=SimpleNamespace(signature=SIGNATURE),
        function=FUNCTION,
        packed_metadata=(),
        run=lambda *args: ran.append(args),
    )


@pytest.fixture
def driver(triton_kernels):
    return import_module("stretto.kernels.triton.driver")


VALUES = [0, -3, None, 1 << 40, 0.5, 128]


def test_parameters_reach_the_kernel_as_they_are(driver):
    fake = Fake()
    known = driver.Driver(fake)
    packed = [
        driver.pack(kernel(), (7, 2), VALUES, [(0, 1, 256)], known),
        driver.pack(kernel(), (9,), VALUES, [(0, 0, 0)], known),
    ]
    burst = driver.Burst(packed, known)
    assert burst.play([1 << 44, 5000], 77) == 2
    assert burst.play([8, 16], 78) == 2
    rest = (-3, 1 << 40, 0.5)
    assert fake.seen == [
        ((7, 2, 1), 1024, 77, 5256, *rest),
        ((9, 1, 1), 1024, 77, 1 << 44, *rest),
        ((7, 2, 1), 1024, 78, 272, *rest),
        ((9, 1, 1), 1024, 78, 8, *rest),
    ]


@pytest.mark.parametrize("sizes", [[8, 4, 8, 4, 8, 8, 8], [8, 8, 8, 4], [8, 4, 8], [8, 4, 8, 4, 4], []])
def test_a_kernel_of_other_parameters_is_left_to_triton(sizes, driver):
    assert driver.pack(kernel(), (1,), VALUES, [], driver.Driver(Fake(sizes))) is None


@pytest.mark.parametrize("meta", [{"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}])
def test_what_needs_more_than_threads_is_left_to_triton(meta, driver):
    assert driver.pack(kernel(**meta), (1,), VALUES, [], driver.Driver(Fake())) is None


def test_other_types_are_left_to_triton(driver, monkeypatch):
    monkeypatch.setitem(SIGNATURE, "beta", "fp16")
    assert driver.pack(kernel(), (1,), VALUES, [], driver.Driver(Fake())) is None


def test_two_threads_do_not_share_memory(driver):
    fake = Fake()
    known = driver.Driver(fake)
    burst = driver.Burst([driver.pack(kernel(), (1,), VALUES, [(0, 0, 0)], known)], known)
    inside, first = threading.Event(), threading.Event()
    plain = burst.launch

    def slow(*args):  # one thread is inside the driver while the other plays
        if threading.current_thread() is not threading.main_thread():
            first.set()
            inside.wait(10)
        return plain(*args)

    burst.launch = slow
    thread = threading.Thread(target=burst.play, args=([1111], 0))
    thread.start()
    assert first.wait(10)
    burst.play([2222], 0)
    inside.set()
    thread.join(10)
    assert sorted(seen[3] for seen in fake.seen) == [1111, 2222]


def test_what_the_driver_refuses_triton_launches(driver, triton_kernels, monkeypatch):
    tape = import_module("stretto.kernels.triton.tape")
    fake, ran = Fake(refuse=1), []
    known = driver.Driver(fake)
    monkeypatch.setattr(driver, "driver", lambda: known)
    row = tape._Row()
    slot = tape.Slot(0, 64, 0, base=0)
    for _ in range(3):
        row.add(kernel(ran), (5,), [tape.Place(slot, 16, (torch.float32, (1,), (1,))), *VALUES[1:]])
    row.finish()
    row.play([1000], 3)
    assert len(fake.seen) == 1
    assert [args[0:4] for args in ran] == [(5, 1, 1, 3)] * 2
    assert all(args[9:] == (1016, *VALUES[1:]) for args in ran)


def test_without_a_driver_triton_launches(driver, triton_kernels, monkeypatch):
    tape = import_module("stretto.kernels.triton.tape")
    monkeypatch.setattr(driver, "driver", lambda: None)
    row, ran = tape._Row(), []
    row.add(kernel(ran), (5,), [1000, *VALUES[1:]])
    row.finish()
    row.play([], 3)
    assert len(ran) == 1
