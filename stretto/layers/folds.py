"""In inference, what follows a linear layer is folded into its weights: a BatchNorm with fixed statistics, a Linear.

(A X W' + b) s + t is A X (diag(s) W)' + (b s + t): one pass over nodes x channels less. Only where the order of modules
is known (PyG's GCN, GraphSAGE and GAT, the network inside a GINConv), or read from a model's own (fold_models.py), in
eval mode without gradients, and where nobody watches. The folded weights are made anew in every call: an edit of
a parameter by any way is seen. That takes the time of a few rows, and nothing is folded where there are few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.norm import BatchNorm

from stretto.layers.base import hooked

LEAST = 1 << 20  # values of a result below which a pass over it takes no more time than to fold


def pays(rows: int, width: int) -> bool:
    """Whether a pass over rows x width values is worth folding away, here and now."""
    return rows * width >= LEAST and not torch.is_grad_enabled()


def fixed_norm(module: Any) -> bool:
    """Whether a module is a BatchNorm that scales and shifts by constants."""
    inner = module.module if type(module) is BatchNorm else module
    return (
        type(inner) is torch.nn.BatchNorm1d
        and not inner.training
        and inner.running_mean is not None
        and not hooked(module, inner)
    )


def fits(norm: Any, width: int, like: Tensor) -> bool:
    """Whether a norm is one of `width` channels, of the same type and on the same device as what it is given."""
    inner = norm.module if type(norm) is BatchNorm else norm
    held = (inner.running_mean, inner.running_var, inner.weight, inner.bias)
    return all(t is None or (t.shape, t.dtype, t.device) == ((width,), like.dtype, like.device) for t in held)


def scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """(s, t) with norm(x) = x s + t. [o] each."""
    inner: Any = norm.module if type(norm) is BatchNorm else norm
    scale = (inner.running_var + inner.eps).rsqrt()
    if inner.weight is not None:
        scale = scale * inner.weight
    shift = -inner.running_mean * scale
    return scale, shift if inner.bias is None else shift + inner.bias


def normalised(norm: Any, weights: list[Tensor], bias: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """Weights and bias of norm(sum of X_k W_k' + bias). weights [o, i] each, bias [o]."""
    scale, shift = scale_and_shift(norm)
    folded = shift if bias is None else torch.addcmul(shift, bias, scale)
    return [weight * scale.unsqueeze(1) for weight in weights], folded


def followed(linear: Any, weights: list[Tensor], bias: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    """Weights and bias of linear(sum of X_k W_k' + bias)."""
    folded = linear.bias
    if bias is not None:
        folded = linear.weight @ bias if folded is None else torch.addmv(folded, linear.weight, bias)
    return [linear.weight @ weight for weight in weights], folded
