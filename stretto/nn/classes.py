"""The classes that accelerated layers get: a subclass of each stock class with another forward, and nothing else.

They live in this module under the stock class's own name, so that a model prints as before and pickles by reference.
"""

from __future__ import annotations

from typing import Any

from torch.nn.utils.parametrize import is_parametrized

from stretto.nn import AGGREGATIONS, CONTAINERS, CONVS, generic
from stretto.nn.base import accelerated_forward


def _subclass(stock: type, fast: Any) -> type:
    body = {"forward": accelerated_forward(stock, fast), "__module__": __name__, "__doc__": stock.__doc__}
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
    """A module's class; where torch has derived one of its own from it, to parametrize a weight, the one behind it."""
    kind: type = type(module)
    return kind.__bases__[0] if is_parametrized(module) else kind


def stock_of(kind: type) -> type | None:
    """The stock class of an accelerated one, or None."""
    return STOCK[kind] if kind in STOCK else generic.stock_class(kind)
