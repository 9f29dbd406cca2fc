"""Rows that a layer reads in the place of its own input, and what becomes of the gradient that comes back for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Back = Callable[[Tensor], Tensor | None]


def passed(x: Tensor, back: Back, rows: Tensor | None = None) -> Tensor:
    """x, or other rows in its place; the gradient of x is back(the result's gradient), none where that is None."""
    apply: Callable[..., Tensor] = _Passed.apply
    return apply(x, rows, back)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor | None, back: Back) -> Tensor:
        ctx.back = back
        return x.view_as(x) if rows is None else rows.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None
