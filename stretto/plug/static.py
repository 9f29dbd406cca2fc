"""Static graphs: x [batch, nodes, channels] on one edge_index. The layer runs once, on as many copies of the graph.

The copies lie side by side in one edge_index, made once and kept with the graph: 16 bytes an edge and copy, where stock
builds every copy's messages. For layers of which rows meet along edges only, and that stock itself runs on such an x.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from stretto.graph.formats import plain
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline
from stretto.layers.layer import Conv, Fast


def on_copies(fast: Fast) -> Fast:
    """fast(conv, x [n, i], edge_index, edge_weight=None) as it is, and for x [b, n, i] on b copies of the graph."""

    @functools.wraps(fast)
    def run(conv: Conv, x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() == 3:
            return _on_copies(fast, conv, x, *args, **kwargs)
        return fast(conv, x, *args, **kwargs)

    return run


def _on_copies(
    fast: Fast, conv: Conv, x: Tensor, edge_index: Any, edge_weight: Any = None, *rest: Any, **more: Any
) -> Tensor:
    if any(value is not None for value in (*rest, *more.values())):
        raise Decline("a static graph with further arguments")
    if conv.node_dim != -2 or not edges.is_plain(edge_index) or not x.numel():
        raise Decline("a static graph whose nodes are not x's last but one dimension, or a sparse matrix")
    if getattr(conv, "cached", False):
        raise Decline("a static graph with cached=True")
    count, n, channels = x.shape
    graph = adjacency.graph_of(conv, edge_index, n, n)
    copies = adjacency.kept_for(graph, ("copies", count), edge_index, lambda: _copied(plain(edge_index), count, n))
    weights = () if edge_weight is None else (_repeated(graph, edge_weight, count),)
    out: Tensor = fast(conv, x.reshape(count * n, channels), copies, *weights)
    return out.view(count, n, out.size(1))


def _copied(edge_index: Tensor, count: int, n: int) -> Tensor:
    """The edges of `count` copies of a graph of n nodes, one after the other. [2, E] -> [2, count * E]."""
    first = n * torch.arange(count, dtype=edge_index.dtype, device=edge_index.device)
    return (edge_index.unsqueeze(1) + first.view(1, count, 1)).reshape(2, -1)


def _repeated(graph: Any, edge_weight: Any, count: int) -> Tensor:
    """The weights of all copies' edges. [E] -> [count * E]."""
    if not isinstance(edge_weight, Tensor) or edge_weight.shape != (graph.num_edges,):
        raise Decline("a static graph with an edge_weight that is not one number an edge")
    found: Tensor = adjacency.kept_for(
        graph, ("copies of weights", count), edge_weight, lambda: edge_weight.repeat(count)
    )
    return found
