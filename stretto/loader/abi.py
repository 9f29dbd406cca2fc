"""Calls of the native sampler: their seeds, their answers, their errors."""

import ctypes as c
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import StrettoError, expect, fail
from stretto.kernels import native, on_host
from stretto.kernels.abi import SEEDS
from stretto.loader import checks

PIN = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_uint)
UNPIN = c.CFUNCTYPE(c.c_int, c.c_void_p)


_capsule = c.PYFUNCTYPE(c.py_object, c.c_void_p, c.c_char_p, c.c_void_p)(("PyCapsule_New", c.pythonapi))
_loaded: Any = None  # looked at once: each batch asks


def library() -> Any:
    """libstretto; says why where it is not there."""
    global _loaded
    _loaded = native.library()
    if _loaded is None:
        fail(f"loader: sampling needs libstretto, which is not loaded: {native.why_not()}")
    return _loaded


def failure(lib: Any) -> StrettoError:
    """What the library says of its last status on this thread."""
    return StrettoError(lib.stretto_error().decode())


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def tensor_of(handle: int) -> Tensor:
    """A slot's memory as bytes. It goes back when the last tensor or array on it is gone, by no Python code: there, an
    exception such as Ctrl-C's would be lost."""
    return torch.from_dlpack(_capsule(_loaded.stretto_slot_tensor(handle), b"dltensor", None))


def _int64(name: str, values: Tensor) -> Tensor:
    """Contiguous, as the native side reads them; nearly always they are."""
    usual = type(values) is Tensor and values.dtype == torch.int64 and values.dim() == 1 and on_host(values)
    return values if usual and values.is_contiguous() else checks.indices("sampler", name, values)


class Call:
    """What one call needs: stretto_seeds with the arrays it points to, and room for the answer. Filled each time."""

    def __init__(self, num_types: int, table_size: int) -> None:
        self._num_types = num_types
        # Addresses of seeds, their counts, addresses of times; 0: none.
        self._words = (c.c_int64 * (3 * num_types))()
        start = c.addressof(self._words)
        self._seeds: Any = SEEDS(0, 0, 0, start, start + 8 * num_types, start + 16 * num_types)
        self._slot = c.c_void_p()
        self._table = (c.c_int64 * table_size)()
        self.seeds, self.slot = c.byref(self._seeds), c.byref(self._slot)

    def fill(
        self, seed: int, epoch: int, batch: int, seeds: Sequence[Tensor | None], times: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Points to these seeds and times, one per node type. What is returned must live until the call is over."""
        struct, words, n = self._seeds, self._words, self._num_types
        struct.seed, struct.epoch, struct.batch = seed & 0xFFFFFFFFFFFFFFFF, epoch, batch
        if len(seeds) != n:
            fail(f"sampler: 'seeds' are of {len(seeds)} node types, wanted {n}")
        inputs = []
        for i, (nodes, at) in enumerate(zip(seeds, times, strict=True)):
            count = words[i] = words[2 * n + i] = 0
            if nodes is not None:
                inputs.append(nodes := _int64("seeds", nodes))
                words[i], count = nodes.data_ptr(), nodes.numel()
            words[n + i] = count
            if at is not None:
                inputs.append(at := _int64("times", at))
                words[2 * n + i] = at.data_ptr()
                expect(count == at.numel(), f"sampler: {count} seeds, but {at.numel()} times")
        return inputs

    def answer(self) -> tuple[int, list[int]]:
        """The slot that came back, and its table."""
        handle = self._slot.value
        assert handle is not None
        _loaded.stretto_slot_table(handle, self._table, len(self._table))
        return handle, self._table[:]
