"""How a graph keeps what derives from it: made once, outside inference mode, and counted in bytes.

What depends on the graph alone is kept as long as the graph. What depends on further objects goes with them: a graph
that is remembered longer does not hold what nobody can ask for again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from stretto.lifetime import popped_from

V = TypeVar("V")


def lasting() -> Any:
    """Where what is made may be saved for backward: outside inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class kept(Generic[V]):
    """A property computed once, of two threads' results the first.

    It is made outside inference mode: what an evaluation computes first, training saves for backward.
    (functools.cached_property would let all graphs wait for one lock.)
    """

    def __init__(self, make: Callable[[Any], V]) -> None:
        self.make = make
        self.name = make.__name__
        self.__doc__ = make.__doc__

    def __get__(self, graph: Any, owner: Any = None) -> V:
        with lasting():
            value: V = graph.__dict__.setdefault(self.name, self.make(graph))
        return value


def kept_with(owner: Any, key: Hashable, objects: Iterable[Any], make: Callable[[], V]) -> V:
    """make()'s result, kept in owner._derived until one of the objects is gone.

    The key names the objects by their id, and the result does not hold them.
    """
    known = owner._derived.get(key)
    if known is not None and known[0]:  # empty: one of them is gone, and its id may be another's
        made: V = known[0][0]
        return made
    for old, entry in list(owner._derived.items()):
        if isinstance(entry, _Together) and not entry[0]:
            owner._derived.pop(old, None)
    with lasting():
        made = make()
    cell = {0: made}
    owner._derived[key] = _Together((cell, *[popped_from(cell, 0, one) for one in objects]))
    return made


class _Together(tuple[Any, ...]):
    """A cell with what was made, empty once one of the objects is gone, and references to these."""


def bytes_of(values: Iterable[Any], seen: set[int]) -> int:
    """Bytes of every tensor in these values, in containers and in objects of ours among them, but those in `seen`."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            if id(value) not in seen and value.layout is torch.strided:
                seen.add(id(value))
                total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)):
            total += bytes_of(value, seen)
        elif isinstance(value, dict):
            total += bytes_of(value.values(), seen)
        elif type(value).__module__.startswith("stretto.") and hasattr(value, "__dict__") and id(value) not in seen:
            seen.add(id(value))
            total += bytes_of(vars(value).values(), seen)
    return total
