"""Op: an operator declared once. Its tests, benchmark, cost and analysis are derived from the declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stretto.graph import Graph


@dataclass(frozen=True)
class Sample:
    """One way to call an op: positional tensors (those that may carry gradients are floating) and options."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        shapes = ["x".join(map(str, a.shape)) for a in self.args if isinstance(a, torch.Tensor)]
        options = [f"{k}={v}" for k, v in self.kwargs.items() if not isinstance(v, torch.Tensor)]
        return ",".join(shapes + options)


@dataclass(frozen=True)
class Op:
    """name; function(*args, **kwargs); reference with the same signature in plain differentiable PyTorch.

    samples(graph, dtype): calls that together reach every option. flops and bytes take the arguments of the function:
    arithmetic operations, and compulsory bytes when every gathered row is read once per edge.
    """

    name: str
    function: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    samples: Callable[[Graph, torch.dtype], Iterator[Sample]]
    flops: Callable[..., int]
    bytes: Callable[..., int]
