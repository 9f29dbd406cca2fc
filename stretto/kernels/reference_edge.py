"""The kernels of edge messages in plain, differentiable PyTorch: specification, oracle and fallback."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type

Tensors = tuple[Tensor | None, ...]

# Activations, in the order of their codes in csrc/abi.h; "one" stands for an absent factor.
ACTS = ("one", "identity", "relu", "sigmoid", "softplus", "silu")
_FUNCTIONS = {
    "identity": lambda u: u,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "silu": torch.nn.functional.silu,
}


def edge_messages(csr: Csr, tensors: tuple[Tensor | None, ...], acts: tuple[str, str]) -> Tensor:
    """Sum of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2). -> [n, k]."""
    rows, columns = csr.rows(), csr.columns()
    dtype = next(t.dtype for t in tensors if t is not None)
    acc = accumulate_type(dtype)
    message: Tensor | None = None
    for act, (row, col, edge) in zip(acts, (tensors[:3], tensors[3:]), strict=True):
        if act == "one":
            continue
        parts = [
            None if row is None else row.to(acc)[rows],
            None if col is None else col.to(acc)[columns],
            None if edge is None else csr.to_csr_order(edge).to(acc),
        ]
        u = sum(p for p in parts if p is not None)
        assert isinstance(u, Tensor)
        factor = _FUNCTIONS[act](u)
        message = factor if message is None else message * factor
    assert message is not None
    out = torch.zeros(csr.num_rows, message.size(1), dtype=acc, device=message.device)
    return out.index_add(0, rows, message).to(dtype)


def edge_messages_grad(
    csr: Csr,
    csr_t: Csr,
    tensors: tuple[Tensor | None, ...],
    acts: tuple[str, str],
    grad: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors that need one, by autograd."""
    return gradients(lambda leaves: edge_messages(csr, leaves, acts), tensors, grad, needs)


def softmax_sum(
    csr: Csr, x: Tensor, edge: Tensor | None, temperature: Tensor, act: str, shift: float, detached: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax aggregation, channel by channel, and two empty tensors: backward computes again. [n, k]."""
    rows = csr.rows()
    acc = accumulate_type(x.dtype)
    u = x.to(acc)[csr.columns()]
    if edge is not None:
        u = u + csr.to_csr_order(edge).to(acc)
    y = _FUNCTIONS[act](u) + shift
    score = (y.detach() if detached else y) * temperature.to(acc)
    index = rows.unsqueeze(1).expand_as(score)
    most = torch.zeros(csr.num_rows, x.size(1), dtype=acc, device=x.device)
    most.scatter_reduce_(0, index, score.detach(), "amax", include_self=False)
    p = (score - most[rows]).exp()
    total = torch.zeros_like(most).index_add(0, rows, p)
    out = torch.zeros_like(most).index_add(0, rows, p / total[rows] * y)
    return out, out.new_empty(0), out.new_empty(0)


def softmax_sum_grad(
    csr: Csr,
    csr_t: Csr,
    x: Tensor,
    edge: Tensor | None,
    temperature: Tensor,
    act: str,
    shift: float,
    detached: bool,
    kept: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, edge and temperature, by autograd."""

    def forward(leaves: tuple[Tensor | None, ...]) -> Tensor:
        x, edge, temperature = leaves
        assert x is not None
        assert temperature is not None
        return softmax_sum(csr, x, edge, temperature, act, shift, detached)[0].to(grad.dtype)

    return gradients(forward, (x, edge, temperature), grad, needs)


def softplus(x: Tensor, shift: float, grad: Tensor | None = None) -> Tensor:
    """log(1 + e^x) - shift, or grad times its slope."""
    return torch.nn.functional.softplus(x) - shift if grad is None else grad * x.sigmoid()


def gradients(forward: Callable[[Tensors], Tensor], tensors: Tensors, grad: Tensor, needs: tuple[bool, ...]) -> Tensors:
    """Those of the tensors that need one, by autograd."""
    with torch.enable_grad():
        leaves = tuple(
            None if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)
        )
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = torch.autograd.grad(forward(leaves), wanted, grad, allow_unused=True, materialize_grads=True)
    by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
    return tuple(None if t is None else by_id.get(id(t)) for t in leaves)
