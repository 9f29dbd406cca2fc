"""What `stretto bench gpu` is made of: timing in turns, the ceilings of a card, the dense products of a GIN layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto import kernels
from stretto.machine.timing import Timing, measure


class Rows(Protocol):
    """Where rows are written down."""

    def add(self, timings: Mapping[str, Timing] | None = None, **row: Any) -> None:
        """One record."""


def timed(candidates: dict[str, Callable[[], object]], *, repeats: int = 7) -> dict[str, Timing]:
    """Each in turns. A sample holds many calls in a row, as a training loop does: what the host does for one is hidden
    behind the device's work on the one before, where it is less."""
    return measure(candidates, repeats=repeats, warmup=2, device="cuda", sample_seconds=0.06)


def milliseconds(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Medians."""
    return {name: t.median * 1e3 for name, t in timings.items()}


def ceilings(sheet: Rows) -> None:
    """What the card can do at most: copying, multiplying, gathering rows."""

    def add(name: str, call: Callable[[], object], work: float, unit: str) -> None:
        ms = milliseconds(timed({name: call}))[name]
        sheet.add(kind="ceiling", name=name, ms=ms, rate=work / ms / 1e9, unit=unit)

    buffers = torch.randn(2, 1 << 28, device="cuda")
    add("copy", lambda: buffers[0].copy_(buffers[1]), buffers.numel() * 4, "TB/s")
    for name, dtype in (("gemm f32", torch.float32), ("gemm bf16", torch.bfloat16)):
        add(name, partial(torch.mm, *torch.randn(2, 8192, 8192, device="cuda", dtype=dtype)), 2 * 8192**3, "TFLOP/s")
    rows = torch.randn(1 << 21, 256, device="cuda")
    index = torch.randint(0, 1 << 21, (4_000_000,), device="cuda")
    add("gather (read and write)", lambda: rows.index_select(0, index), 2 * index.numel() * 1024, "TB/s")


def dense_products(num_nodes: int, i: int, o: int) -> dict[str, float]:
    """Milliseconds of the six products of Linear(i, o), ReLU, Linear(o, o), forward and backward."""
    x, z, grad = (torch.randn(num_nodes, k, device="cuda") for k in (i, o, o))
    first, second = torch.randn(o, i, device="cuda"), torch.randn(o, o, device="cuda")
    ours = kernels.backend(x.device)

    def by_torch() -> list[Tensor]:
        return [x @ first.t(), z @ second.t(), grad @ second, grad.t() @ z, grad @ first, grad.t() @ x]

    def by_us() -> list[Tensor]:
        return [
            ours.product(x, first.t()),
            ours.product(z, second.t()),
            ours.product(grad, second),
            ours.transposed_product(grad, z)[0],
            ours.product(grad, first),
            ours.transposed_product(grad, x)[0],
        ]

    return milliseconds(timed({"torch": by_torch, "stretto": by_us}))
