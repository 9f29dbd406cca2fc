"""The dense products of a step, replayed alone: no re-association of the sparse part makes the step faster than them.

Products inside kernels of our own (narrow ReLU and Linear, kernels/cpu_dense.py) are not seen and not in it. The
others run on torch's own GEMM, with the shapes and orders in memory they had in the step, into memory made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "its dense products alone"
_ATEN = torch.ops.aten
# What multiplies two matrices -> where its operands stand, and whether it adds to what is there.
PRODUCTS = {
    _ATEN.mm.default: (0, False),
    _ATEN.mm.out: (0, False),
    _ATEN.addmm.default: (1, False),
    _ATEN.addmm.out: (1, False),
    _ATEN.addmm_.default: (1, True),
}


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Tensor, Tensor, bool]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS:
            first, adds = PRODUCTS[function]
            self.calls.append((_like(args[first]), _like(args[first + 1]), adds))
        return function(*args, **(kwargs or {}))


def dense_floor(step: Callable[[], object]) -> Callable[[], None] | None:
    """A function that runs the dense products of the step, and nothing else; None if it has none."""
    with _Record() as record:
        step()
    calls = [(left, right, left.new_empty(left.size(0), right.size(1)), adds) for left, right, adds in record.calls]
    if not calls:
        return None

    def replay() -> None:
        for left, right, out, adds in calls:
            out.addmm_(left, right) if adds else torch.mm(left, right, out=out)

    return replay


def _like(t: Tensor) -> Tensor:
    """Other values in the same shape and order in memory."""
    values = torch.rand(t.shape[::-1] if t.stride(0) < t.stride(1) else t.shape, dtype=t.dtype)
    return values.t() if t.stride(0) < t.stride(1) else values
