"""A signature seen before goes straight to its compiled kernel."""

import importlib

import pytest
import torch


class Compiled:
    """Counts its launches."""

    def __init__(self) -> None:
        self.launched: list[tuple] = []

    def __getitem__(self, grid):
        return lambda *values: self.launched.append((grid, values))


class Function:
    """A stand-in for a JIT function: every launch through it is a compilation."""

    device_caches: dict = {}  # noqa: RUF012 -- its presence tells a compiler from the interpreter

    def __init__(self, fn) -> None:
        self.fn = fn
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid):
        def compile_and_run(*args, **kwargs):
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return compile_and_run


@pytest.fixture
def kernel(triton_kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    launch = importlib.import_module("stretto.kernels.triton.launch")
    monkeypatch.setattr(launch, "stream_of", None)  # a stand-in has no stream
    monkeypatch.setattr(launch, "device_now", None)
    monkeypatch.setattr(launch, "start", lambda: None)  # it compiles nothing
    return launch.Kernel(Function(lambda x, n, beta, BLOCK: None))


def test_sizes_share_a_compilation_and_keep_their_order(kernel):
    x = torch.zeros(64)
    for n in (1, 16, 17, 1000):
        kernel[(n,)](x, n, 0.5 * n, BLOCK=4, num_warps=1)
    (compiled,) = kernel.function.compiled
    assert [grid for grid, _ in compiled.launched] == [(16, 1, 1), (17, 1, 1), (1000, 1, 1)]
    assert compiled.launched[-1][1][1:] == (1000, 500.0, 4)


def test_what_the_compiler_tells_apart_is_compiled_anew(kernel):
    x = torch.zeros(64)
    variants = [
        (x, 8, 1.0, 4, 1),
        (x.double(), 8, 1.0, 4, 1),  # type
        (x[1:], 8, 1.0, 4, 1),  # alignment
        (None, 8, 1.0, 4, 1),  # absence
        (x, 2**31, 1.0, 4, 1),  # a 64-bit integer
        (x, 8, 1.0, 8, 1),  # a constant
        (x, 8, 1.0, 4, 2),  # warps
    ]
    for _ in range(2):
        for value, n, beta, block, warps in variants:
            kernel[(1,)](value, n, beta, BLOCK=block, num_warps=warps)
    assert len(kernel.function.compiled) == len(variants)
    assert all(len(c.launched) == 1 for c in kernel.function.compiled)
