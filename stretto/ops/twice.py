"""Second derivatives of fused ops: the first ones taken again through plain PyTorch, which autograd follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    results: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Any, ...]:
    """d results / d tensors, themselves differentiable; results come from tensors by differentiable operations."""
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r is not None and g is not None and r.requires_grad]
    wanted = [t for t, need in zip(tensors, needs, strict=True) if need and t is not None]
    if not pairs or not wanted:
        return tuple(None for _ in tensors)
    found = torch.autograd.grad(
        [r for r, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True
    )
    by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
    return tuple(by_id.get(id(t)) if need and t is not None else None for t, need in zip(tensors, needs, strict=True))
