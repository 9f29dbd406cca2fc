"""ARMAConv: stacks of act(A H W + X V + b), all stacks side by side: one GEMM and one aggregation for all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Adjacency, linear
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, note, note_plan
from stretto.layers.declines import same_type
from stretto.layers.layer import SUM, Conv, Layer, when
from stretto.layers.sage import WITH_OTHER_ROOT, WITH_OWN_ROOT
from stretto.ops import spmm


def fast(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What ARMAConv.forward computes."""
    x, _, _ = edges.ends(x)
    edges.initialised(conv.init_weight, conv.root_weight)
    later = () if conv.num_layers < 2 else (conv.weight,)
    same_type(x, conv.init_weight, conv.root_weight, conv.bias, *later)
    shape = (conv.num_stacks, x.size(1), conv.out_channels)
    if conv.init_weight.shape != shape or conv.root_weight.shape[1:] != shape:
        raise Decline("x does not fit the layer")
    if not edges.is_plain(edge_index):
        raise Decline(f"edge_index is a {type(edge_index).__name__}, not [2, E]")
    adj = adjacency.gcn(conv, x, edge_index, edge_weight, add_self_loops=False)
    stacks, width = conv.num_stacks, conv.out_channels
    out = x
    for t in range(conv.num_layers):
        s = 0 if conv.shared_weights else t
        root = torch.nn.functional.dropout(x, p=conv.dropout, training=conv.training)
        root_weight = _side_by_side(conv.root_weight[s])
        bias = None if conv.bias is None else conv.bias[s].reshape(-1)
        if t == 0:
            out = _first(conv, adj, x, root, _side_by_side(conv.init_weight), root_weight, bias)
        else:
            mixed = _stacked(out, stacks) @ conv.weight[0 if conv.shared_weights else t - 1]
            mixed = mixed.transpose(0, 1).reshape(-1, stacks * width)
            y = torch.nn.functional.linear(root, root_weight, bias)
            out = spmm(adj.graph, mixed, adj.weight, row_scale=adj.row_scale, col_scale=adj.col_scale, y=y)
        if conv.act is not None:
            out = conv.act(_stacked(out, stacks)).transpose(0, 1).reshape(-1, stacks * width)
    return out if stacks == 1 else out.view(-1, stacks, width).mean(dim=1)


def _first(
    conv: Conv, adj: Adjacency, x: Tensor, root: Tensor, weight: Tensor, root_weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A x weight' + root root_weight' + bias."""
    if edges.learns(adj):
        note(conv, "A (X W') + X V'")
        y = torch.nn.functional.linear(root, root_weight, bias)
        return spmm(adj.graph, x @ weight.t(), adj.weight, y=y)
    if root is x:
        tensors = {"X": x, "W": weight, "V": root_weight}
        return linear(WITH_OWN_ROOT, tensors, {"A": adj}, bias=bias, note=note_plan(conv))
    tensors = {"X": x, "W": weight, "R": root, "V": root_weight}
    return linear(WITH_OTHER_ROOT, tensors, {"A": adj}, bias=bias, note=note_plan(conv))


def _side_by_side(weight: Tensor) -> Tensor:
    """[K, i, o] -> [K * o, i]."""
    return weight.transpose(1, 2).reshape(-1, weight.size(1))


def _stacked(out: Tensor, stacks: int) -> Tensor:
    """[n, K * o] -> [K, n, o], the shape stock's activation sees; a view."""
    return out.view(out.size(0), stacks, -1 if out.numel() else out.size(1) // stacks).transpose(0, 1)


LAYER = Layer(
    pyg.ARMAConv,
    fast,
    aggr=SUM,
    declines=(when(lambda c: c.num_layers < 1, "num_layers is 0"),),
    message=lambda c, i, o: c.num_stacks * c.out_channels,
)
