"""Engine: native threads that prepare submitted batches ahead of their reader."""

import ctypes as c
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stretto.errors import fail
from stretto.lifetime import Owned, living
from stretto.loader import checks
from stretto.loader.abi import failure, library
from stretto.loader.native_sampler import NativeSampler
from stretto.loader.slot import Slot


class Engine:
    """Threads that prepare submitted batches ahead of their reader; see csrc/sampler/engine.h."""

    def __init__(
        self, sampler: NativeSampler, *, threads: int, memory: int, pin: Any = None, unpin: Any = None
    ) -> None:
        checks.count("engine", "threads", threads, 1, checks.MOST_THREADS)
        checks.count("engine", "memory", memory, 1)
        lib = library()
        self.sampler, self._lib = sampler, lib
        callbacks = [None if f is None else c.cast(f, c.c_void_p) for f in (pin, unpin)]
        handle = lib.stretto_engine_create(sampler.handle, threads, memory, *callbacks)
        if not handle:
            raise failure(lib)
        self.handle = handle
        # Filled for every submission, and for every answer: an engine has one reader.
        self._asked, self._answered = sampler.borrow(), sampler.borrow()
        self._owned: Owned | None = Owned(lib.stretto_engine_destroy, handle, sampler, pin, unpin)

    def close(self) -> None:
        """Stop the threads and let the batches go that wait."""
        self._owned = None

    @property
    def alive(self) -> bool:
        """Whether it is not closed."""
        return self._owned is not None and self._owned.alive

    def _open(self) -> Any:
        """The engine's handle; an error once it is closed."""
        if self._owned is None or self._owned.number not in living:
            fail("engine: used after it was closed")
        return self.handle

    def submit(
        self, seed: int, epoch: int, batch: int, seeds: Sequence[Tensor | None], times: Sequence[Tensor | None]
    ) -> None:
        handle, call = self._open(), self._asked
        inputs = call.fill(seed, epoch, batch, seeds, times)
        if self._lib.stretto_engine_submit(handle, call.seeds) < 0:
            raise failure(self._lib)
        del inputs  # the engine has copied them

    def next(self) -> Slot:
        """The next batch in order of submission. Wakes ten times a second, so that Ctrl-C is heard."""
        while (slot := self.poll(100)) is None:
            pass
        return slot

    def poll(self, milliseconds: int = 0) -> Slot | None:
        """The next batch if it is ready within that time."""
        if type(milliseconds) is not int or milliseconds < 0:
            checks.count("engine", "milliseconds", milliseconds)
        status = self._lib.stretto_engine_next(self._open(), milliseconds, self._answered.slot)
        if status < 0:
            raise failure(self._lib)
        return Slot(self.sampler, *self._answered.answer()) if status else None

    def cancel(self) -> None:
        library().stretto_engine_cancel(self._open())

    def state(self) -> dict[str, int]:
        """Bytes waiting, bytes kept for reuse, the most of the first so far, and batches prepared."""
        values = (c.c_int64 * 4)()
        library().stretto_engine_state(self._open(), values)
        return dict(zip(("waiting", "kept", "peak", "prepared"), values, strict=True))
