"""Launches recorded once and played again with other tensors.

What a layer launches depends on the signature of its inputs alone (shapes, strides, types, alignment). To find that out
costs the host ten times as much as to launch it. A tape keeps the launches themselves, and for every tensor among their
arguments where its address comes from: an input, a result, or scratch memory, whose places are planned so that what is
dead makes room. Nothing of an earlier call is read again but the graph's own arrays.

Recorded is only what can be played: a function that touches data by anything but our kernels has no tape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.kernels.csr import Csr
from stretto.kernels.triton import driver, launch

ALIGN = 256  # bytes: what torch's allocator gives, so that a kernel compiled for a tensor of its own fits
playing = True  # whether tapes are recorded and played
TRIES = 3  # recordings of a signature; the first calls may still make what the graph keeps
MOST = 256  # tapes kept together

aten: Any = torch.ops.aten
EMPTY = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}

Maybe = Tensor | None


@dataclass(eq=False)
class Slot:
    """Memory that launches refer to: input `number`, or an array made while recording. first, last: uses."""

    start: int
    size: int
    number: int = -1
    first: int = -1
    last: int = -1
    result: bool = False
    offset: int = 0  # in the scratch memory
    base: int = -1  # which of the addresses of a play it is relative to

    def holds(self, address: int) -> bool:
        return self.start <= address < self.start + self.size


@dataclass
class Place:
    """A tensor inside a slot."""

    slot: Slot
    offset: int
    like: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


def span(t: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if t.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) * t.element_size()


class _Watch(TorchDispatchMode):
    """Tells a tape of every array that torch makes, and of everything torch does to data."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.tape.launching:
            return out
        if func.overloadpacket in EMPTY:
            self.tape.slots.append(Slot(out.data_ptr(), span(out)))
        elif not any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments):
            self.tape.playable = False  # neither an empty array nor a view
        return out


class Tape:
    """The launches of one function. play(inputs) does what the recorded call did, with other inputs."""

    def __init__(self, inputs: Sequence[Maybe]) -> None:
        self.playable = True
        self.settled = True  # a later call will launch the same
        self.ready = False
        self.launching = False
        first = {id(t): k for k, t in reversed(list(enumerate(inputs))) if t is not None and t.numel()}
        self.slots = [
            Slot(t.data_ptr(), span(t), k) for k, t in enumerate(inputs) if first.get(id(t)) == k and t is not None
        ]
        ends = sorted((s.start, s.start + s.size) for s in self.slots)
        if any(one[1] > other[0] for one, other in itertools.pairwise(ends)):
            self.playable = False  # which of two inputs an address belongs to would be a guess
        self.notes: list[tuple[Any, tuple[int, ...], list[Any], Any, int]] = []
        self.fixed: list[Tensor] = []  # what is no input and was there before: the graph's arrays, kept alive

    # ---- recording ----

    def note(self, kernel: Any, grid: tuple[int, ...], given: list[Any], compiled: Any, warps: int) -> Tape:
        """One launch, as it happens. As a context: what Triton's interpreter does by means of torch does not count."""
        places = [self._place(v) if isinstance(v, Tensor) else v for v in given]
        self.notes.append((kernel, grid, places, compiled, warps))
        return self

    def __enter__(self) -> None:
        self.launching = True

    def __exit__(self, *error: object) -> None:
        self.launching = False

    def _place(self, t: Tensor) -> Place | Tensor:
        address = t.data_ptr()
        for slot in reversed(self.slots):  # memory that was freed and taken again: the newest counts
            if t.numel() and slot.holds(address):
                slot.last = len(self.notes)
                slot.first = slot.last if slot.first < 0 else slot.first
                return Place(slot, address - slot.start, (t.dtype, tuple(t.shape), t.stride()))
        self.fixed.append(t)
        return t

    def finish(self, results: Sequence[Maybe], inputs: Sequence[Maybe]) -> None:
        """Plan the memory."""
        self.count = len(inputs)
        self.results: list[int | None] = []  # which address of a play each result has
        self.made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        for slot in self.slots:
            slot.base = slot.number
        for t in results:
            if t is None:
                self.results.append(None)
                continue
            made = [s for s in self.slots if s.start == t.data_ptr() and s.number < 0 and not s.result]
            if not made or made[-1].size != span(t) or not t.is_contiguous() or t.numel() == 0:
                return
            slot = made[-1]
            slot.result, slot.base = True, self.count + len(self.made)
            self.results.append(len(self.made))
            self.made.append((tuple(t.shape), t.stride(), t.dtype))
            self.device = t.device
        scratch = [s for s in self.slots if s.number < 0 and not s.result and s.first >= 0]
        self.room = plan(scratch)
        for slot in scratch:
            slot.base = self.count + len(self.made)
        if self.playable and self.made:
            self._compile()
            self.ready = True

    def _compile(self) -> None:
        """The launches as a play walks through them; what has no compiled kernel is called with tensors."""
        self.parts: list[_Row | _Call] = []
        for kernel, grid, given, compiled, warps in self.notes:
            if compiled is None:
                self.parts.append(_Call(kernel, grid, given, warps))
                continue
            if not self.parts or not isinstance(self.parts[-1], _Row):
                self.parts.append(_Row())
            self.parts[-1].add(compiled, grid, given)  # type: ignore[union-attr]
        for part in self.parts:
            if isinstance(part, _Row):
                part.finish()

    # ---- playing ----

    def play(self, inputs: Sequence[Maybe], addresses: list[int]) -> list[Maybe]:
        """What the recorded function returned, for other inputs of the same signature, at these addresses."""
        empty, device = torch.empty_strided, self.device  # takes the host half as long as torch.empty
        made = [empty(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in self.made]
        rest = [empty((self.room,), (1,), dtype=torch.uint8, device=device)] if self.room else []
        base = [*addresses, *[t.data_ptr() for t in made], *[t.data_ptr() for t in rest]]
        stream = 0 if launch.stream_of is None else launch.stream_of(device.index)
        for part in self.parts:
            if part.__class__ is _Row:
                part.play(base, stream)
            else:
                part.call([*inputs, *made, *rest])  # type: ignore[union-attr]
        return [None if k is None else made[k] for k in self.results]


class _Row:
    """Compiled kernels, launched one after the other: by the driver itself where it can, else by Triton's launcher."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.packed: list[driver.Packed] = []
        self.burst: driver.Burst | None = None

    def add(self, compiled: Any, grid: tuple[int, ...], given: list[Any]) -> None:
        """One more."""
        values = [v.data_ptr() if isinstance(v, Tensor) else 0 if isinstance(v, Place) else v for v in given]
        patches = [(k, v.slot.base, v.slot.offset + v.offset) for k, v in enumerate(given) if isinstance(v, Place)]
        whole = (*grid, 1, 1)[:3]
        self.launches.append((compiled.run, *whole, compiled.function, compiled.packed_metadata, values, patches))
        known = driver.driver()
        packed = None if known is None else driver.pack(compiled, whole, values, patches, known)
        self.packed += [] if packed is None else [packed]

    def finish(self) -> None:
        """No more will follow."""
        known = driver.driver()
        if known is not None and len(self.packed) == len(self.launches):
            self.burst = driver.Burst(self.packed, known)

    def play(self, base: list[int], stream: int) -> None:
        """Launch all of them; base: the addresses that places are relative to."""
        done = 0 if self.burst is None else self.burst.play(base, stream)
        if done == len(self.launches):
            return
        # What the driver refused Triton launches, or says why not: a thread new to the device has no context yet.
        for run, x, y, z, handle, packed, values, patches in self.launches[done:]:
            args = values.copy()
            for at, slot, offset in patches:
                args[at] = base[slot] + offset
            run(x, y, z, stream, handle, packed, None, None, None, *args)


@dataclass
class _Call:
    """A function of torch's, or a kernel under Triton's interpreter."""

    kernel: Any
    grid: tuple[int, ...]
    given: list[Any]
    warps: int

    def call(self, bases: list[Maybe]) -> None:
        """With the tensors that places stand for; bases: what they are relative to."""
        values = [_at(bases[v.slot.base], v) if isinstance(v, Place) else v for v in self.given]
        if self.grid:
            self.kernel.function[self.grid](*values, num_warps=self.warps)
        else:
            self.kernel(*values)


def _at(base: Maybe, place: Place) -> Tensor:
    """The tensor of a place, inside the tensor it is relative to."""
    dtype, shape, stride = place.like
    assert base is not None
    at = place.offset + place.slot.offset
    if base.dtype == torch.uint8 and dtype != torch.uint8:
        return base[at : at + place.slot.size - place.offset].view(dtype).as_strided(shape, stride, None)
    return base.as_strided(shape, stride, base.storage_offset() + at // base.element_size())


def plan(slots: list[Slot]) -> int:
    """Give every slot its offset, so that those alive together lie apart; the bytes needed. Large ones choose first."""
    placed: list[Slot] = []
    for slot in sorted(slots, key=lambda s: -s.size):
        at = 0
        for other in sorted(
            (p for p in placed if p.first <= slot.last and slot.first <= p.last), key=lambda p: p.offset
        ):
            if at + slot.size <= other.offset:
                break
            at = max(at, math.ceil((other.offset + other.size) / ALIGN) * ALIGN)
        slot.offset = at
        placed.append(slot)
    return max((s.offset + s.size for s in placed), default=0)


def record(function: Callable[..., Sequence[Maybe]], inputs: Sequence[Maybe]) -> tuple[Sequence[Maybe], Tape]:
    """Run the function; its results, and its tape, which is `ready` if it can be played."""
    tape = Tape(inputs)
    before, launch.recorder.tape = launch.recorder.tape, tape
    try:
        with _Watch(tape):
            results = function(*inputs)
    finally:
        launch.recorder.tape = before
    tape.finish(results, inputs)
    return results, tape


def run(
    tapes: dict[Any, Any], key: Hashable, function: Callable[..., Sequence[Maybe]], inputs: Sequence[Maybe]
) -> Sequence[Maybe]:
    """function(*inputs), which depends on nothing else but key: recorded the second time, played from then on.

    tapes: where they are kept, with the graph whose arrays they read (`kept_with`), or those of no graph (GENERAL).
    """
    if not playing or launch.recorder.tape is not None:  # somebody watches every kernel, or it is part of a larger one
        return function(*inputs)
    device = None if launch.device_now is None else launch.device_now()
    addresses = [0 if t is None else t.data_ptr() for t in inputs]
    signs = [
        None if t is None else (t.shape, t.stride(), t.dtype, address & 15)
        for t, address in zip(inputs, addresses, strict=True)
    ]
    signature: tuple[Any, ...] = (key, device, *signs)
    given = [id(t) for t in inputs if t is not None]
    if len(set(given)) < len(given):  # which are the same tensor again
        signature = (*signature, tuple(given.index(one) for one in given))
    known = tapes.get(signature, 0)
    if known.__class__ is Tape:
        return known.play(inputs, addresses)
    if known > TRIES:
        return function(*inputs)
    if len(tapes) >= MOST:  # sizes that change all the time: start afresh
        tapes.clear()
    tapes[signature] = known + 1
    if known == 0 or not _here(inputs, device):
        return function(*inputs)
    results, tape = record(function, inputs)
    if tape.ready:
        tapes[signature] = tape
    elif not tape.settled:
        tapes[signature] = known
    return results


def recording() -> bool:
    """Whether this thread's launches are written down."""
    return launch.recorder.tape is not None


def unsettled() -> None:
    """What is launched now is still being chosen: not to be written down, but to be tried again."""
    if launch.recorder.tape is not None:
        launch.recorder.tape.playable = launch.recorder.tape.settled = False


def kept_with(csr: Csr) -> dict[Any, Any]:
    """The tapes of a graph."""
    tapes = csr.cache.get("tapes")
    if tapes is None:
        tapes = csr.cache["tapes"] = {}
    return tapes


GENERAL: dict[Any, Any] = {}


def _here(inputs: Sequence[Maybe], device: int | None) -> bool:
    """Whether all inputs are on the device whose stream launches go to."""
    return all(t is None or t.device.index == device or t.device.type == "cpu" for t in inputs)
