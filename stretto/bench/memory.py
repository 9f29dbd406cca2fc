"""How much memory a step needs at its peak: counted from torch's own record of every allocation, not from the process.

Resident memory hides what is reused (kept buffers, an allocator's free lists). So the pool of kept buffers is emptied
and switched off, and the sizes torch's profiler reports for each allocation and release are added up in their order.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stretto.kernels import pool

SWITCH = "STRETTO_POOL_MB"
# What torch's profiler writes to the error stream of a healthy run.
CHATTER = (b"USDT:", b"CPUAllocator.cpp")


def peak_bytes(step: Callable[[], object]) -> int:
    """Bytes in tensors at the peak of a step above those held before it; what is built once is not of the step."""
    with _no_pool():
        step()
        with _without_chatter(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step()
    held = most = 0
    for event in sorted(_allocations(found), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def card_peak_bytes(step: Callable[[], object]) -> int:
    """The same of a step on a card, whose allocator counts for itself."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


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


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Holds the error stream back for the length of the block, then writes it without the profiler's own lines."""
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
            held.seek(0)
            for line in held:
                if not any(text in line for text in CHATTER):
                    os.write(2, line)


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of tensors, counted by their elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
