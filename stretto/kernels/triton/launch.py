"""Launches that cost little: a signature seen before goes straight to its compiled kernel.

Triton's own binder looks at every argument again at each launch, which takes several times as long as a small kernel
runs. Here a signature is what the compiler would tell apart: constants, types, alignment, and whether an integer needs
64 bits; the values of sizes are no part of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

# Untyped: a launch passes plain values where a kernel is annotated to take constants.
jit: Any = triton.jit


class Kernel:
    """A Triton kernel: kernel[grid](*args, **kwargs), constants in capitals by name."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.names: list[str] = list(inspect.signature(function.fn).parameters)
        self.constant = [name.isupper() for name in self.names]
        self.known: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launch(grid, args, kwargs)

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the kernel; compile it if its signature is new."""
        if not hasattr(self.function, "device_caches"):  # the interpreter compiles nothing
            self.function[grid](*args, **kwargs)
            return
        given = [*args, *[kwargs[name] for name in self.names[len(args) :]]]
        values: list[Any] = []
        signature: list[Any] = [kwargs["num_warps"], torch.cuda.current_device()]
        for value, constant in zip(given, self.constant, strict=True):
            if constant or value is None:
                signature.append(value)
            elif isinstance(value, Tensor):
                address = value.data_ptr()
                signature += (value.dtype, address & 15 == 0)
                values.append(address)  # taken as it is, where a tensor would be examined
                continue
            else:
                signature.append(-(2**31) <= value < 2**31 if type(value) is int else float)
            values.append(value)
        key = tuple(signature)
        compiled = self.known.get(key)
        if compiled is None:
            self.known[key] = self.function[grid](*args, **kwargs)
        else:
            whole = (*grid, 1, 1)
            compiled[whole](*values)


def kernel(*sizes: str) -> Callable[[Any], Kernel]:
    """Decorator: a kernel whose integer arguments are all run-time values."""
    return lambda fn: Kernel(jit(do_not_specialize=list(sizes))(fn))
