"""Calls of kernels recorded once and played again with other tensors, on a processor and on a card alike.

What a layer calls depends on the signature of its inputs alone (shapes, strides, types, alignment). To find that out
costs the host ten times as much as to call it. A tape keeps the calls themselves (launches of Triton's kernels, calls
into libstretto, operations of torch that write where they are told to), and for every tensor among their arguments
where its address comes from: an input, a result, or scratch memory, whose places are planned so that what is dead makes
room. Nothing of an earlier call is read again but the graph's own arrays.

Recorded is only what can be played: a function that touches data by anything else has no tape.
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

from stretto.kernels import pool
from stretto.kernels.csr import Csr
from stretto.kernels.recording import recorder

ALIGN = 256  # bytes: what torch's allocator gives, so that a kernel compiled for a tensor of its own fits
# Where torch is built for CUDA: the device that is current, without the checks around it.
device_now: Any = getattr(torch._C, "_cuda_getDevice", None)
playing = True  # whether tapes are recorded and played
TRIES = 3  # recordings of a signature; the first calls may still make what the graph keeps
UNRECORDED = 3  # calls before the first recording: the third use of an array may move it into large pages
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
    like: Any = None  # type, shape and strides of an input or a result
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

    def found(self, scratch: int, views: dict[torch.dtype, int]) -> Found:
        """Where a play finds it. scratch: the number of the scratch memory; views: its views by type, which follow."""
        dtype, shape, stride = self.like
        at = (self.slot.offset + self.offset) // dtype.itemsize
        if self.slot.base < scratch:
            whole = self.offset == 0 and self.like == self.slot.like
            return Found(self.slot.base, whole, shape, stride, at)
        return Found(scratch + 1 + views.setdefault(dtype, len(views)), False, shape, stride, at)


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

    def __init__(self, inputs: Sequence[Maybe], beside: object = None) -> None:
        self.beside = beside  # where it will be kept
        self.playable = True
        self.settled = True  # a later call will launch the same
        self.ready = False
        self.launching = False
        first = {id(t): k for k, t in reversed(list(enumerate(inputs))) if t is not None and t.numel()}
        self.slots = [
            Slot(t.data_ptr(), span(t), k, like=(t.dtype, tuple(t.shape), t.stride()))
            for k, t in enumerate(inputs)
            if first.get(id(t)) == k and t is not None
        ]
        ends = sorted((s.start, s.start + s.size) for s in self.slots)
        if any(one[1] > other[0] for one, other in itertools.pairwise(ends)):
            self.playable = False  # which of two inputs an address belongs to would be a guess
        self.notes: list[tuple[Any, list[Any], dict[str, Any]]] = []  # what is called, and with what
        self.fixed: list[object] = []  # what is no input and was there before: the graph's arrays, kept alive

    # ---- recording ----

    def note(self, what: Any, arguments: Sequence[Any], keywords: dict[str, Any] | None = None) -> Tape:
        """One call, as it happens. As a context: what Triton's interpreter does by means of torch does not count.

        what: makes the part of the tape that plays it, by part(arguments, keywords), Places where tensors were.
        """
        places = [self._place(v) if isinstance(v, Tensor) else v for v in arguments]
        named = {k: self._place(v) if isinstance(v, Tensor) else v for k, v in (keywords or {}).items()}
        self.notes.append((what, places, named))
        return self

    def keep(self, *owners: object) -> None:
        """These live as long as the tape, but for the matrix that it is itself kept with."""
        self.fixed += [o for o in owners if not (isinstance(o, Csr) and o.cache.get("tapes") is self.beside)]

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
                if slot.like is not None and slot.like[0] != t.dtype:
                    self.playable = False  # read as another type
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
            slot.result, slot.base, slot.like = True, self.count + len(self.made), (t.dtype, tuple(t.shape), t.stride())
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
        """The calls as a play walks through them; launches that stand side by side are one."""
        self.parts: list[Any] = []
        views: dict[torch.dtype, int] = {}
        scratch = self.count + len(self.made)
        for what, arguments, keywords in self.notes:
            last = self.parts[-1] if self.parts else None
            if what.joins(last, arguments):
                continue
            part = what.part(arguments, keywords)
            for values in (part.arguments, part.keywords) if type(part) is Written else ():
                for at, v in values.items() if isinstance(values, dict) else enumerate(values):
                    if isinstance(v, Place):
                        values[at] = v.found(scratch, views)
            self.parts.append(part)
        for part in self.parts:
            if hasattr(part, "finish"):
                part.finish()
        self.views = list(views)
        self.large = [math.prod(shape) * dtype.itemsize >= pool.LEAST for shape, _, dtype in self.made]

    # ---- playing ----

    def play(self, inputs: Sequence[Maybe], addresses: list[int]) -> list[Maybe]:
        """What the recorded function returned, for other inputs of the same signature, at these addresses.

        One loop without calls of Python functions: on small graphs they are what a step takes.
        """
        device = self.device
        own = device.type == "cpu"
        base = addresses
        tensors: list[Any] = [*inputs]
        for (shape, stride, dtype), large in zip(self.made, self.large, strict=True):
            if own and large:
                tensor = pool.empty(shape, dtype)
            else:  # takes the host half as long as torch.empty
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            tensors.append(tensor)
            base.append(tensor.data_ptr())
        if self.room:
            if own and self.room >= pool.LEAST:
                scratch = pool.empty((self.room,), torch.uint8)
            else:
                scratch = torch.empty(self.room, dtype=torch.uint8, device=device)
            tensors.append(scratch)
            base.append(scratch.data_ptr())
            for dtype in self.views:
                tensors.append(scratch.view(dtype))
        for part in self.parts:
            if part.__class__ is Native:
                values = part.values.copy()
                for at, slot, offset in part.places:
                    values[at] = base[slot] + offset
                status = part.function(*values)
                if status and status < 0:
                    part.check(status)
            elif part.__class__ is Written:
                values = []
                for v in part.arguments:
                    if v.__class__ is Found:
                        tensor = tensors[v.number]
                        v = tensor if v.whole else tensor.as_strided(v.shape, v.stride, tensor.storage_offset() + v.at)
                    values.append(v)
                if part.keywords:
                    keywords = part.keywords.copy()
                    for name, v in part.keywords.items():
                        if v.__class__ is Found:
                            tensor = tensors[v.number]
                            at = tensor.storage_offset() + v.at
                            keywords[name] = tensor if v.whole else tensor.as_strided(v.shape, v.stride, at)
                    part.function(*values, **keywords)
                else:
                    part.function(*values)
            else:
                part.play(base)
        results: list[Maybe] = []
        for k in self.results:
            results.append(None if k is None else tensors[self.count + k])
        return results


@dataclass(eq=False)
class Found:
    """Where a play finds a tensor: one of its tensors, as it is or a part of it."""

    number: int
    whole: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int  # values after the tensor's first


class Native:
    """A call of a function of libstretto, which takes addresses and returns a negative status for an error."""

    def __init__(self, function: Any, check: Callable[[int], None]) -> None:
        self.function, self.check = function, check
        self.values: list[Any] = []
        self.places: list[tuple[int, int, int]] = []

    def joins(self, last: Any, arguments: list[Any]) -> bool:
        """It stands alone."""
        return False

    def part(self, arguments: list[Any], keywords: dict[str, Any]) -> Native:
        """The part of a tape that calls it."""
        self.values = [
            v.data_ptr() if isinstance(v, Tensor) else None if isinstance(v, Place) else v for v in arguments
        ]
        self.places = patches(arguments)
        return self


class Written:
    """A call of a function of torch's that writes to tensors it is handed."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.arguments: list[Any] = []
        self.keywords: dict[str, Any] = {}

    def joins(self, last: Any, arguments: list[Any]) -> bool:
        """It stands alone."""
        return False

    def part(self, arguments: list[Any], keywords: dict[str, Any]) -> Written:
        """The part of a tape that calls it."""
        self.arguments, self.keywords = arguments, keywords
        return self


def patches(arguments: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Which arguments are addresses of a play: (its number, which base, how many bytes on)."""
    return [(k, v.slot.base, v.slot.offset + v.offset) for k, v in enumerate(arguments) if isinstance(v, Place)]


def call(function: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
    """function(*arguments, **keywords), which writes to tensors it is given; a tape does the same with others."""
    if recorder.tape is None:
        function(*arguments, **keywords)
    else:
        with recorder.tape.note(Written(function), arguments, keywords):
            function(*arguments, **keywords)


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


def record(
    function: Callable[..., Sequence[Maybe]], inputs: Sequence[Maybe], beside: object = None
) -> tuple[Sequence[Maybe], Tape]:
    """Run the function; its results, and its tape, which is `ready` if it can be played.

    beside: where the tape will be kept.
    """
    tape = Tape(inputs, beside)
    before, recorder.tape = recorder.tape, tape
    try:
        with _Watch(tape):
            results = function(*inputs)
    finally:
        recorder.tape = before
    tape.finish(results, inputs)
    return results, tape


def run(
    tapes: dict[Any, Any],
    key: Hashable,
    function: Callable[..., Sequence[Maybe]],
    inputs: Sequence[Maybe],
    held: Sequence[object] = (),
) -> Sequence[Maybe]:
    """function(*inputs), which depends on nothing else but key: recorded in one of the first calls, played from then on.

    tapes: where they are kept, with the graph whose arrays they read (`kept_with`), or those of no graph (GENERAL).
    held: what the key names by number, which must outlive the tape.
    """
    if not playing or recorder.tape is not None:  # somebody watches every kernel, or it is part of a larger one
        return function(*inputs)
    addresses: list[int] = []
    signs: list[Any] = [key]
    numbers: list[int] = []
    card = repeated = False
    for t in inputs:
        if t is None:
            addresses.append(0)
            signs.append(None)
            continue
        address = t.data_ptr()
        addresses.append(address)
        signs.append((t.shape, t.stride(), t.dtype, address & 15))
        card = card or t.is_cuda
        repeated = repeated or id(t) in numbers
        numbers.append(id(t))
    place = device_now() if card and device_now is not None else torch.get_num_threads()
    signs.append(place)
    if repeated:  # which are the same tensor again
        for number in numbers:
            signs.append(numbers.index(number))
    signature = tuple(signs)
    known = tapes.get(signature, 0)
    if known.__class__ is Tape:
        return known.play(inputs, addresses)
    if known > UNRECORDED + TRIES:
        return function(*inputs)
    if len(tapes) >= MOST:  # sizes that change all the time: start afresh
        tapes.clear()
    tapes[signature] = known + 1
    if known < (1 if card else UNRECORDED) or (card and not _here(inputs, place)):
        return function(*inputs)
    results, tape = record(function, inputs, tapes)
    tape.keep(*held)
    if tape.ready:
        tapes[signature] = tape
    elif not tape.settled:
        tapes[signature] = known
    return results


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
