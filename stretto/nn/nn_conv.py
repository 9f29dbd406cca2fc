"""NNConv: x_j times a matrix made from the edge's features. Where that matrix is linear in h(e), the sum over edges of
h(e) (x) x_j comes first and one GEMM follows: no edge x in x out array."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models import MLP

from stretto.graph import Graph
from stretto.nn import edges, streaming
from stretto.nn.base import LINEAR, Decline, hooked, record_of
from stretto.nn.gin import rest_of_mlp
from stretto.ops.attention import attention
from stretto.ops.edge_mlp import edge_mlp
from stretto.ops.spmm import spmm


def fast(conv: Any, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What NNConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    reduce = edges.check_aggr(conv, "add", "sum", "mean")
    graph = edges.plain_graph(conv, edge_index, x_src, x_dst, size)
    attr = edges.one_per_edge(graph, edge_attr, x_src)
    before, last = _ending_in_linear(conv.nn)
    i, o = conv.in_channels_l, conv.out_channels
    if attr.dim() != 2 or x_src.size(1) != i or last.weight.dtype != x_src.dtype or last.weight.size(0) != i * o:
        raise Decline("x, edge_attr or nn does not fit the layer")
    hidden = last.weight.size(1)
    if graph.num_rows * hidden > 4 * graph.num_edges * o and graph.num_rows * hidden * i > 1 << 16:
        raise Decline("few edges: node x hidden sums would be larger than the messages")
    weight = last.weight.view(i, o, -1).permute(2, 0, 1)
    record_of(conv).plan = "(sum h (x) X_j) W, no matrix per edge"
    u = _outer_in_blocks(conv, graph, x_src, attr, before)
    if u is None:
        u = _outer(graph, x_src, streaming.run(before, attr))
    out = u.reshape(-1, hidden * i) @ weight.reshape(hidden * i, o)
    if last.bias is not None:  # a bias of the matrix multiplies the sum of x_j; as one more hidden unit it would copy h
        out = torch.addmm(out, spmm(graph, x_src), last.bias.view(i, o))
    out = edges.only_reached(graph, out)
    if reduce == "mean":
        out = out * graph.mean_scale(out.dtype).unsqueeze(1)
    if x_dst is not None and conv.root_weight:
        out = out + conv.lin(x_dst)
    return out if conv.bias is None else out + conv.bias


def _outer(graph: Graph, x: Tensor, h: Tensor) -> Tensor:
    """sum over edges of h (x) x_j. x [m, i], h [E, k] -> [n, k, i]."""
    made = attention(graph, x.unsqueeze(1), edge=h, form="weight")
    assert isinstance(made, Tensor)
    return made


def _outer_in_blocks(conv: Any, graph: Graph, x: Tensor, attr: Tensor, before: list[Any]) -> Tensor | None:
    """_outer() of what the modules before the last Linear make of attr, where that is too large to be kept; or None."""
    widest = max((m.weight.size(0) for m in before if type(m) in LINEAR), default=0)
    if not before or type(before[0]) not in LINEAR or not streaming.large(graph, widest, x):
        return None
    if not streaming.row_by_row(before, random=True):
        return None
    record_of(conv).plan = "(sum h (x) X_j) W, h in blocks of edges"
    made: Tensor = edge_mlp(
        graph,
        lambda block, other, edge: _outer(block, other, streaming.run(before, edge)),
        None,
        x,
        attr,
        parameters=streaming.parameters_of(before),
        reduce="function",
        block=streaming.BLOCK,
    )
    return made


def _ending_in_linear(nn: Any) -> tuple[list[Any], Any]:
    """The modules before a network's last Linear, and it; or Decline."""
    if type(nn) in LINEAR and not hooked(nn):
        return [], nn
    if type(nn) is torch.nn.Sequential and len(nn) and type(nn[-1]) in LINEAR and not hooked(nn, nn[-1]):
        return list(nn)[:-1], nn[-1]
    plain = type(nn) is MLP and nn.plain_last and not (nn.training and nn.dropout[-1] > 0)
    if plain and type(nn.lins[-1]) in LINEAR and not hooked(nn, nn.lins[-1]):
        return [lambda x: rest_of_mlp(nn, nn.lins[0](x), last=False)] if len(nn.lins) > 1 else [], nn.lins[-1]
    raise Decline("nn does not end in a Linear")
