"""FiLMConv: act(gamma_i x_j + beta_i) per edge and relation; without an activation it is linear and stays on nodes.

With relu, the default, it is |gamma_i| relu(+-x_j + beta_i / |gamma_i|), which the kernel of edge messages sums without
an array per edge. Where gamma_i is so small that all neighbours are on one side of 0 the quotient would cost digits:
there the sum is linear, or nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.graph import Graph
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, hooked, note
from stretto.layers.edges import streaming
from stretto.layers.layer import SIMPLE, Conv, Layer, as_wide_as_result
from stretto.ops import edge_messages, spmm
from stretto.ops.rows import has_edges, only_reached


def fast(conv: Conv, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
    """What FiLMConv.forward computes."""
    x_src, x_dst = edges.both_ends(x)
    reduce = edges.reduction(conv)
    if conv.num_relations <= 1:
        graphs = [edges.graph_between(conv, edge_index, x_src, x_dst)]
    else:
        graphs = _by_relation(conv, edges.plain_graph(conv, edge_index, x_src, x_dst), edge_type)
    note(conv, "relations in turn, gamma (A X) + beta")
    beta, gamma = conv.film_skip(x_dst).split(conv.out_channels, dim=-1)
    out = gamma * conv.lin_skip(x_dst) + beta
    if conv.act is not None:
        out = conv.act(out)
    for graph, lin, film in zip(graphs, conv.lins, conv.films, strict=True):
        beta, gamma = film(x_dst).split(conv.out_channels, dim=-1)
        out = out + _modulated(conv, graph, lin(x_src), gamma, beta, reduce)
    result: Tensor = out
    return result


def _modulated(conv: Conv, graph: Graph, h: Tensor, gamma: Tensor, beta: Tensor, reduce: str) -> Tensor:
    """The reduction over edges of act(gamma_i h_j + beta_i). -> [n, o]."""
    algebra = reduce in ("sum", "mean") and graph.num_edges and all(map(edges.seems_finite, (h, gamma, beta)))
    if conv.act is None and algebra:
        return edges.plus_own(graph, gamma * spmm(graph, h, reduce=reduce), beta, reduce)
    if type(conv.act) is torch.nn.ReLU and algebra and not hooked(conv.act):
        note(conv, "relations in turn, |gamma| relu(+-X + beta / |gamma|) summed as messages")
        return _rectified(graph, h, gamma, beta, reduce)
    width, act = h.size(1), conv.act
    acts = [] if act is None else [act]

    def message(film: Tensor, source: Tensor) -> Tensor:
        scale, shift = film.split(width, dim=1)
        made = torch.addcmul(shift, scale, source)
        return made if act is None else act(made)

    (out,), how = streaming.reduced(
        graph,
        message,
        torch.cat([gamma, beta], dim=1),
        h,
        None,
        (reduce,),
        width=width,
        parameters=streaming.parameters_of(acts),
        modules=acts,
        steady=streaming.row_by_row(acts, random=True),
        patience=16,  # the message is two operations: in blocks it takes 1.3 times as long as stock
    )
    note(conv, f"relations in turn, messages {how}", builds=how.builds)
    return out


def _rectified(graph: Graph, h: Tensor, gamma: Tensor, beta: Tensor, reduce: str) -> Tensor:
    """The reduction over edges of relu(gamma_i h_j + beta_i). h [m, k], gamma and beta [n, k] -> [n, k]."""
    with torch.no_grad():
        finite = h.nan_to_num(0.0, 0.0, 0.0).abs().amax(0)  # what is not reaches its own neighbours only
        most = 1.125 * finite + 1024 * torch.finfo(h.dtype).tiny  # beyond every |h_j|
        reach = gamma.abs() * most
        always = beta > reach  # every neighbour is above 0
        partly = ~always & ~(beta <= -reach)  # a NaN is not below either
    zero, one = gamma.new_zeros(()), gamma.new_ones(())
    size = torch.where(partly, torch.where(gamma < 0, -gamma, gamma), one)
    threshold = torch.where(partly, beta / size, -most)  # -most: nobody passes
    above = edge_messages(graph, threshold, h, act="relu", reduce=reduce)
    below = edge_messages(graph, threshold, -h, act="relu", reduce=reduce)
    count = graph.degree.to(h.dtype).unsqueeze(1) if reduce == "sum" else has_edges(graph, h.dtype)
    linear = torch.where(always, gamma, zero) * spmm(graph, h, reduce=reduce) + torch.where(always, beta, zero) * count
    return only_reached(graph, torch.addcmul(linear, size, torch.where(gamma < 0, below, above)))


def _by_relation(conv: Conv, graph: Graph, edge_type: Any) -> list[Graph]:
    if not isinstance(edge_type, Tensor) or edge_type.shape != (graph.num_edges,):
        raise Decline("edge_type is not one number per edge")

    def make() -> list[Graph]:
        sizes = (graph.num_cols, graph.num_rows)
        return [Graph.of(graph.edge_index[:, edge_type == r].contiguous(), sizes) for r in range(conv.num_relations)]

    found: list[Graph] = adjacency.kept_for(graph, ("by relation", conv.num_relations), edge_type, make)
    return found


LAYER = Layer(pyg.FiLMConv, fast, aggr=SIMPLE, message=as_wide_as_result)
