"""Large arrays read at random places live in large pages, where the system lends them.

With pages of 4 KiB every row of a large x is a miss of the processor's table of pages, and on a virtual machine a dear
one: in pages of 2 MiB gathering is 10 to 20 % faster. Contents and addresses stay as they are. Only Linux has this, and
only where its administrator has not said "never"; STRETTO_PAGES=leave refuses.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto import settings

PAGE = 2 << 20
LEAST = 2 * PAGE  # a smaller array has too few whole pages to matter
USES = 3  # an array is moved (which copies it once) when it is read the third time
MOST_REMEMBERED = 4096

_HUGEPAGE, _COLLAPSE = 14, 25  # madvise's numbers: large pages from now on; and for what is already there
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")
_lock = threading.Lock()
_uses: dict[tuple[int, int], int] = {}


def read_at_random(*arrays: Tensor | None) -> None:
    """Count one use of each array by a kernel that gathers its rows; the third moves it into large pages."""
    for x in arrays:
        if x is not None and x.numel() * x.element_size() >= LEAST:
            _count_use(x)


def _count_use(x: Tensor) -> None:
    storage = x.untyped_storage()
    key = (storage.data_ptr(), storage.nbytes())
    uses = _uses.get(key, 0)
    if uses >= USES:
        return
    with _lock:
        if len(_uses) >= MOST_REMEMBERED:
            _uses.clear()
        _uses[key] = uses + 1
    if uses + 1 == USES and _madvise() is not None and _is_own_memory(key[0]):
        enlarge(*key)


def _is_own_memory(address: int) -> bool:
    """Whether it belongs to no file: to move a mapped file would mean to read all of it."""
    for line in _MAPS.read_text().splitlines():
        ends, _, _, _, inode, *_ = line.split()
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= address < last:
            return inode == "0"
    return False


def enlarge(address: int, nbytes: int) -> None:
    """Ask for large pages for the whole ones of [address, address + nbytes). A refusal changes nothing."""
    madvise = _madvise()
    first, length = _whole_pages(address, nbytes)
    if madvise is None or nbytes < LEAST or length <= 0:
        return
    if madvise(first, length, _HUGEPAGE) == 0:
        madvise(first, length, _COLLAPSE)


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Where the large pages inside [address, address + nbytes) begin, and their bytes."""
    first = -(-address // PAGE) * PAGE
    return first, (address + nbytes) // PAGE * PAGE - first


def written_at_random(*arrays: Tensor | None) -> None:
    """Let arrays that nobody has touched yet come in large pages, when they are written."""
    madvise = _madvise()
    for x in arrays:
        if x is not None and madvise is not None and x.nbytes >= LEAST:
            madvise(*_whole_pages(x.data_ptr(), x.nbytes), _HUGEPAGE)


def read_here_and_there(file: Tensor) -> None:
    """Of a mapped file that memory cannot hold, read the pages that are asked for and nothing around them."""
    if sys.platform != "linux" or 2 * file.nbytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return
    first = file.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _libc_madvise()(first, file.data_ptr() + file.nbytes - first, mmap.MADV_RANDOM)


@functools.cache
def _madvise() -> Any:
    if settings.get("STRETTO_PAGES") == "leave" or not _SWITCH.exists():
        return None
    if "[never]" in _SWITCH.read_text():
        return None
    return _libc_madvise()


@functools.cache
def _libc_madvise() -> Any:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
