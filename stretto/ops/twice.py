"""Second derivatives of fused ops: the first ones taken again through plain PyTorch, which autograd follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    make: Callable[..., Sequence[Tensor | None]],
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    captured: int = 0,
) -> tuple[Any, ...]:
    """The gradients of make(*tensors), itself differentiable, by the tensors; they can be differentiated again.

    captured: how many of the last tensors make() knows by itself and is not handed.

    Each is the derivative by that argument alone. One tensor may depend on another, or be it: layers that share
    weights, a row that is also a column. So make() is handed aliases, and no gradient passes them on the way.
    """
    gate = _Gate()
    handed = len(tensors) - captured
    own = [t if t is None or not t.requires_grad else _alias(gate, t) for t in tensors[:handed]]
    results = make(*own)
    own += tensors[handed:]
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r is not None and g is not None and r.requires_grad]
    wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
    if not pairs or not wanted:
        return tuple(None for _ in tensors)
    gate.closed = True
    result = torch.autograd.grad(
        [r for r, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True
    )
    gate.closed = False
    by_id = {id(t): g for t, g in zip(wanted, result, strict=True)}
    return tuple(by_id.get(id(t)) if need and t is not None else None for t, need in zip(own, needs, strict=True))


class _Gate:
    """Whether gradients pass the aliases of one call: not while the first derivatives are taken."""

    closed = False


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: _Gate, tensor: Tensor) -> Tensor:
        ctx.gate = gate
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None if ctx.gate.closed else grads[0]


_alias: Any = _Alias.apply
