"""Each kernel in plain PyTorch: specification, oracle and fallback. Any device, no autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type


def spmm(
    csr: Csr,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    y: Tensor | None = None,
    beta: float = 1.0,
    count_ties: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """row_scale * reduce over neighbours of (weight * col_scale * x) + beta * y. Rows without edges: 0 (mul: 1).

    csr [n, m], x [m, k] or [m, h, f], weight [E] or [E, h] -> [n, ...] and, for max and min, how many attain it.
    """
    acc = accumulate_type(x.dtype)
    messages = x.to(acc)[csr.columns()]
    if weight is not None:
        messages = messages * _spread(csr.to_csr_order(weight).to(acc), messages)
    if col_scale is not None:
        messages = messages * _spread(col_scale.to(acc)[csr.columns()], messages)
    if reduce in ("max", "min") and weight is not None:
        messages = messages.to(x.dtype).to(acc)  # entries compete as stored, ties by rounding included
    rows = csr.rows()
    shape = (csr.num_rows, *x.shape[1:])
    out = torch.full(shape, 1.0 if reduce == "mul" else 0.0, dtype=acc, device=x.device)
    ties = None
    if reduce == "sum":
        out.index_add_(0, rows, messages)
    else:
        index = _spread(rows, messages).expand_as(messages)
        how = {"max": "amax", "min": "amin", "mul": "prod"}[reduce]
        out.scatter_reduce_(0, index, messages, how, include_self=False)
        if count_ties:
            ties = torch.zeros_like(out).index_add_(0, rows, (messages == out[rows]).to(acc))
    if row_scale is not None:
        out = out * _spread(row_scale.to(acc), out)
    if y is not None:
        out = out + beta * y.to(acc)
    return out.to(x.dtype), ties


def spmm_extremum_grad(
    csr_t: Csr, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor, *, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of max and min over the transposed csr [m, n]: `share` flows to each of the entries that attain out."""
    acc = accumulate_type(x.dtype)
    source, target = csr_t.rows(), csr_t.columns()
    values = x.to(acc)[source]
    w = None if weight is None else _spread(csr_t.to_csr_order(weight).to(acc), values)
    messages = (values if w is None else values * w).to(x.dtype)
    most = out[target]
    part = torch.where(messages == most, share[target], torch.zeros((), dtype=acc, device=x.device))
    part = torch.where(most == most, part, most.to(acc))  # a NaN reaches the gradient of all entries, as in torch
    dx = dweight = None
    if need_x:
        dx = torch.zeros(x.shape, dtype=acc, device=x.device).index_add_(0, source, part if w is None else part * w)
    if need_weight:
        assert weight is not None
        dots = (values * part).flatten(weight.dim()).sum(-1)
        dweight = csr_t.to_user_order(dots)
    return dx, dweight


def sddmm(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """Dot product of the rows at both ends of each edge. a [n, h, f], b [m, h, f] -> [E, h], in the type of sums."""
    acc = accumulate_type(a.dtype)
    return csr.to_user_order((a.to(acc)[csr.rows()] * b.to(acc)[csr.columns()]).sum(-1))


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """Sum of the numbers at both ends of each edge. a [n, h], b [m, h] -> [E, h]."""
    return csr.to_user_order(a[csr.rows()] + b[csr.columns()])


def edge_softmax(csr: Csr, score: Tensor) -> Tensor:
    """Softmax over each row's edges. score [E, h] -> [E, h]."""
    rows = csr.rows()
    values = csr.to_csr_order(score)
    most, _ = _extremum(csr, values)
    p = (values - most[rows]).exp()
    total = torch.zeros_like(most).index_add_(0, rows, p)
    return csr.to_user_order(p / total[rows])


def edge_softmax_grad(csr: Csr, alpha: Tensor, grad: Tensor) -> Tensor:
    """alpha * (grad - row sum of alpha * grad). [E, h], [E, h] -> [E, h]."""
    rows = csr.rows()
    a, g = csr.to_csr_order(alpha), csr.to_csr_order(grad)
    total = torch.zeros(csr.num_rows, *a.shape[1:], dtype=a.dtype, device=a.device).index_add_(0, rows, a * g)
    return csr.to_user_order(a * (g - total[rows]))


def mul_grad(csr: Csr, x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of a row's product: grad times the product of the row's other entries, right also at zeros.

    x [E, k], grad [n, k] -> [E, k].
    """
    rows = csr.rows()
    values = csr.to_csr_order(x)
    zero = values == 0
    zeros = torch.zeros_like(grad).index_add_(0, rows, zero.to(grad.dtype))
    rest = torch.ones_like(grad)
    index = rows.unsqueeze(-1).expand_as(values)
    rest.scatter_reduce_(0, index, torch.where(zero, torch.ones_like(values), values), "prod", include_self=True)
    others = zeros[rows] - zero.to(grad.dtype)  # zeros among the other entries of the row
    quotient = rest[rows] / torch.where(zero, torch.ones_like(values), values)
    return csr.to_user_order(torch.where(others == 0, grad[rows] * quotient, torch.zeros_like(values)))


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]. x [m, ...], index [E] -> [E, ...]."""
    return x.index_select(0, index.long())


def segment_matmul(x: Tensor, ptr: list[int], weight: Tensor) -> Tensor:
    """Rows ptr[s]:ptr[s + 1] of x times weight[s]. x [N, i], weight [S, i, o] -> [N, o]."""
    out = x.new_empty(x.size(0), weight.size(2))
    for s in range(weight.size(0)):
        if ptr[s] < ptr[s + 1]:
            torch.mm(x[ptr[s] : ptr[s + 1]], weight[s], out=out[ptr[s] : ptr[s + 1]])
    return out


def _extremum(csr: Csr, values: Tensor) -> tuple[Tensor, Tensor]:
    rows = csr.rows()
    out = torch.zeros(csr.num_rows, *values.shape[1:], dtype=values.dtype, device=values.device)
    out.scatter_reduce_(0, _spread(rows, values).expand_as(values), values, "amax", include_self=False)
    return out, rows


def _spread(factor: Tensor, like: Tensor) -> Tensor:
    """factor with trailing dimensions of size one, so that it multiplies `like` row by row."""
    return factor.reshape(*factor.shape, *([1] * (like.dim() - factor.dim())))
