"""Statistics of neighbours in plain, differentiable PyTorch: specification, oracle and fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.reference_edge import gradients
from stretto.kernels.schema import accumulate_type

STATISTICS = ("sum", "mean", "min", "max", "var", "std")  # in the order of their codes in csrc/abi.h
LEAST_VAR = 1e-5  # PyG's: a variance up to this has deviation 0


def statistics(csr: Csr, x: Tensor, own: Tensor | None, names: tuple[str, ...]) -> Tensor:
    """Statistics of x_j + own_i over neighbours; 0 for rows without. -> [n, s, k]."""
    rows, acc = csr.rows(), accumulate_type(x.dtype)
    message = x.to(acc)[csr.columns()]
    if own is not None:
        message = message + own.to(acc)[rows]
    zeros = torch.zeros(csr.num_rows, x.size(1), dtype=acc, device=x.device)
    count = csr.rowptr.diff().clamp(min=1).to(acc).unsqueeze(1)
    total = zeros.index_add(0, rows, message)
    mean = total / count
    centred = message - mean[rows]  # differentiable too: the mean's own gradient adds up to 0
    var = zeros.index_add(0, rows, centred * centred) / count
    flat = var <= LEAST_VAR
    index = rows.unsqueeze(1).expand_as(message)
    makers = {
        "sum": lambda: total,
        "mean": lambda: mean,
        "min": lambda: zeros.scatter_reduce(0, index, message, "amin", include_self=False),
        "max": lambda: zeros.scatter_reduce(0, index, message, "amax", include_self=False),
        "var": lambda: var,
        "std": lambda: torch.where(flat, 0.0, torch.where(flat, 1.0, var).sqrt()),
    }
    return torch.stack([makers[name]() for name in names], dim=1).to(x.dtype)


def statistics_grad(
    csr: Csr,
    csr_t: Csr,
    x: Tensor,
    own: Tensor | None,
    names: tuple[str, ...],
    grad: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of x and own, by autograd."""

    def forward(leaves: tuple[Tensor | None, ...]) -> Tensor:
        assert leaves[0] is not None
        return statistics(csr, leaves[0], leaves[1], names)

    return gradients(forward, (x, own), grad, needs)
