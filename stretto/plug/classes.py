"""The classes that accelerated layers get: a subclass of each stock class with another forward, and nothing else.

They live in this module under the stock class's own name, so that a model prints as before and pickles by reference.
TorchScript takes them for the stock classes, and what PyG writes onto the class of a copy it writes onto stock's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.nn import MessagePassing

from stretto.layers import AGGREGATIONS, CONVS
from stretto.layers.layer import STOCK, Layer, stock_of
from stretto.plug import generic
from stretto.plug.by_hops import CONTAINERS
from stretto.plug.dispatch import accelerated_forward
from stretto.plug.own_class import behind, templates_of

KNOWN: dict[type, Layer] = {**CONVS, **AGGREGATIONS, **CONTAINERS}


def _subclass(layer: Layer) -> type:
    stock = layer.kind
    body = {
        "forward": accelerated_forward(layer),
        STOCK: stock,
        "__module__": __name__,
        "__doc__": stock.__doc__,
        "_jit_override_qualname": torch._jit_internal._qualified_name(stock),
    }
    if issubclass(stock, MessagePassing):
        body["_set_jittable_templates"] = templates_of(stock)
    return type(stock.__name__, (stock,), body)


FAST: dict[type, type] = {stock: _subclass(layer) for stock, layer in KNOWN.items()}
globals().update({fast.__name__: fast for fast in FAST.values()})


def fast_of(kind: type) -> type | None:
    """The class that accelerate() gives to modules of this class, or None."""
    if kind in FAST:
        return FAST[kind]
    return None if stock_of(kind) is not None else generic.fast_class(kind)


def class_of(module: Any) -> type:
    """A module's class; where torch has derived one of its own from it, the one behind it."""
    return behind(type(module))
