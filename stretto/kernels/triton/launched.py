"""Launches on a tape (kernels/tape.py): compiled kernels, or those of Triton's interpreter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stretto.kernels.tape import Place, Written, patches
from stretto.kernels.triton import driver


class Launched:
    """A kernel, compiled or, where the interpreter runs it, not."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], compiled: Any, warps: int) -> None:
        self.kernel, self.grid, self.compiled, self.warps = kernel, grid, compiled, warps

    def joins(self, last: Any, arguments: list[Any]) -> bool:
        """Whether it goes into the row of launches that it follows."""
        if self.compiled is None or type(last) is not Row:
            return False
        last.add(self, arguments)
        return True

    def part(self, arguments: list[Any], keywords: dict[str, Any]) -> Row | Written:
        """The part of a tape that launches it."""
        if self.compiled is None:
            return Written(self._interpret).part(arguments, keywords)
        row = Row()
        row.add(self, arguments)
        return row

    def _interpret(self, *arguments: Any) -> None:
        self.kernel.function[self.grid](*arguments, num_warps=self.warps)


class Row:
    """Compiled kernels, launched one after the other: by the driver itself where it can, else by Triton's launcher."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.packed: list[driver.Packed] = []
        self.burst: driver.Burst | None = None

    def add(self, what: Launched, arguments: list[Any]) -> None:
        """One more."""
        values = [v.data_ptr() if isinstance(v, Tensor) else 0 if isinstance(v, Place) else v for v in arguments]
        compiled, places = what.compiled, patches(arguments)
        whole = (*what.grid, 1, 1)[:3]
        self.launches.append((compiled.run, *whole, compiled.function, compiled.packed_metadata, values, places))
        known = driver.driver()
        packed = None if known is None else driver.pack(compiled, whole, values, places, known)
        self.packed += [] if packed is None else [packed]

    def finish(self) -> None:
        """No more will follow."""
        known = driver.driver()
        if known is not None and len(self.packed) == len(self.launches):
            self.burst = driver.Burst(self.packed, known)

    def play(self, base: list[int]) -> None:
        """Launch all of them; base: the addresses that places are relative to."""
        stream = 0 if driver.stream_of is None else driver.stream_of(driver.device_now())
        done = 0 if self.burst is None else self.burst.play(base, stream)
        if done == len(self.launches):
            return
        # What the driver refused Triton launches, or says why not: a thread new to the device has no context yet.
        for run, x, y, z, handle, packed, values, places in self.launches[done:]:
            args = values.copy()
            for at, slot, offset in places:
                args[at] = base[slot] + offset
            run(x, y, z, stream, handle, packed, None, None, None, *args)
