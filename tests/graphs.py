"""The adversarial graph zoo: every shape of graph that has broken a sparse kernel somewhere.

Each entry gives an edge_index [2, E] and (num_src, num_dst). Seeds are fixed: the zoo is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto import Graph

Edges = tuple[Tensor, tuple[int, int]]


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> Tensor:
    """Uniform pairs in no order, duplicates and self-loops as they come. [2, num_edges]."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(num_src, (num_edges,), generator=generator)
    target = torch.randint(num_dst, (num_edges,), generator=generator)
    return torch.stack([source, target])


def symmetric_edges(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    """Both directions of every pair, each once, sorted by destination and then source."""
    pairs = random_edges(num_nodes, num_nodes, num_edges, seed)
    both = torch.cat([pairs, pairs.flip(0)], dim=1)
    keys = (both[1] * num_nodes + both[0]).unique()
    return torch.stack([keys % num_nodes, keys // num_nodes])


def _no_nodes() -> Edges:
    return torch.empty(2, 0, dtype=torch.long), (0, 0)


def _one_node() -> Edges:
    return torch.empty(2, 0, dtype=torch.long), (1, 1)


def _one_loop() -> Edges:
    return torch.zeros(2, 1, dtype=torch.long), (1, 1)


def _empty() -> Edges:
    return torch.empty(2, 0, dtype=torch.long), (7, 7)


def _isolated() -> Edges:
    return torch.tensor([[1, 5, 5, 1], [3, 3, 6, 6]]), (9, 9)


def _self_loops() -> Edges:
    loops = torch.arange(6)
    return torch.cat([torch.stack([loops, loops]), random_edges(6, 6, 10, 1)], dim=1), (6, 6)


def _duplicates() -> Edges:
    return random_edges(4, 4, 9, 2).repeat(1, 3), (4, 4)


def _directed() -> Edges:
    return torch.stack([torch.arange(9), torch.arange(9) + 1]), (10, 10)


def _wide() -> Edges:
    return random_edges(23, 5, 40, 3), (23, 5)


def _tall() -> Edges:
    return random_edges(5, 23, 40, 4), (5, 23)


def _sources_only() -> Edges:
    return torch.empty(2, 0, dtype=torch.long), (4, 0)


def _sorted() -> Edges:
    edges = random_edges(12, 12, 50, 5)
    return edges[:, edges[1].argsort(stable=True)], (12, 12)


def _unsorted() -> Edges:
    return random_edges(12, 12, 50, 6), (12, 12)


def _symmetric() -> Edges:
    return symmetric_edges(15, 30, 7), (15, 15)


def _symmetric_unsorted() -> Edges:
    edges = symmetric_edges(15, 30, 8)
    return edges[:, torch.randperm(edges.size(1), generator=torch.Generator().manual_seed(8))], (15, 15)


def _hub() -> Edges:
    """Row 3 receives, and node 5 sends, more edges than one task holds: both are cut into pieces."""
    generator = torch.Generator().manual_seed(9)
    inward = torch.stack([torch.randint(40, (10_500,), generator=generator), torch.full((10_500,), 3)])
    outward = torch.stack([torch.full((5_000,), 5), torch.randint(40, (5_000,), generator=generator)])
    edges = torch.cat([inward, outward, random_edges(40, 40, 100, 9)], dim=1)
    return edges[:, torch.randperm(edges.size(1), generator=generator)], (40, 40)


SMALL: dict[str, Callable[[], Edges]] = {
    "no_nodes": _no_nodes,
    "one_node": _one_node,
    "one_loop": _one_loop,
    "empty": _empty,
    "isolated": _isolated,
    "self_loops": _self_loops,
    "duplicates": _duplicates,
    "directed": _directed,
    "wide": _wide,
    "tall": _tall,
    "sources_only": _sources_only,
    "sorted": _sorted,
    "unsorted": _unsorted,
    "symmetric": _symmetric,
    "symmetric_unsorted": _symmetric_unsorted,
}
ZOO: dict[str, Callable[[], Edges]] = {**SMALL, "hub": _hub}


def graph_of(name: str) -> Graph:
    """A zoo entry as a Graph."""
    edge_index, sizes = ZOO[name]()
    return Graph.of(edge_index, sizes)


def dense(graph: Graph, weight: Tensor | None = None) -> Tensor:
    """The matrix of a graph in fp64, duplicate edges added up. [n, m]."""
    source, target = graph.edge_index
    values = torch.ones(graph.num_edges, dtype=torch.float64) if weight is None else weight.double()
    matrix = torch.zeros(graph.num_rows, graph.num_cols, dtype=torch.float64)
    return matrix.index_put((target, source), values, accumulate=True)
