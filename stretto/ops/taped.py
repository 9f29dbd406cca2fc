"""Operations of torch among our launches, in a form that a tape can hold (kernels/triton/tape.py).

While a tape is recorded every array is made before torch fills it, so that the same can be done again with other
arrays. Otherwise: torch as usual. No autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto import kernels


def recorder(device: torch.device) -> Callable[..., None] | None:
    """While a tape is recorded: call(function, *tensors), which runs a function that writes to tensors it is given."""
    tape = kernels.backend(device).tape
    return tape.launch.call if tape is not None and tape.recording() else None


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b + bias. a [m, k], b [k, n], bias [n] -> [m, n]."""
    call = recorder(a.device)
    if call is None:
        return a @ b if bias is None else torch.addmm(bias, a, b)
    out = a.new_empty(a.size(0), b.size(1))
    if bias is None:
        call(lambda a, b, out: torch.mm(a, b, out=out), a, b, out)
    else:
        call(lambda bias, a, b, out: torch.addmm(bias, a, b, out=out), bias, a, b, out)
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor, factor: float = 1.0, *, in_place: bool) -> Tensor:
    """Add factor a b to a total, in its place or not. total [m, n], a [m, k], b [k, n]."""
    call = recorder(a.device)
    if call is None:
        return total.addmm_(a, b, alpha=factor) if in_place else torch.addmm(total, a, b, alpha=factor)
    if in_place:
        call(lambda total, a, b: total.addmm_(a, b, alpha=factor), total, a, b)
        return total
    out = total.new_empty(total.shape)
    call(lambda total, a, b, out: torch.addmm(total, a, b, alpha=factor, out=out), total, a, b, out)
    return out


def add(total: Tensor, other: Tensor, factor: float = 1.0, *, in_place: bool) -> Tensor:
    """Add factor other to a total, in its place or not. other: like total, or a row for all."""
    call = recorder(total.device)
    if call is None:
        return total.add_(other, alpha=factor) if in_place else torch.add(total, other, alpha=factor)
    if in_place:
        call(lambda total, other: total.add_(other, alpha=factor), total, other)
        return total
    out = torch.empty_like(total, dtype=torch.result_type(total, other))  # lying as total lies, as torch's sum does
    call(lambda total, other, out: torch.add(total, other, alpha=factor, out=out), total, other, out)
    return out


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return factor x."""
    call = recorder(x.device)
    if call is None:
        return x * factor
    out = torch.empty_like(x)
    call(lambda x, out: torch.mul(x, factor, out=out), x, out)
    return out


def column_sum(x: Tensor) -> Tensor:
    """Sum over the rows. x [n, k] -> [k]."""
    call = recorder(x.device)
    if call is None:
        return x.sum(0)
    out = x.new_empty(x.size(1))
    call(lambda x, out: torch.sum(x, 0, out=out), x, out)
    return out
