"""Constant features that are nearly all zeros (bags of words): X W' is a sum of a few rows of W' per node.

Stock multiplies the zeros too. The results are equal as long as the weights are finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto import settings
from stretto.compile import HOIST, Adjacency
from stretto.ops import spmm


def linear_of_nonzeros(x: Tensor, weight: Tensor) -> Tensor | None:
    """The product x weight' by the nonzeros of x; None where x is not constant, nor sparse, or narrower than it."""
    nonzeros = HOIST.nonzeros(x) if weight.size(0) <= x.size(1) else None
    if nonzeros is None or torch.is_autocast_enabled("cpu"):
        return None
    if settings.get("STRETTO_PLAN") == "stock" or settings.torch_kernels():
        return None
    graph, values = nonzeros
    return spmm(graph, weight.t().contiguous(), values)


def aggregated(adj: Adjacency, h: Tensor, y: Tensor | None = None) -> Tensor:
    """Compute adj h (+ y), differentiable."""
    return spmm(adj.graph, h, adj.weight, row_scale=adj.row_scale, col_scale=adj.col_scale, y=y)
