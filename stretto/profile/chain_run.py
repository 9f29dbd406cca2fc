"""A chain of ops run again: timed op by op, each met by what it met in the model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from stretto.analyze.places import Place, overlap, results
from stretto.analyze.trace import Recorder
from stretto.kernels import pool
from stretto.kernels.denormals import DenormalsAreZero
from stretto.profile.chain import Made, Pooled, Tape, mapped
from stretto.profile.pause import interpret


class Reuse:
    """Gives memory that the chain no longer needs back when the model's results came to lie where it was there.

    Freed at once, it would serve the next result that fits, still in a cache. In a model the small blocks of autograd
    and Python get in between, and most results come to lie in memory that has long left the caches.
    """

    def __init__(self, places: Sequence[Sequence[Place]]) -> None:
        self._places = places
        self._of: dict[int, Place] = {}  # slot -> where its memory was in the model
        self._held: dict[int, Any] = {}  # slot -> memory that nothing needs

    def made(self, slot: int, place: int, position: int) -> None:
        """A slot was filled by a result of the op at this place in the chain."""
        if self._places:
            self._of[slot] = self._places[place][position]

    def drop(self, slot: int, storage: Any) -> None:
        """Nothing needs a slot's memory any more. The pool keeps its buffers by itself."""
        if slot in self._of and not pool.holds(storage):
            self._held[slot] = storage

    def release(self, place: int) -> None:
        """Before the op at this place: give back what its results take in the model."""
        for taken in self._places[place] if self._held else ():
            for slot in [slot for slot in self._held if overlap(self._of[slot], taken)]:
                del self._held[slot]


class _Run:
    """What one run of a chain has made so far."""

    def __init__(self, tape: Tape, places: Sequence[Sequence[Place]]) -> None:
        self.clock = Recorder(full=False, memory=True)
        self.clock._sync = tape._sync
        self._calls = tape.calls
        self._storages: list[Any] = [tape.given.get(slot) for slot in range(tape.slots)]
        self._objects: dict[int, dict[Made, Tensor]] = {}  # slot -> its tensors
        self._reuse = Reuse(places)

    def inputs(self, place: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Let go what the op at this place does not find any more; its arguments, with what stands for tensors made."""
        for slot in self._calls[place].drops:
            self._objects.pop(slot, None)
            self._reuse.drop(slot, self._storages[slot])
            self._storages[slot] = None
        self._reuse.release(place)
        return mapped(args, self._remade, _taken), mapped(kwargs, self._remade, _taken)

    def call(self, place: int, args: Any, kwargs: Any) -> None:
        """Run and time one op, and keep its results.

        It is handed to the clock as it is: a dispatch mode around the chain would call every op twice, and the second
        call, the one that is timed, would find its code in the caches. In a model it does not.
        """
        call = self._calls[place]
        with DenormalsAreZero() if call.flushed else nullcontext():
            out = self.clock.call(call.function, call.name, args, kwargs, call.schema)
        found = results(out) if call.makes else []
        for position, slot in call.makes:
            self._storages[slot] = found[position].untyped_storage()
            self._reuse.made(slot, place, position)

    def _remade(self, value: Any) -> Any:
        if not isinstance(value, Made):
            return value
        kept = self._objects.setdefault(value.slot, {})
        if value not in kept:
            kept[value] = value.of(self._storages)
        return kept[value]


def run(
    tape: Tape,
    *,
    instead: dict[int, tuple[Any, Any]] | None = None,
    seen: Callable[[int, Any, Any], None] | None = None,
    pauses: Sequence[float] = (),
    places: Sequence[Sequence[Place]] = (),
) -> Recorder:
    """The whole chain once, timed op by op as a step is.

    instead: other args and kwargs for some calls. seen(place, args, kwargs) is shown the tensors of every call.
    pauses: seconds before each op since the one before, in which the interpreter is kept busy.
    places: where each op's results lay in a step of the model; memory is then used again where it was there.
    """
    state = _Run(tape, places)

    def part(some: list[int]) -> None:
        for place in some:
            call = tape.calls[place]
            args, kwargs = state.inputs(place, *(instead or {}).get(place, (call.args, call.kwargs)))
            if seen is not None:
                seen(place, args, kwargs)
            if pauses:
                interpret(state.clock._last + pauses[place])
            state.call(place, args, kwargs)
            del args, kwargs  # or the next op would not find their memory free

    state.clock._last = time.perf_counter()
    with torch.no_grad():
        for backward, some in itertools.groupby(range(len(tape.calls)), lambda place: tape.calls[place].backward):
            if backward:
                _in_backward(part, list(some), tape.device)
            else:
                part(list(some))
    return state.clock


def _in_backward(part: Callable[[list[int]], None], some: list[int], device: torch.device) -> None:
    """part(some) where autograd runs the backward pass of a device: on a card's in a thread of its own."""
    start = torch.zeros(1, device=device, requires_grad=True)
    with torch.enable_grad():
        end = _Part.apply(start, part, some)
    end.backward(torch.zeros_like(end))


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, part: Any, some: Any) -> Tensor:
        ctx.part, ctx.some = part, some
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.part(ctx.some)
        return grads[0], None, None


def _taken(value: Any) -> Any:
    return value.of() if isinstance(value, Pooled) else value
