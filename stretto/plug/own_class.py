"""The class that a layer is of, and what others write onto it: PyG for what it copies, torch when it derives, users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Where torch derives classes from a module's own: parametrized, sharded (fully_shard), replicated.
DERIVES = ("torch.nn.utils.parametrize", "torch.distributed.")


def behind(kind: type) -> type:
    """A module's class as its user knows it: not the one that torch may have derived from it."""
    if not kind.__module__.startswith(DERIVES):
        return kind
    result = next(base for base in kind.__mro__ if not base.__module__.startswith(DERIVES))
    return kind if result in (torch.nn.Module, object) else result


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
