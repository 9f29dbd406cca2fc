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

from stretto.memory import pool

# What torch's profiler writes to the error stream of a healthy run.
CHATTER = (b"USDT:", b"CPUAllocator.cpp")


def peak_bytes(step: Callable[[], object]) -> int:
    """Bytes in tensors at the peak of a step above those held before it; what is built once is not of the step."""
    with unpooled():
        step()
        with _without_chatter(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
            step()
    saved = maximum = 0
    for event in sorted(_allocations(result), key=lambda e: e.start_ns()):
        saved += event.nbytes()
        maximum = max(maximum, saved)
    return maximum


def card_peak_bytes(step: Callable[[], object]) -> int:
    """The same of a step on a card, whose allocator counts for itself."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def _allocations(record: Any) -> list[Any]:
    return [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]


@contextmanager
def unpooled() -> Iterator[None]:
    """Every result in memory of its own: what a pool keeps would be counted as taken and never given back."""
    plain = pool.limit
    pool.clear()
    pool.limit = lambda: 0
    try:
        yield
    finally:
        pool.limit = plain


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Holds the error stream back for the length of the block, then writes it without the profiler's own lines."""
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as saved:
        os.dup2(saved.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
            saved.seek(0)
            for line in saved:
                if not any(text in line for text in CHATTER):
                    os.write(2, line)


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of tensors, counted by their elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
