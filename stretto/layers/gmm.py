"""GMMConv: a Gaussian weight per edge and kernel; all kernels in one pass, on the narrower side of the weight."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.layers import edges
from stretto.layers.base import Decline, note
from stretto.layers.declines import same_type
from stretto.layers.layer import SUM, Conv, Layer, when
from stretto.ops.attention import attention

EPS = 1e-15  # stock's


def fast(conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What GMMConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(conv, edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    reduce = edges.reduction(conv)
    edges.initialised(conv.g, conv.mu, conv.sigma)
    same_type(x_src, conv.g, conv.mu, conv.sigma, conv.bias)
    graph = edges.plain_graph(conv, edge_index, x_src, x_dst, size)
    attr = edges.one_per_edge(graph, edge_attr, x_src)
    i, o, count = x_src.size(1), conv.out_channels, conv.kernel_size
    if attr.dim() != 2 or attr.size(1) != conv.dim or conv.g.size(0) != i:
        raise Decline("x or edge_attr does not fit the layer")
    distance = -0.5 * (attr.unsqueeze(1) - conv.mu).pow(2) / (EPS + conv.sigma.pow(2))
    gaussian = torch.exp(distance.sum(dim=-1))
    if i <= 2 * o:  # one gather of x serves all kernels
        note(conv, "[K_1 X | ... | K_k X] G, one pass")
        u = attention(graph, x_src.unsqueeze(1), edge=gaussian, form="weight")
        assert isinstance(u, Tensor)
        out = u.reshape(-1, count * i) @ conv.g.view(i, count, o).transpose(0, 1).reshape(count * i, o)
    else:
        note(conv, "sum K_k (X G_k), one pass")
        u = attention(graph, (x_src @ conv.g).view(-1, count, o), edge=gaussian, form="weight")
        assert isinstance(u, Tensor)
        out = u.sum(dim=1)
    if reduce == "mean":
        out = out * graph.mean_scale(out.dtype).unsqueeze(1)
    if x_dst is not None and conv.root is not None:
        out = out + conv.root(x_dst)
    result: Tensor = out if conv.bias is None else out + conv.bias
    return result


LAYER = Layer(
    pyg.GMMConv,
    fast,
    aggr=(*SUM, "mean"),
    declines=(when(lambda c: c.separate_gaussians, "separate_gaussians=True"),),
    message=lambda c, i, o: c.kernel_size * c.out_channels,
)
