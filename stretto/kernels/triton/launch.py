"""Launches that cost little: a signature seen before goes straight to its compiled kernel.

Triton's own binder looks at every argument again at each launch, which takes several times as long as a small kernel
runs. Here a signature is what the compiler would tell apart: constants, types, alignment, and whether an integer needs
64 bits; the values of sizes are no part of it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter

# Where torch is built for CUDA: the device and the stream that are current, without the checks around them.
device_now: Any = getattr(torch._C, "_cuda_getDevice", None)
stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Untyped: a launch passes plain values where a kernel is annotated to take constants.
jit: Any = triton.jit

_starting = threading.Lock()


def start() -> None:
    """What Triton does once before it compiles anything, its two halves at once instead of in turn."""
    with _starting:  # threads that compile side by side would all do it
        _started()


@functools.cache
def _started() -> None:
    """Hash Triton's own library, most of a second; meanwhile a C compiler builds what talks to the driver."""
    places = (triton.runtime.cache, triton.compiler.compiler)  # where it lives depends on Triton's version
    hashed = next((place.triton_key for place in places if hasattr(place, "triton_key")), None)
    with ThreadPoolExecutor(1) as pool:
        done = None if hashed is None else pool.submit(hashed)
        triton.runtime.driver.active.get_current_target()
        if done is not None:
            done.result()


class Recorder(threading.local):
    """Who writes down this thread's launches (tape.py), if someone does."""

    tape: Any = None


recorder = Recorder()


class Kernel:
    """A Triton kernel: kernel[grid](*args, **kwargs), constants in capitals by name."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.names: list[str] = list(inspect.signature(function.fn).parameters)
        self.constant = [name.isupper() for name in self.names]
        self.known: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launch(grid, args, kwargs)

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the kernel; compile it if its signature is new."""
        given = [*args, *[kwargs[name] for name in self.names[len(args) :]]]
        tape = recorder.tape
        if interpreted(self):
            if tape is None:
                self.function[grid](*args, **kwargs)
            else:
                with tape.note(self, grid, given, None, kwargs["num_warps"]):
                    self.function[grid](*args, **kwargs)
            return
        values: list[Any] = []
        device = torch.cuda.current_device() if device_now is None else device_now()
        signature: list[Any] = [kwargs["num_warps"], kwargs.get("num_stages"), kwargs.get("maxnreg"), device]
        sign, keep = signature.append, values.append
        for value, constant in zip(given, self.constant, strict=True):
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                address = value.data_ptr()
                sign(value.dtype)
                sign(address & 15 == 0)
                keep(address)  # taken as it is, where a tensor would be examined
                continue
            if constant or value is None:
                sign(value)
            else:
                sign(-(2**31) <= value < 2**31 if kind is int else float)
            keep(value)
        key = tuple(signature)
        compiled = self.known.get(key)
        if compiled is None:
            start()
            self.known[key] = compiled = self.function[grid](*args, **kwargs)
            if tape is not None:
                tape.note(self, grid, given, compiled, kwargs["num_warps"])
            return
        if tape is not None:
            tape.note(self, grid, given, compiled, kwargs["num_warps"])
        whole = (*grid, 1, 1)[:3]
        if stream_of is None:
            compiled[whole](*values)
        else:  # the same, without asking for the device again and for a profiler's hooks
            handle, packed = compiled.function, compiled.packed_metadata
            compiled.run(*whole, stream_of(device), handle, packed, None, None, None, *values)


def call(function: Callable[..., object], *tensors: Tensor) -> None:
    """function(*tensors), which writes to tensors it is given; a tape does the same with others."""
    if recorder.tape is None:
        function(*tensors)
    else:
        with recorder.tape.note(function, (), list(tensors), None, 0):
            function(*tensors)


def interpreted(kernel: Kernel) -> bool:
    """Whether Triton's interpreter runs a kernel: it compiles nothing."""
    return not hasattr(kernel.function, "device_caches")


def kernel(*sizes: str) -> Callable[[Any], Kernel]:
    """Decorator: a kernel whose integer arguments are all run-time values."""
    return lambda fn: Kernel(jit(do_not_specialize=list(sizes))(fn))
