"""GCN2Conv: one aggregation that adds the initial features on its way out, then one GEMM that adds its own input.

There is one order to consider: the weight is square, so a sum is as wide on its other side, where X and X_0 would each
need a GEMM (with two weights they do anyway), and the weight's gradient another sum (tests/layers/test_recurrences.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, check_input, note
from stretto.layers.hops import _hop, _scaled
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_x


def fast(conv: Conv, x: Tensor, x_0: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What GCN2Conv.forward computes."""
    x, _, _ = edges.ends(x)
    check_input(x_0)
    if x.size(1) != conv.channels or x_0.dtype != x.dtype or x_0.size(0) < x.size(0):
        raise Decline("x or x_0 does not fit the layer")
    adj = adjacency.gcn_of(conv, x, edge_index, edge_weight)
    step = _scaled(adj, 1 - conv.alpha)
    x_0 = x_0[: x.size(0)]
    keep, change = 1.0 - conv.beta, conv.beta
    if conv.weight2 is None:
        note(conv, "H + H W with H = (1 - alpha) A X + alpha X_0, one kernel")
        h = _hop(step, x, x_0, conv.alpha)
        return torch.addmm(h, h, conv.weight1, beta=keep, alpha=change)
    note(conv, "H + H W + R + R V with H = (1 - alpha) A X, R = alpha X_0")
    h, r = _hop(step, x, None, 1.0), conv.alpha * x_0
    out = torch.addmm(h, h, conv.weight1, beta=keep, alpha=change)
    return out + torch.addmm(r, r, conv.weight2, beta=keep, alpha=change)


LAYER = Layer(pyg.GCN2Conv, fast, aggr=SUM, message=as_wide_as_x)
