"""Transfer: one asynchronous copy per batch to the device, on a stream of its own.

The host slot is pinned by the engine. The copy of batch i+1 is under way while batch i is trained on; the consumer's
stream waits on an event, never the host. Streams and events come from an object with torch.cuda's functions, so that
the order of calls can be tested without a device.
"""

import ctypes
import itertools
import weakref
from collections import deque
from typing import Any

import torch

from stretto.errors import expect
from stretto.kernels import has_own_memory
from stretto.loader.slot import Slot

Flying = deque[tuple[Any, torch.Tensor]]  # host memory of copies that may not have ended, behind their events
# Also of transfers that are gone: no host memory goes while a copy reads it.
_every: "dict[int, tuple[weakref.ref[Transfer], Flying]]" = {}
_numbers = itertools.count()


def _let_go() -> None:
    """Let the host memory go of copies that have ended since whoever began them is gone."""
    for number, (owner, flying) in list(_every.items()):
        if owner() is None:
            while flying and flying[0][0].query():
                flying.popleft()
            if not flying:
                _every.pop(number, None)


class Transfer:
    """Moves slots to `device`. `backend`: torch.cuda, or something with the same functions."""

    def __init__(self, device: torch.device, backend: Any = None) -> None:
        self.device = device
        self.backend = torch.cuda if backend is None else backend
        self.stream = self.backend.Stream(device)
        self._flying: Flying = deque()
        _every[next(_numbers)] = weakref.ref(self), self._flying

    def start(self, slot: Slot) -> tuple[Slot, Any]:
        """Begin the copy of a slot; it may be used once `arrive` was called with what this returns."""
        _let_go()
        host = slot.memory
        with self.backend.stream(self.stream):
            memory = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
            memory.copy_(host, non_blocking=True)
            event = self.backend.Event()
            event.record(self.stream)
        self._flying.append((event, host))
        slot.move(memory)
        return slot, event

    def arrive(self, slot: Slot, event: Any) -> Slot:
        """Make the current stream wait for the copy, and tell the allocator that it uses the memory."""
        current = self.backend.current_stream(self.device)
        current.wait_event(event)
        slot.memory.record_stream(current)
        while self._flying and self._flying[0][0].query():
            self._flying.popleft()
        return slot

    def finish(self) -> None:
        """Wait for every copy, so that host memory can go."""
        while self._flying:
            self._flying.popleft()[0].synchronize()


def pinning(device: torch.device | None) -> tuple[Any, Any]:
    """cudaHostRegister and cudaHostUnregister, which the engine's threads call without Python; (None, None): no GPU."""
    if device is None or not has_own_memory(device) or not torch.cuda.is_available():
        return None, None
    torch.cuda.init()
    runtime = ctypes.CDLL(None)
    names = ("cudaHostRegister", "cudaHostUnregister")
    if not all(hasattr(runtime, name) for name in names):
        runtime = _cuda_runtime()
    return getattr(runtime, names[0]), getattr(runtime, names[1])


def _cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, by the path the process has it mapped from."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart" in line}
    expect(bool(paths), "NeighborLoader: device='cuda', but the CUDA runtime is not loaded")
    return ctypes.CDLL(sorted(paths)[0])
