"""Chains of Linears and activations in plain, differentiable PyTorch: specification and oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def chain(stages: Sequence[tuple[str, Any]], rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Linears and activations one after the other, as kernels/cpu_chain.py takes them. rows [n, i] -> [n, o]."""
    at = 0
    for name, detail in stages:
        if name == "dense":
            rows = F.linear(rows, tensors[at], tensors[at + 1] if detail else None)
            at += 1 + detail
        elif name == "scale":
            rows = rows * tensors[at].unsqueeze(1)
            at += 1
        else:
            rows = rows.relu() if name == "relu" else F.softplus(rows) - detail
    return rows


def chain_grad(
    stages: Sequence[tuple[str, Any]], rows: Tensor, tensors: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of rows and tensors, by autograd."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (rows, *tensors)]
        return torch.autograd.grad(chain(stages, leaves[0], leaves[1:]), leaves, grad)
