"""How much memory a step needs at its peak: counted from torch's own record of every allocation, not from the process.

Resident memory hides what is reused (kept buffers, an allocator's free lists). So the pool of kept buffers is emptied
and switched off, and the sizes torch's profiler reports for each allocation and release are added up in their order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stretto.kernels import pool

SWITCH = "STRETTO_POOL_MB"


def peak_bytes(step: Callable[[], object]) -> int:
    """Bytes in tensors at the peak of a step above those held before it; what is built once is not of the step."""
    with _no_pool():
        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step()
    held = most = 0
    for event in sorted(_allocations(found), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _allocations(found: Any) -> list[Any]:
    return [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]


@contextmanager
def _no_pool() -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    pool.clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of tensors, counted by their elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
