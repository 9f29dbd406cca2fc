"""Transforms of torch.func, and batches of gradients: kernels know no batch, so its members go through one by one.

Layers do not run our functions inside a transform (layers/watched.py); but a model that ran plainly may be
differentiated by a batch of gradients at once: torch.autograd.grad with is_grads_batched=True, jacobian with
vectorize=True. torch marks such a batch in its own older way, a "legacy batched tensor".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stretto.errors import fail
from stretto.ops import advice
from stretto.ops.autograd_state import several_times

_top = torch._C._functorch.peek_interpreter_stack
_is_batch = torch._C._functorch.is_legacy_batchedtensor
MOST_NESTED = 64  # batches inside each other: torch's own limit


def transformed() -> bool:
    """Whether vmap, grad, jacrev or another transform of torch.func is on, or forward-mode differentiation."""
    return _top() is not None or forward_ad._current_level >= 0


def one_by_one(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward(ctx, *grads) that takes a batch of gradients too, and says what would fit if it runs out of memory."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        for grad in grads:
            if grad is not None and _is_batch(grad):
                return _each(run, ctx, grads)
        try:
            return backward(ctx, *grads)
        except torch.OutOfMemoryError as error:
            advice.add(error, f"the gradients of {type(ctx).__name__}", next((g for g in grads if g is not None), None))
            raise

    return run


def _level(grads: tuple[Any, ...]) -> int:
    """The number of the batch to take apart: the innermost one.

    torch counts batches for each thread, and a GPU's backward runs in another thread than the one that began it: there
    the number is found by trying.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    if level:
        return level
    batch = next(g for g in grads if isinstance(g, Tensor) and _is_batch(g))
    for number in range(1, MOST_NESTED):
        if not _is_batch(torch._remove_batch_dim(batch, number, 1, 0)):
            return number
    fail("backward: a batch of batches of gradients (is_grads_batched twice) is not taken on a GPU, one batch is")


def _each(backward: Callable[..., Any], ctx: Any, grads: tuple[Any, ...]) -> Any:
    level = _level(grads)
    remove, add = torch._remove_batch_dim, torch._add_batch_dim
    plain = [remove(g, level, 1, 0) if isinstance(g, Tensor) and _is_batch(g) else None for g in grads]
    size = next(p.size(0) for p in plain if p is not None)
    with several_times():
        pairs = list(zip(grads, plain, strict=True))
        result = [backward(ctx, *(g if p is None else p[i] for g, p in pairs)) for i in range(size)]
    several = isinstance(result[0], tuple)
    columns = zip(*result, strict=True) if several else [tuple(result)]
    stacked = [None if column[0] is None else add(torch.stack(column), 0, level) for column in columns]
    return tuple(stacked) if several else stacked[0]
