"""Freed memory stays with the process while some model is accelerated, instead of going back to the system.

glibc maps every large tensor anew and unmaps it when it is freed: a full-graph training step on a few cores spends a
third to a half of its time on page faults, in torch's own operations as in ours. While kept, large blocks come from the
heap, and the heap keeps up to an eighth of the machine's memory free at its top. The price is that the process holds
its largest size (20 to 40 % more than before in the models of `stretto bench models`). STRETTO_MALLOC=leave refuses.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import torch

from stretto import settings

# mallopt's names for what is set, and what glibc itself arrives at in a process with large tensors.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
USUAL = {MMAP_MAX: 65536, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}

_lock = threading.RLock()  # a model may die while the lock is held
_owners: dict[int, weakref.ref[Any]] = {}
_kept = False


class Owner:
    """Whoever wants memory kept and is no model: patch()."""


def keep_for(owner: Any) -> None:
    """Keep freed memory as long as this model (or Owner) lives and is not let go."""
    if settings.get("STRETTO_MALLOC") == "leave" or torch.cuda.is_available():
        return
    with _lock:
        name = id(owner)
        _owners[name] = weakref.ref(owner, lambda _: _drop(name))
        _set(True)


def let_go(owner: Any) -> None:
    """This one no longer wants it; after the last one the allocator works as usual, and free memory goes back."""
    _drop(id(owner))


def _drop(name: int) -> None:
    with _lock:
        _owners.pop(name, None)
        if not _owners and _kept:
            _set(False)
            _libc().malloc_trim(0)


def give_back() -> None:
    """Return what is free to the system now: the next large results are new memory, as in a process that keeps none."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def is_kept() -> bool:
    """Whether freed memory is kept now."""
    return _kept


def switch(kept: bool) -> None:
    """Keep freed memory, or give it back, from now on, whatever models ask for: to measure both."""
    with _lock:
        _set(kept)


def _set(kept: bool) -> None:
    global _kept
    libc = None if kept == _kept else _libc()
    if libc is None:
        return
    wanted = {MMAP_MAX: 0, TRIM_THRESHOLD: _most_kept()} if kept else USUAL
    for name, value in wanted.items():
        libc.mallopt(name, value)
    _kept = kept


def _most_kept() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory // 8, 2**31 - 1)  # mallopt takes an int


def _libc() -> Any:
    """The C library if it is glibc, whose mallopt this is about; else None."""
    libc = ctypes.CDLL(None)
    return libc if all(hasattr(libc, name) for name in ("mallopt", "malloc_trim", "gnu_get_libc_version")) else None
