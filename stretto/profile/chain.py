"""A step as the chain of ops it runs, to be run again (`chain_run.py`) outside the model: without its modules.

Every op meets what it met in the model: its own indices, operands that the op before has just made or that lie a step
back, and memory as warm as it was there. What came into the step (parameters, features, the graph) is used as
it lies in memory; what the step made is made again. A tensor object that two ops are handed in the model is one object
here too, and one that outlives a step is that very object: kernels remember by it what they derived (edge weights in
the order of the rows).
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.analyze.places import results
from stretto.analyze.specs import storage_key
from stretto.analyze.trace import Recorder
from stretto.analyze.workload import Workload
from stretto.kernels import pool
from stretto.kernels.attention import TENSORS, Attention

SMALLEST = np.float32(1e-40)


@dataclass(frozen=True)
class Made:
    """A tensor that the step made: a window on the memory of an earlier result, or of something that came in."""

    slot: int
    number: int  # of the tensor object: two windows of one number are one object
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    learned: bool  # requires_grad: nothing is remembered of a tensor that changes in every step

    def of(self, storages: list[Any]) -> Tensor:
        """The tensor, as a new object."""
        storage = storages[self.slot]
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride).requires_grad_(self.learned)


@dataclass(frozen=True)
class Pooled:
    """A buffer that the step took from the pool between two ops: the chain takes one too, and gives it back as soon."""

    nbytes: int

    def of(self) -> Any:
        """The buffer in this run of the chain."""
        return pool.empty((self.nbytes,), torch.uint8).untyped_storage()


@dataclass
class Call:
    """One op. args and kwargs hold Made where the step's own results stand."""

    function: Any
    name: str
    args: Any
    kwargs: Any
    schema: Any
    drops: tuple[int, ...] = ()  # slots freed before it
    makes: tuple[tuple[int, int], ...] = ()  # (position among its results, slot)
    flushed: bool = False  # whether tiny numbers counted as zero
    backward: bool = False  # whether autograd ran it


def mapped(value: Any, change: Callable[[Tensor | Made], Any], buffer: Callable[[Any], Any] | None = None) -> Any:
    """The value with every dense tensor, or what stands for one, replaced; buffer: the same for bare memory."""
    if isinstance(value, Made) or (isinstance(value, Tensor) and value.layout == torch.strided):
        return change(value)
    if buffer is not None and isinstance(value, (Pooled, torch.UntypedStorage)):
        return buffer(value)
    if isinstance(value, Attention):
        return dataclasses.replace(value, **{name: mapped(getattr(value, name), change, buffer) for name in TENSORS})
    if isinstance(value, (list, tuple)):
        parts = [mapped(v, change, buffer) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {k: mapped(v, change, buffer) for k, v in value.items()}
    return value


class Standing(Recorder):
    """Tensor objects that ops of a step are handed and that are still there after it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload.model, full=False)
        self._met: dict[int, weakref.ref[Tensor]] = {}
        with self.recording():
            workload.run(self)

    def call(self, function: Any, name: str, args: Any, kwargs: Any, schema: Any) -> Any:
        """Run one op and remember what it was handed."""
        if not self._inside:
            self._met.update((id(tensor), weakref.ref(tensor)) for tensor in _flat((args, kwargs)))
        return super().call(function, name, args, kwargs, schema)

    def __contains__(self, tensor: Tensor) -> bool:
        met = self._met.get(id(tensor))
        return met is not None and met() is tensor


class Tape(Recorder):
    """Records a chain. The step is watched as when it is timed, so that both run the same ops."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload.model, full=False)
        self.device = workload.device
        self.calls: list[Call] = []
        self.slots = 0
        self.given: dict[int, Any] = {}  # slot -> memory that is there before the first op
        self._slot: dict[int, int] = {}  # storage -> slot, while it lives
        self._refs: dict[int, Any] = {}
        self._dropped: list[int] = []
        self._came: dict[tuple[int, bool], int] = {}  # (storage that came in, whether it is written to) -> slot
        self._objects: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # id -> (tensor, its storage, its number)
        self._numbers = itertools.count()
        self._state = {storage_key(buffer) for buffer in workload.model.buffers()}  # batch norms write without saying
        self._standing = Standing(workload)
        workload.model.zero_grad(set_to_none=True)
        with self.recording():
            workload.run(self)
        self._refs.clear()
        self._objects.clear()

    def call(self, function: Any, name: str, args: Any, kwargs: Any, schema: Any) -> Any:
        """Run one op and keep how to run it again."""
        if self._inside:
            return super().call(function, name, args, kwargs, schema)
        self._inside = True  # copies are no part of the step
        written = _written(schema, args, kwargs)
        keep = lambda tensor: self._keep(tensor, written)  # noqa: E731
        kept, named = mapped(args, keep, _pooled), mapped(kwargs, keep, _pooled)
        backward = torch._C._current_autograd_node() is not None
        made = Call(function, name, kept, named, schema, tuple(self._dropped), flushed=_flushing(), backward=backward)
        self._inside = False
        self._dropped.clear()
        self.calls.append(made)
        given = {storage_key(t) for t in _flat((args, kwargs))}
        out = super().call(function, name, args, kwargs, schema)
        fresh = {p: tensor for p, tensor in enumerate(results(out)) if storage_key(tensor) not in given}
        # A pool gives out a buffer again, which never dies: the result that had it before is gone.
        again = {self._slot.pop(key) for key in map(storage_key, fresh.values()) if key in self._slot}
        made.drops = (*made.drops, *sorted(again))
        made.makes = tuple((place, self._new(tensor)) for place, tensor in fresh.items())
        if written:  # its tensors hold other values now: objects of a new version
            self._objects = {i: found for i, found in self._objects.items() if found[1] not in written}
        return out

    def _keep(self, tensor: Any, written: set[int]) -> Any:
        key = storage_key(tensor)
        copied = key in written or key in self._state
        slot = self._slot.get(key)
        if slot is None:
            if not copied and tensor in self._standing:
                return tensor
            slot = self._came.get((key, copied))
        if slot is None:
            slot = self._came[key, copied] = self.slots
            self.slots += 1
            storage = tensor.untyped_storage()
            self.given[slot] = storage.clone() if copied else storage
        window = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return Made(slot, self._number(tensor, key), *window, tensor.requires_grad)

    def _number(self, tensor: Tensor, key: int) -> int:
        found = self._objects.get(id(tensor))
        if found is None or found[0]() is not tensor:
            found = self._objects[id(tensor)] = (weakref.ref(tensor), key, next(self._numbers))
        return found[2]

    def _new(self, tensor: Tensor) -> int:
        key, slot = storage_key(tensor), self.slots
        if key in self._slot:  # two results in one storage
            return self._slot[key]
        self.slots += 1
        self._slot[key] = slot

        def gone(_: Any) -> None:
            if self._slot.get(key) == slot:
                del self._slot[key]
                self._dropped.append(slot)

        self._refs[slot] = weakref.ref(tensor.untyped_storage(), gone)
        return slot


def _flushing() -> bool:
    """Whether this thread takes numbers too small for a full mantissa for zero (kernels/denormals.py)."""
    return not SMALLEST * SMALLEST.dtype.type(1)


def _pooled(storage: Any) -> Any:
    return Pooled(storage.nbytes()) if pool.holds(storage) else storage


def _flat(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(value, found.append)  # type: ignore[arg-type]
    return found


def _written(schema: Any, args: Any, kwargs: Any) -> set[int]:
    """Storages that the op writes to, by its schema."""
    if schema is None:
        return set()
    found: list[Tensor] = []
    for place, argument in enumerate(schema._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += _flat(value)
    return {storage_key(t) for t in found}
