"""NNConv: x_j times a matrix made from the edge's features. Where that matrix is linear in h(e), the sum over edges of
h(e) (x) x_j comes first and one GEMM follows: no edge x in x out array. Elsewhere such arrays are made in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.models import MLP

from stretto.graph import Graph
from stretto.layers import edges
from stretto.layers.base import LINEAR, Decline, hooked, note
from stretto.layers.edges import norms, streaming
from stretto.layers.edges.norms import in_order
from stretto.layers.gin import rest_of_mlp
from stretto.layers.layer import SIMPLE, Conv, Layer, as_wide_as_result
from stretto.ops.attention import attention
from stretto.ops.dense import dense_of_sums, plus_dense
from stretto.ops.edge_mlp import Ends, edge_mlp
from stretto.ops.spmm import spmm

WIDTH = 256  # channels for which streaming.BLOCK edges are a block


def fast(conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
    """What NNConv.forward computes."""
    edge_index, edge_attr, size = edges.unpacked(conv, edge_index, edge_attr, size)
    x_src, x_dst, _ = edges.ends(x)
    reduce = edges.reduction(conv)
    graph = edges.plain_graph(conv, edge_index, x_src, x_dst, size)
    attr = edges.one_per_edge(graph, edge_attr, x_src)
    if attr.dim() != 2 or x_src.size(1) != conv.in_channels_l:
        raise Decline("x or edge_attr does not fit the layer")
    try:
        out = _contracted(conv, graph, x_src, attr, reduce)
    except Decline as decline:
        out = _matrices_in_blocks(conv, graph, x_src, attr, reduce, decline)
    if x_dst is not None and conv.root_weight:
        out = out + conv.lin(x_dst)
    return out if conv.bias is None else out + conv.bias


def _contracted(conv: Conv, graph: Graph, x: Tensor, attr: Tensor, reduce: str) -> Tensor:
    """(sum h(e) (x) x_j) W, or Decline."""
    if reduce not in ("sum", "mean"):
        raise Decline(f"aggr is {reduce}")
    before, run, last = _ending_in_linear(conv.nn)
    i, o = conv.in_channels_l, conv.out_channels
    if last.weight.dtype != x.dtype or last.weight.size(0) != i * o:
        raise Decline("nn does not fit the layer")
    edges.no_infinity(x, attr)
    hidden = last.weight.size(1)
    if graph.num_rows * hidden > 4 * graph.num_edges * o and graph.num_rows * hidden * i > 1 << 16:
        raise Decline("few edges: node x hidden sums would be larger than the messages")
    weight = last.weight.view(i, o, -1).permute(2, 0, 1)
    note(conv, "(sum h (x) X_j) W, no matrix per edge")
    u = _outer_in_blocks(conv, graph, x, attr, before, run)
    if u is None:
        u = _outer(graph, x, run(attr))
    out = dense_of_sums(u.reshape(-1, hidden * i), weight.reshape(hidden * i, o).t())
    if last.bias is not None:  # a bias of the matrix multiplies the sum of x_j; as one more hidden unit it would copy h
        out = plus_dense(out, spmm(graph, x), last.bias.view(i, o).t())
    out = edges.only_reached(graph, out)
    return out if reduce == "sum" else out * graph.mean_scale(out.dtype).unsqueeze(1)


def _matrices_in_blocks(conv: Conv, graph: Graph, x: Tensor, attr: Tensor, reduce: str, why: Decline) -> Tensor:
    """Messages x_j nn(e) as they are written, in blocks of edges once their matrices are large; why: nothing else."""
    i, o = conv.in_channels_l, conv.out_channels
    modules = in_order(conv.nn)
    if norms.watched(conv.nn) or not streaming.large(graph, i * o, x):
        raise why
    if not streaming.row_by_row(modules, random=True):
        raise why

    network = conv.nn

    def message(other: Tensor, edge: Tensor) -> Tensor:
        return torch.bmm(other.unsqueeze(1), network(edge).view(-1, i, o)).squeeze(1)

    note(conv, f"{reduce} of X_j nn(E), matrices in blocks of edges")
    block = max(streaming.block_of(graph, x) * WIDTH // max(i * o, WIDTH), 1)
    parameters = streaming.parameters_of(modules)
    function = streaming.as_now(message, [network])
    made: Tensor = edge_mlp(graph, function, None, x, attr, parameters=parameters, reduce=reduce, block=block)
    return made


def _outer(graph: Graph, x: Tensor, h: Tensor) -> Tensor:
    """The sum over edges of h (x) x_j. x [m, i], h [E, k] -> [n, k, i]."""
    made = attention(graph, x.unsqueeze(1), edge=h, form="weight")
    assert isinstance(made, Tensor)
    return made


def _outer_in_blocks(
    conv: Conv, graph: Graph, x: Tensor, attr: Tensor, before: list[Any], run: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """_outer() of what the modules before the last Linear make of attr, where that is too large to be kept; or None."""
    widest = max((m.weight.size(0) for m in before if type(m) in LINEAR), default=0)
    if not before or type(before[0]) not in LINEAR or not streaming.large(graph, widest, x):
        return None
    learned = streaming.parameters_of(before)

    def message(block: Graph, other: Tensor, edge: Tensor) -> Tensor:
        return _outer(block, other, run(edge))

    def stage(until: Any, known: norms.Known) -> Callable[..., Tensor]:
        if until is not None:
            return lambda edge: norms.run(before, edge, until, known)
        return lambda block, other, edge: _outer(block, other, norms.run(before, edge, None, known))

    function: Callable[..., Tensor] = streaming.as_now(message, [conv.nn])
    edge: Ends = attr
    shared: list[Tensor] = []
    if norms.watched(conv.nn):
        return None
    if not streaming.row_by_row(before, random=True):
        if not norms.takes(graph, before, widest, x):
            return None
        function, edge, shared = norms.with_statistics(graph, stage, before, learned, None, None, attr)
    note(conv, "(sum h (x) X_j) W, h in blocks of edges")
    options: dict[str, Any] = {"parameters": learned, "shared": shared}
    options["block"] = streaming.block_of(graph, x)
    made: Tensor = edge_mlp(graph, function, None, x, edge, reduce="function", **options)
    return made


def _ending_in_linear(nn: Any) -> tuple[list[Any], Callable[[Tensor], Tensor], Any]:
    """The modules before a network's last Linear, a function that runs them, and that Linear; or Decline."""
    if type(nn) in LINEAR and not hooked(nn):
        return [], lambda x: x, nn
    if type(nn) is torch.nn.Sequential and len(nn) and type(nn[-1]) in LINEAR and not hooked(nn, nn[-1]):
        return in_order(nn)[:-1], lambda x: streaming.run(list(nn)[:-1], x), nn[-1]
    plain = type(nn) is MLP and nn.plain_last and not (nn.training and nn.dropout[-1] > 0)
    if plain and type(nn.lins[-1]) in LINEAR and not hooked(nn, nn.lins[-1]):
        first, last = nn.lins[0], nn.lins[-1]
        if last is first:
            return [], lambda x: x, last
        before = [module for module in in_order(nn) if module is not last]
        return before, lambda x: rest_of_mlp(nn, first(x), last=False), last
    raise Decline("nn does not end in a Linear")


LAYER = Layer(pyg.NNConv, fast, aggr=SIMPLE, message=as_wide_as_result)
