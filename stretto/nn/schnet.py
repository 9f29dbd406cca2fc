"""CFConv, SchNet's interaction: x_j times a filter made from the edge's length. Both directions of a bond have one
length: where edges come in such pairs, the network that makes filters runs once for each pair, on half the edges."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models.schnet import ShiftedSoftplus

from stretto.graph import Graph
from stretto.nn import edges, streaming
from stretto.nn.base import Decline, record_of
from stretto.nn.gin import hooked
from stretto.ops import gather_rows
from stretto.ops.edge_messages import edge_messages

MANY = 1 << 9  # edges from which on looking for pairs costs less than it saves


def fast(conv: Any, x: Tensor, edge_index: Any, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
    """What CFConv.forward computes."""
    x, _, _ = edges.ends(x)
    edges.check_aggr(conv, *edges.SUM)
    graph = edges.plain_graph(conv, edge_index, x, x)
    attr = edges.one_per_edge(graph, edge_attr, x)
    length = edges.one_per_edge(graph, edge_weight, x, "edge_weight")
    if attr.dim() != 2 or length.dim() != 1:
        raise Decline("edge_attr is not a matrix, or edge_weight not a vector")
    pairs = _pairs_alike(conv, graph, length, attr)
    if pairs is None:
        record_of(conv).plan = "sum of W_e X_j, one pass"
        filters = _filters(conv, length, attr)
    else:
        record_of(conv).plan = "sum of W_e X_j, one pass; one filter for both directions"
        first, number = pairs
        filters = gather_rows(_filters(conv, length[first], attr[first]), number)
    out = edge_messages(graph, None, conv.lin1(x), None, None, None, filters, act="identity", act2="identity")
    return conv.lin2(out)


def _filters(conv: Any, length: Tensor, attr: Tensor) -> Tensor:
    """W of every edge, as stock makes it. [E, filters]."""
    window = 0.5 * (torch.cos(length * math.pi / conv.cutoff) + 1.0)
    return conv.nn(attr) * window.view(-1, 1)


def _pairs_alike(conv: Any, graph: Graph, length: Tensor, attr: Tensor) -> tuple[Tensor, Tensor] | None:
    """(one edge of each pair, the pair of each edge) where both directions have the same features, else None."""
    learns = torch.is_grad_enabled() and (length.requires_grad or attr.requires_grad)  # each edge has its own gradient
    if learns or graph.num_edges < MANY or graph.num_rows != graph.num_cols:
        return None
    if type(conv.nn) is not torch.nn.Sequential or hooked(conv.nn):
        return None
    softplus = [m for m in conv.nn if type(m) is ShiftedSoftplus and not hooked(m)]
    if not streaming.row_by_row(m for m in conv.nn if m not in softplus):
        return None
    pairs: tuple[Tensor, Tensor, Tensor] | None = graph.derived("pairs", lambda: _pairs(graph))
    if pairs is None:
        return None
    first, second, number = pairs
    if not torch.equal(length[first], length[second]) or not torch.equal(attr[first], attr[second]):
        return None
    return first, number


def _pairs(graph: Graph) -> tuple[Tensor, Tensor, Tensor] | None:
    """(an edge, its reverse) of every pair, the pair of every edge; None unless each edge has exactly one reverse."""
    source, target = graph.edge_index
    n = max(graph.num_rows, 1)
    key, back = source * n + target, target * n + source
    ordered, place = key.sort()
    if bool((ordered[1:] == ordered[:-1]).any()):
        return None
    at = torch.searchsorted(ordered, back).clamp(max=ordered.numel() - 1)
    if not torch.equal(ordered[at], back):
        return None
    reverse = place[at]
    first = (source <= target).nonzero().view(-1)
    number = torch.empty_like(source)
    number[first] = torch.arange(first.numel(), device=first.device)
    second = reverse[first]
    number[second] = number[first]
    return first, second, number
