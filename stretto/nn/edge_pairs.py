"""Edges that come in both directions with the same features (a bond and its length): what a network makes of features
is made once for each pair, on half the edges."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.nn import adjacency
from stretto.ops.edge_packed import Pairs

MANY = 1 << 9  # edges from which on looking for pairs costs less than it saves


@dataclass
class Features:
    """Features of edges, or of pairs of edges: [E or P, d] each. data: attr with one more column of ones."""

    pairs: Pairs | None
    attr: Tensor
    length: Tensor | None
    data: Tensor
    kept: dict[Any, Any] = field(default_factory=dict)  # what a layer derives from them


def features_of(graph: Graph, attr: Tensor, length: Tensor | None = None, *, shared: bool = True) -> Features | None:
    """What a network on edges is to see: one row a pair where both directions of every edge are alike; kept while attr
    and length stay the same, since all layers of a model get the same. shared: whether the network treats each row by
    itself. None where gradients flow to the features: each edge then has its own."""
    if torch.is_grad_enabled() and (attr.requires_grad or (length is not None and length.requires_grad)):
        return None
    look = shared and graph.num_edges >= MANY and graph.num_rows == graph.num_cols

    def make() -> Features:
        found: Any = graph.derived("pairs", lambda: _pairs(graph)) if look else None
        if found is not None:
            first, second, ways = found
            mine, far = attr[first], None if length is None else length[first]
            alike = torch.equal(mine, attr[second]) and (far is None or torch.equal(far, length[second]))  # type: ignore[index]
            if alike:
                return Features(ways, mine, far, _with_ones(mine))
        return Features(None, attr, length, _with_ones(attr))

    if length is None:
        return adjacency.kept_for(graph, ("features", look), attr, make)
    inner: Any = adjacency.kept_for(graph, ("features by length", look), attr, _holder)
    return adjacency.kept_for(inner, "length", length, make)


def _holder() -> Any:
    return types.SimpleNamespace(_derived={})


def _with_ones(attr: Tensor) -> Tensor:
    return torch.cat([attr, attr.new_ones(attr.size(0), 1)], dim=1)


def _pairs(graph: Graph) -> tuple[Tensor, Tensor, Pairs] | None:
    """(an edge, its reverse) of every pair, and the pairs; None unless each edge has exactly one reverse."""
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
    return first, second, Pairs(graph, number, graph.edge_index[:, first])
