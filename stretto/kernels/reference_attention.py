"""The attention kernels in plain PyTorch: specification, oracle and fallback. Gradients by autograd."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from stretto.kernels.attention import TENSORS, Attention
from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type


def attention(csr: Csr, a: Attention, *, weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """out, out_attr, alpha if wanted, and statistics (unused here: backward computes again)."""
    out, out_attr, alpha = differentiable(csr, a)
    return out, out_attr, alpha if weights else None, out.new_empty(0)


def attention_grad(
    csr: Csr,
    csr_t: Csr,
    a: Attention,
    out: Tensor,
    out_attr: Tensor | None,
    alpha: Tensor | None,
    stats: Tensor,
    grad: Tensor,
    grad_attr: Tensor | None,
    grad_alpha: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of a.tensors where needed."""
    with torch.enable_grad():
        leaves = {
            name: tensor.detach().requires_grad_(need)
            for name, tensor, need in zip(TENSORS, a.tensors, needs, strict=True)
            if tensor is not None
        }
        again = dataclasses.replace(a, **leaves)  # type: ignore[arg-type]
        results = differentiable(csr, again)
        pairs = [
            (r, g)
            for r, g in zip(results, (grad, grad_attr, grad_alpha), strict=True)
            if r is not None and g is not None
        ]
        wanted = [t for t in leaves.values() if t.requires_grad]
        found = torch.autograd.grad(
            [r for r, _ in pairs], wanted, [g.to(r.dtype) for r, g in pairs], allow_unused=True, materialize_grads=True
        )
    by_id = {id(t): g for t, g in zip(wanted, found, strict=True)}
    return tuple(by_id.get(id(leaves[name])) if name in leaves else None for name in TENSORS)


def differentiable(csr: Csr, a: Attention) -> tuple[Tensor, Tensor | None, Tensor]:
    """out [n, h, f], out_attr [n, h, d], alpha [E, h] in the user's order, all in the accumulation type."""
    rows, columns = csr.rows(), csr.columns()
    acc = accumulate_type(a.values.dtype)

    def at(tensor: Tensor, index: Tensor) -> Tensor:
        return tensor.to(acc)[index]

    def edges(tensor: Tensor) -> Tensor:
        return csr.to_csr_order(tensor).to(acc)

    if a.form in ("given", "weight"):
        assert a.edge is not None
        score = edges(a.edge)
    else:
        assert a.left is not None
        assert a.right is not None
        left, right = at(a.left, rows), at(a.right, columns)
        if a.form == "dot":
            score = (left * right).sum(-1)
            if a.query is not None and a.attr is not None:
                score = score + (at(a.query, rows) * edges(a.attr).unsqueeze(1)).sum(-1)
            score = score * a.scale
        else:
            z = left + right
            if a.edge is not None:
                z = z + edges(a.edge)
            score = torch.nn.functional.leaky_relu(z, a.slope)
            if a.form == "gatv2":
                assert a.att is not None
                score = (score * a.att.to(acc)).sum(-1)
    alpha = score if a.form == "weight" else softmax(score, rows, csr.num_rows)
    used = alpha
    if a.dropout > 0:
        used = alpha * csr.to_csr_order(mask(a.seed, csr.num_edges, a.heads, a.dropout, alpha))
    out = _sum(used.unsqueeze(2) * at(a.values, columns), rows, csr.num_rows)
    out_attr = None
    if a.attr is not None:
        out_attr = _sum(used.unsqueeze(2) * edges(a.attr).unsqueeze(1), rows, csr.num_rows)
    return out, out_attr, csr.to_user_order(used if a.dropped else alpha)


def softmax(score: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Over each row's edges, as torch_geometric.utils.softmax: shifted by the row's maximum."""
    most = torch.zeros(num_rows, *score.shape[1:], dtype=score.dtype, device=score.device)
    index = rows.view(-1, *([1] * (score.dim() - 1))).expand_as(score)
    most.scatter_reduce_(0, index, score.detach(), "amax", include_self=False)
    p = (score - most[rows]).exp()
    return p / _sum(p, rows, num_rows)[rows]


def mask(seed: int, num_edges: int, heads: int, dropout: float, like: Tensor) -> Tensor:
    """Dropout factors of every edge and head, in the user's order: 0 or 1 / (1 - dropout). [E, h].

    A function of (seed, edge, head) alone, so that forward and backward agree whatever order they walk the edges in.
    """
    counter = torch.arange(num_edges * heads, device=like.device)
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    bits = _mix((counter + low) & 0xFFFFFFFF)
    bits = _mix(bits ^ (((counter >> 32) + high) & 0xFFFFFFFF))
    kept = bits >= min(int(dropout * 4294967296.0), 0xFFFFFFFF)
    factor = 0.0 if dropout >= 1 else 1 / (1 - dropout)
    return (kept.to(like.dtype) * factor).view(num_edges, heads)


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0xD35A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def _sum(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, *values.shape[1:], dtype=values.dtype, device=values.device).index_add(0, rows, values)
