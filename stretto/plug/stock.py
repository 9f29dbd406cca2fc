"""Stock's own forward where it must run untouched, and functions that stand in its place."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from stretto.layers.layer import Conv

_plain = threading.local()


def stock_wanted() -> bool:
    """Whether this thread is computing what stock computes, to compare with: then nothing of ours may run inside."""
    return getattr(_plain, "on", False)


def all_stock(stock_forward: Any, conv: Conv, args: Any, kwargs: Any) -> Any:
    """Stock's own forward, with nothing of ours inside."""
    before, _plain.on = stock_wanted(), True
    try:
        return stock_forward(conv, *args, **kwargs)
    finally:
        _plain.on = before


def owned(out: Any) -> Any:
    """out, as a tensor that may be edited in place (elu_): torch forbids it to views of what our functions return."""
    if isinstance(out, Tensor) and out.requires_grad and out._is_view():
        return out.clone()
    return out


def in_place_of(stock_forward: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls run, and that TorchScript reads as stock's forward: its source, among its own globals."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    made = types.FunctionType(forward.__code__, stock_forward.__globals__, closure=forward.__closure__)
    return functools.wraps(stock_forward)(made)
