"""Large results are written into memory that an earlier result of about the same size has left.

A fresh buffer costs a page fault every 4 KiB, and the system takes it back when it is freed: a training step would pay
for the same pages again and again, more than a narrow kernel itself costs. So a bounded number of bytes is kept.
Buffers come in sizes an eighth of an octave apart: sampled batches, no two of one size, share them too. A buffer is
used again only when nothing else refers to it: no tensor, view, saved gradient or NumPy array.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from stretto import settings
from stretto.memory import pages
from stretto.recording import recorder

CPU = torch.device("cpu")
LEAST = 1 << 20  # smaller buffers come out of the allocator's own free lists

# How many owners a storage has. Without it (a torch that renamed it) every buffer is a fresh one.
_use_count = getattr(torch._C, "_storage_Use_Count", None)
_lock = threading.Lock()
_kept: OrderedDict[int, Any] = OrderedDict()  # storage address -> storage, the least recently given out first
_size_of: dict[int, int] = {}  # storage address -> bytes it was made with; a user may resize what he was given
_of_size: dict[int, list[int]] = {}  # bytes -> addresses of the kept storages that have as many
_bytes = 0


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU. Its memory may be that of a former result."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LEAST or _use_count is None or recorder.program is not None:
        return torch.empty(shape, dtype=dtype, device=CPU)
    size = size_class(nbytes)
    with _lock:
        for address in list(_of_size.get(size, ())):
            if _idle(address):
                if _kept[address].nbytes() != size:  # its last user gave the memory back (PyG's GroupAddRev does)
                    _drop(address, size)
                    continue
                _kept.move_to_end(address)
                return _view(_kept[address], shape, dtype)
        if not _make_room(size):
            return torch.empty(shape, dtype=dtype, device=CPU)
        fresh = torch.empty(size, dtype=torch.uint8, device=CPU).untyped_storage()
        _keep(fresh, size)
        return _view(fresh, shape, dtype)


def _view(storage: Any, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor on the beginning of a storage."""
    tensor: Tensor = torch.empty(0, dtype=dtype, device=CPU).set_(storage, 0, shape)  # type: ignore[call-overload]
    return tensor


def size_class(nbytes: int) -> int:
    """The bytes of the buffer that serves a result of nbytes: the next of eight sizes between two powers of two."""
    step = 1 << max((nbytes - 1).bit_length() - 4, 0)
    return -(-nbytes // step) * step


def kept_bytes() -> int:
    """Bytes the pool refers to, in use or not: never more than the limit."""
    return _bytes


def in_use() -> int:
    """How many of the kept buffers somebody refers to."""
    with _lock:
        return sum(not _idle(address) for address in _kept)


def holds(storage: Any) -> bool:
    """Whether a storage is one of the kept ones."""
    return storage._cdata in _kept


def clear() -> None:
    """Give up every kept buffer; those in use live on with their tensors."""
    global _bytes
    with _lock:
        _kept.clear()
        _size_of.clear()
        _of_size.clear()
        _bytes = 0


def limit() -> int:
    """Bytes that may be kept: STRETTO_POOL_MB, or a sixteenth of the machine's memory."""
    if settings.get("STRETTO_POOL_MB"):
        return settings.integer("STRETTO_POOL_MB") << 20
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16


def _idle(address: int) -> bool:
    """Whether the pool alone holds it: no tensor in C++, no second name in Python, no other process."""
    storage = _kept[address]
    # The names: the pool's, this function's, getrefcount's. Not handed in as an argument: where torch.compile watches
    # frames, a call of one Python function by another keeps one name more, and no buffer would ever seem idle.
    return _use_count(address) == 1 and sys.getrefcount(storage) <= 3 and not storage.is_shared()  # type: ignore[misc]


def _make_room(nbytes: int) -> bool:
    """Let go of idle buffers until one of nbytes fits under the limit; whether it does."""
    room = limit()
    for address in list(_kept) if nbytes <= room else ():
        if _bytes + nbytes <= room:
            break
        if _idle(address) or _kept[address].is_shared():
            _drop(address, _size_of[address])
    return _bytes + nbytes <= room


def _drop(address: int, size: int) -> None:
    global _bytes
    _of_size[size].remove(address)
    del _kept[address], _size_of[address]
    _bytes -= size


def _keep(storage: Any, nbytes: int) -> None:
    global _bytes
    pages.enlarge(storage.data_ptr(), nbytes)
    _kept[storage._cdata] = storage
    _size_of[storage._cdata] = nbytes
    _of_size.setdefault(nbytes, []).append(storage._cdata)
    _bytes += nbytes
