"""The classes that accelerated layers get: a subclass of each stock class with another forward, and nothing else.

They live in this module under the stock class's own name, so that a model prints as before and pickles by reference.
TorchScript takes them for the stock classes, and what PyG writes onto the class of a copy it writes onto stock's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from stretto.layers import AGGREGATIONS, CONTAINERS, CONVS, generic
from stretto.layers.base import accelerated_forward
from stretto.layers.own_class import behind, templates_of


def _subclass(stock: type, fast: Any) -> type:
    body = {
        "forward": accelerated_forward(stock, fast),
        "__module__": __name__,
        "__doc__": stock.__doc__,
        "_jit_override_qualname": torch._jit_internal._qualified_name(stock),
    }
    if issubclass(stock, MessagePassing):
        body["_set_jittable_templates"] = templates_of(stock)
    return type(stock.__name__, (stock,), body)


FAST: dict[type, type] = {
    stock: _subclass(stock, fast) for stock, fast in {**CONVS, **AGGREGATIONS, **CONTAINERS}.items()
}
STOCK: dict[type, type] = {fast: stock for stock, fast in FAST.items()}
globals().update({fast.__name__: fast for fast in STOCK})


def fast_of(kind: type) -> type | None:
    """The class that accelerate() gives to modules of this class, or None."""
    if kind in FAST:
        return FAST[kind]
    return None if stock_of(kind) is not None else generic.fast_class(kind)


def class_of(module: Any) -> type:
    """A module's class; where torch has derived one of its own from it, the one behind it."""
    return behind(type(module))


def stock_of(kind: type) -> type | None:
    """The stock class of an accelerated one, or None."""
    return STOCK[kind] if kind in STOCK else generic.stock_class(kind)
