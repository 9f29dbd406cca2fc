"""Random graph families, seeded: the same arguments give the same graph on every machine.

All give edge_index int64 [2, E] (row 0 source, row 1 destination), sorted, without duplicates or self-loops; all but
`hub` store both directions of every edge.
"""

import numpy as np
import torch
from torch import Tensor

from stretto.errors import expect

# Chances of the four quarters at each level of R-MAT, those of the Graph500 benchmark. rmat(17, 1_200_000) then has
# 131,072 nodes, about 2.2 M edges, a largest degree near 11,000 and about 51,000 nodes without an edge.
QUARTERS = (0.57, 0.19, 0.19, 0.05)


def rmat(scale: int, edges: int, *, seed: int = 0) -> tuple[Tensor, int]:
    """Power-law graph of 2**scale nodes from `edges` draws; hubs have the low ids. -> (edge_index, num_nodes)."""
    expect(1 <= scale <= 30, f"rmat: 'scale' is {scale}, wanted 1 to 30")
    expect(edges >= 0, f"rmat: 'edges' is {edges}, wanted at least 0")
    rng = np.random.default_rng(seed)
    a, b, c, _ = QUARTERS
    source = np.zeros(edges, np.int64)
    destination = np.zeros(edges, np.int64)
    for _ in range(scale):
        draw = rng.random(edges)
        lower = draw >= a + b
        right = ((draw >= a) & ~lower) | (draw >= a + b + c)
        source += source + lower
        destination += destination + right
    return _undirected(source, destination, 1 << scale), 1 << scale


def er(num_nodes: int, edges: int, *, seed: int = 0) -> tuple[Tensor, int]:
    """Uniformly random graph from `edges` draws of a pair. -> (edge_index, num_nodes)."""
    expect(num_nodes >= 1, f"er: 'num_nodes' is {num_nodes}, wanted at least 1")
    expect(edges >= 0, f"er: 'edges' is {edges}, wanted at least 0")
    rng = np.random.default_rng(seed)
    source, destination = rng.integers(0, num_nodes, (2, edges))
    return _undirected(source, destination, num_nodes), num_nodes


def star(num_nodes: int) -> tuple[Tensor, int]:
    """Node 0 joined to all others. -> (edge_index, num_nodes)."""
    expect(num_nodes >= 1, f"star: 'num_nodes' is {num_nodes}, wanted at least 1")
    leaves = np.arange(1, num_nodes)
    return _undirected(np.zeros_like(leaves), leaves, num_nodes), num_nodes


def grid(side: int) -> tuple[Tensor, int]:
    """side x side nodes, each joined to its up to four neighbours. -> (edge_index, num_nodes)."""
    expect(side >= 1, f"grid: 'side' is {side}, wanted at least 1")
    ids = np.arange(side * side).reshape(side, side)
    source = np.concatenate([ids[:, :-1].ravel(), ids[:-1].ravel()])
    destination = np.concatenate([ids[:, 1:].ravel(), ids[1:].ravel()])
    return _undirected(source, destination, side * side), side * side


def hub(num_nodes: int, edges: int, *, share: float = 0.3, seed: int = 0) -> tuple[Tensor, int]:
    """`edges` directed edges, a `share` of them into node 0, the rest uniformly random. -> (edge_index, num_nodes).

    The row of node 0 is what a split of the work by rows cannot balance.
    """
    in_hub = round(share * edges)
    rest = edges - in_hub
    expect(0 <= in_hub < num_nodes, f"hub: {in_hub} edges into one node want more nodes than 'num_nodes' = {num_nodes}")
    expect(2 * rest <= (num_nodes - 1) ** 2, f"hub: {rest} random edges are too many for {num_nodes} nodes")
    rng = np.random.default_rng(seed)
    spokes = 1 + rng.permutation(num_nodes - 1)[:in_hub]
    keys = np.empty(0, np.int64)
    while keys.size < rest:
        source, destination = rng.integers(0, num_nodes, (2, 2 * rest))
        fits = (destination != 0) & (source != destination)
        keys = np.union1d(keys, (source * num_nodes + destination)[fits])
    keys = rng.permutation(keys)[:rest]
    keys = np.sort(np.concatenate([keys, spokes * num_nodes]))
    return torch.from_numpy(np.stack(np.divmod(keys, num_nodes))), num_nodes


def _undirected(source: np.ndarray, destination: np.ndarray, num_nodes: int) -> Tensor:
    """Both directions of every pair, once, sorted by source; self-loops dropped."""
    keep = source != destination
    source, destination = source[keep], destination[keep]
    keys = np.concatenate([source * num_nodes + destination, destination * num_nodes + source])
    return torch.from_numpy(np.stack(np.divmod(np.unique(keys), num_nodes)))
