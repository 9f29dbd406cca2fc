"""Compiled kernels launched in a row by CUDA's own driver.

Triton's launcher takes a tuple of arguments apart at every launch. Where launches are known beforehand (tape.py), their
arguments lie packed in memory: a few addresses are filled in, all at once, and the driver is called with pointers. What
the driver is to be handed is checked against what it knows of the compiled kernel; where it knows nothing, or launches
ask for more than threads and shared memory, Triton's launcher stays.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WORD = 8  # bytes kept for a parameter; the driver reads as many of them as it has
SPARE = 2  # pointers to scratch memory that Triton may add to a kernel's parameters, unused by ours
FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}

# CUlaunchConfig of cuLaunchKernelEx.
CONFIG = np.dtype(
    [
        *((name, np.uint32) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared", "_")),
        ("stream", np.uint64),
        ("attributes", np.uint64),
        ("count", np.uint64),
    ]
)


class Driver:
    """The two functions of the driver that are needed."""

    def __init__(self, library: Any) -> None:
        self.launch = library.cuLaunchKernelEx
        self.parameter = library.cuFuncGetParamInfo

    def sizes(self, function: int) -> list[int]:
        """Bytes of every parameter of a compiled kernel."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found: list[int] = []
        while len(found) < 256:
            at = ctypes.c_size_t(len(found))
            if self.parameter(ctypes.c_void_p(function), at, ctypes.byref(offset), ctypes.byref(size)) != 0:
                break
            found.append(size.value)
        return found


@functools.cache
def driver() -> Driver | None:
    """The driver, or None where it is not here or too old to be asked."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


@dataclass
class Packed:
    """A launch as the driver takes it: parameters in words, and (word, base, offset) of the places among them."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    words: list[int]
    patches: list[tuple[int, int, int]]


def pack(compiled: Any, grid: tuple[int, ...], values: Sequence[Any], patches: Any, known: Driver) -> Packed | None:
    """A launch with these arguments, constants among them, or None: Triton's to launch. patches: as in Packed."""
    meta = compiled.metadata
    extras = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if getattr(meta, "num_ctas", 1) != 1 or any(getattr(meta, name, 0) for name in extras):
        return None
    kinds = list(compiled.src.signature.values())
    if len(kinds) != len(values):
        return None
    words: list[int] = []
    sizes: list[int] = []
    where: dict[int, int] = {}
    for k, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if kind == "constexpr":
            continue
        pointer = kind.startswith("*")
        if not pointer and kind not in FORMATS:
            return None
        data = struct.pack("Q" if pointer else FORMATS[kind], value)
        where[k] = len(words)
        words.append(int.from_bytes(data, "little"))
        sizes.append(len(data))
    expected = known.sizes(compiled.function)
    spare = expected[len(sizes) :]
    if expected[: len(sizes)] != sizes or len(spare) > SPARE or any(size != WORD for size in spare):
        return None
    whole = (*grid, 1, 1)
    return Packed(
        compiled.function,
        (whole[0], whole[1], whole[2]),
        32 * meta.num_warps,
        meta.shared,
        words + [0] * len(spare),
        [(where[k], base, offset) for k, base, offset in patches],
    )


class Burst:
    """Launches one after the other."""

    def __init__(self, launches: Sequence[Packed], known: Driver) -> None:
        self.launch = known.launch
        self.launches = launches
        first = np.cumsum([0, *(len(one.words) for one in launches)])
        self.first = [int(at) for at in first[:-1]]
        self.words = np.array([word for one in launches for word in one.words], np.uint64)
        patches = [
            (at + k, base, offset)
            for at, one in zip(self.first, launches, strict=True)
            for k, base, offset in one.patches
        ]
        self.at, self.base = (np.array([p[k] for p in patches], np.int64) for k in range(2))
        self.offset = np.array([p[2] for p in patches], np.uint64)
        self.idle: list[_Memory] = []  # of no thread; taken and given back in one step each

    def play(self, bases: Sequence[int], stream: int) -> int:
        """Launch all of them, places filled in; how many were launched: fewer where the driver refused one."""
        try:
            memory = self.idle.pop()
        except IndexError:
            memory = _Memory(self)
        memory.words[self.at] = np.array(bases, np.uint64)[self.base] + self.offset
        if memory.stream != stream:
            memory.configs["stream"] = memory.stream = stream
        launch = self.launch
        for k, (config, function, parameters) in enumerate(memory.calls):
            if launch(config, function, parameters, None):
                self.idle.append(memory)
                return k
        self.idle.append(memory)
        return len(memory.calls)


class _Memory:
    """What the driver reads during one play: parameters, pointers to each, and configurations."""

    def __init__(self, burst: Burst) -> None:
        self.words = burst.words.copy()
        self.pointers = np.arange(len(self.words), dtype=np.uint64) * WORD + np.uint64(self.words.ctypes.data)
        self.configs = np.zeros(len(burst.launches), CONFIG)
        self.stream = 0
        self.calls = []
        for k, (one, at) in enumerate(zip(burst.launches, burst.first, strict=True)):
            config = self.configs[k : k + 1]
            config["x"], config["y"], config["z"] = one.grid
            config["threads"], config["threads_y"], config["threads_z"], config["shared"] = (
                one.threads,
                1,
                1,
                one.shared,
            )
            places = (config.ctypes.data, one.function, self.pointers.ctypes.data + WORD * at)
            self.calls.append(tuple(ctypes.c_void_p(place) for place in places))
