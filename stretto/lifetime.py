"""What is to happen when an object is gone, by no Python code.

Python prints and drops an exception that is raised in a finalizer or in a weak reference's callback, and Ctrl-C is
raised wherever Python code happens to run. So nothing here is Python code when it is called: a dictionary's own pop,
and functions of a C library.
"""

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def popped_from(table: dict[Any, Any], key: Any, owner: T) -> weakref.ref[T]:
    """A weak reference to owner: when it is gone, `table` loses `key`. It must be kept, in the table for instance."""
    return weakref.ref(owner, functools.partial(table.pop, key))  # called with the reference: pop's default


class _Handle(weakref.ref[Any]):
    """A weak reference that ctypes takes for a handle, so that a function of a C library may be its callback."""

    __slots__ = ("_as_parameter_",)
    _as_parameter_: int

    def __new__(cls, owner: Any, function: Callable[[Any], Any], handle: int) -> "_Handle":
        made = super().__new__(cls, owner, function)
        made._as_parameter_ = handle
        return made

    def __init__(self, owner: Any, function: Callable[[Any], Any], handle: int) -> None:
        """All is done: weakref.ref's own would refuse the handle."""


class Owned:
    """A native object: `function`, of a C library, takes its handle back when this is gone, or the interpreter ends.

    kept: objects whose memory the native object uses; they live until then. Whoever owns it drops its only reference.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, function: Callable[[Any], Any], handle: int, *kept: Any) -> None:
        self.number = next(_numbers)
        # Of two references the later one's callback is called first: the function, then the pop that lets `kept` go.
        last = popped_from(living, self.number, self)
        living[self.number] = last, _Handle(self, function, handle), kept

    @property
    def alive(self) -> bool:
        """Whether the interpreter has not taken it back at its end."""
        return self.number in living


_numbers = itertools.count()
living: dict[int, tuple[weakref.ref[Owned], _Handle, tuple[Any, ...]]] = {}


@atexit.register
def _take_back() -> None:
    """The youngest first: it may use the older ones."""
    while living:
        _, (_, handle, kept) = living.popitem()
        function = handle.__callback__
        if function is not None:
            function(handle)
        del kept
