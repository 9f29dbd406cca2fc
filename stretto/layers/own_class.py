"""The class that a layer is of, and what others write onto it: PyG for what it copies, torch when it derives, users."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

# Where torch derives classes from a module's own: parametrized, sharded (fully_shard), replicated.
DERIVES = ("torch.nn.utils.parametrize", "torch.distributed.")
# What a fast function does in place of. PyG writes some of them itself, from templates.
METHODS = ("message", "aggregate", "update", "propagate", "edge_update", "message_and_aggregate")

LIBRARIES = ("torch.", "torch_geometric.", "stretto.")


def behind(kind: type) -> type:
    """A module's class as its user knows it: not the one that torch may have derived from it."""
    if not kind.__module__.startswith(DERIVES):
        return kind
    found = next(base for base in kind.__mro__ if not base.__module__.startswith(DERIVES))
    return kind if found in (torch.nn.Module, object) else found


def templates_of(stock: type) -> Callable[..., None]:
    """_set_jittable_templates() of an accelerated class.

    PyG writes propagate(), and what explainers look for, onto the class of what is copied or unpickled. That must be
    the stock class, where they are already: an accelerated one inherits them, and PyG would take what it inherits for
    what there was before, so that layers of all models ran explained as if they were not.
    """

    def set_templates(self: Any, *args: Any, **kwargs: Any) -> None:
        ours, self.__class__ = self.__class__, stock
        try:
            self._set_jittable_templates(*args, **kwargs)
        finally:
            self.__class__ = ours

    return set_templates


class _Looked:
    """The methods of a class of PyG as they were last, and which of them is not PyG's any more."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.names = tuple(name for name in ("forward", *METHODS) if hasattr(kind, name))
        self.read = operator.attrgetter(*self.names)
        self.last: Any = None
        self.replaced = ""

    def now(self) -> str:
        found = self.read(self.kind)
        if found != self.last:
            self.last = found
            self.replaced = next((name for name in self.names if not _of_library(getattr(self.kind, name))), "")
        return self.replaced


_looked: WeakKeyDictionary[type, _Looked] = WeakKeyDictionary()


def replaced(kind: type) -> str:
    """The name of a method that someone has put onto the class of PyG that a layer is of, or derived from; else ""."""
    found = _looked.get(kind)
    if found is None:
        stock = next((base for base in kind.__mro__ if base.__module__.startswith("torch_geometric.")), kind)
        found = _looked[kind] = _Looked(stock)
    return found.now()


def replaced_forward(kind: Any) -> bool:
    """Whether someone has put another forward onto a class of torch or PyG."""
    stock = kind.__base__ if kind.__module__ == "stretto.layers.classes" else kind
    return stock.__module__.startswith(LIBRARIES) and not _of_library(stock.forward)


def _of_library(method: Any) -> bool:
    """Whether a method is PyG's or torch's, or ours in its place: a user's may have its name and module, but has other
    globals."""
    return isinstance(method, types.FunctionType) and method.__globals__.get("__name__", "").startswith(LIBRARIES)
