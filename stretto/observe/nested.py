"""Values inside tuples, lists and dicts: what arguments and results of ops and modules come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(value: Any) -> list[Any]:
    """Every value inside, in order, that is no tuple, list or dict itself."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for inside in value for leaf in leaves(inside)]
    return [value]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with change(leaf) in the place of every leaf."""
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    return change(value)
