"""Layers that are no plain sums of products, but may be evaluated in several orders: GAT's weighted sum before or after
its projection, RGCN by pairs of relation and node or by bases.

Each order has a name and a predicted time. As with plans, those that are close are timed inside real steps, forward and
backward, and the best is kept on disk; explain() tells them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto import settings
from stretto.compile.choose import CHOOSER, rounded
from stretto.compile.cost import Work
from stretto.compile.expr import Sizes
from stretto.compile.plan import Ranking
from stretto.kernels import kind_of
from stretto.machine.rates import Profile
from stretto.ops.kernel import differentiable


@dataclass(frozen=True)
class Order:
    """A way to evaluate a layer: how it reads, the widths of its aggregations, bytes held from forward to backward."""

    name: str
    widths: tuple[int, ...] = ()
    kept: int = 0

    def works(self, sizes: Sizes, value_bytes: int = 4) -> list[Work]:
        """Its aggregations."""
        return [Work("spmm", width, 0.0, 0.0) for width in self.widths]

    def kept_bytes(self, sizes: Sizes, value_bytes: int = 4) -> int:
        """Bytes of intermediate values held from forward to backward."""
        return self.kept


Priced = list[tuple[float, Order]]  # predicted seconds


class Trial:
    """Times one pass of an order: from enter() to leave(), and on the way back from leave() to enter()."""

    def __init__(self, key: Hashable, order: Order) -> None:
        self.key, self.order, self.start, self.forward, self.recorded = key, order, 0.0, 0.0, False

    def enter(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The layer's inputs: those it is to be evaluated with."""
        self.recorded = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        learn = [t for t in inputs if t.requires_grad]  # the others stay the objects they are
        result = iter(_enter(self, *learn) if self.recorded else learn)
        self.start = time.perf_counter()
        return tuple(next(result) if t.requires_grad else t for t in inputs)

    def leave(self, out: Tensor) -> Tensor:
        """The layer's result: the one to hand out."""
        self.forward = time.perf_counter() - self.start
        if self.recorded:
            result: Tensor = _leave(self, out)
            return result
        self.done(self.forward)
        return out

    def done(self, seconds: float) -> None:
        """The pass is over."""
        CHOOSER.record(self.key, self.order, seconds)


def _returned(trial: Trial, saved: Any, grads: Sequence[Any], needs: Any) -> Sequence[Any]:
    """All gradients of the inputs are there."""
    trial.done(trial.forward + time.perf_counter() - trial.start)
    return grads


def _returning(trial: Trial, saved: Any, grads: Sequence[Any], needs: Any) -> Sequence[Any]:
    """The layer's backward begins."""
    trial.start = time.perf_counter()
    return grads


_enter = differentiable(
    "Enter",
    lambda trial, *inputs: tuple(t.view_as(t) for t in inputs),
    _returned,
    saves=0,
    shown=None,
)
_leave = differentiable("Leave", lambda trial, out: out.view_as(out), _returning, saves=0)


def best_order(
    layer: str, priced: Callable[[Profile], Priced], sizes: Sizes, like: Tensor, wanted: bool
) -> tuple[Order, Trial | None, Hashable]:
    """The order to run now; what times it, while that is not settled; and what the decision is kept under.

    priced: all orders with their predicted times, asked once per signature. sizes: with n, m and E at least; wanted:
    whether gradients are.
    """
    backend = "torch" if settings.torch_kernels() else "stretto"
    key = ((layer,), wanted, (), rounded(tuple(sizes.items())), like.dtype, kind_of(like), backend)

    def ranked(profile: Profile) -> Ranking:
        return Ranking(sorted(priced(profile), key=lambda pair: pair[0]))

    order, decision = CHOOSER.settle(key, ranked, sizes, like)
    return order, Trial(key, order) if decision.trying else None, key
