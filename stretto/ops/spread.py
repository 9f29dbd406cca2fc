"""spread: several places for what a node's edges add to it, where there are so many that one sum would lose digits.

Edges that come in blocks in the order of their destinations leave their sources in no order, so that a source's
gradients are added one after the other as they come. A source of many edges has a place for some of them each; its
places are added up at last, in fp64. Others have the one they would have anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.graph import Graph

MANY = 512  # edges from which on a node has several places: few have so many
ADDED = 256  # edges of a place, about


@dataclass(frozen=True, eq=False)
class Spread:
    """first, count [m]: of a node's places. nodes [H]: those of several; owner [S]: which of them a place belongs to.

    Their places come after one for every node. A count is odd: every second edge of a node, or every fourth, may be
    what is summed, and they are to meet all its places.
    """

    first: Tensor
    count: Tensor
    nodes: Tensor
    owner: Tensor

    @property
    def num_places(self) -> int:
        """One for every node and the several of some."""
        return self.first.numel() + self.owner.numel()

    def places(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Where edges, by number, add to their nodes. [B], [B] -> [B]."""
        return self.first[nodes] + edges % self.count[nodes]

    def collected(self, sums: Tensor) -> Tensor:
        """The sums of all nodes; overwrites. [num_places, ...] -> [m, ...]."""
        out, several = sums[: self.first.numel()], sums[self.first.numel() :]
        wide = several.new_zeros(self.nodes.numel(), *several.shape[1:], dtype=torch.float64)
        return out.index_copy_(0, self.nodes, wide.index_add_(0, self.owner, several.double()).to(out.dtype))


def spread_of(graph: Graph) -> Spread | None:
    """The places of a graph's sources; None: one each. Kept."""
    result: Spread | None = graph.derived("spread", lambda: _spread(graph))
    return result


def _spread(graph: Graph) -> Spread | None:
    col = graph.edge_csr.col
    if col is None or graph.num_edges < MANY:
        return None
    degree = torch.bincount(col, minlength=graph.num_cols)
    nodes = (degree >= MANY).nonzero().flatten()
    if not nodes.numel():
        return None
    counts = degree[nodes] // ADDED | 1
    ends = counts.cumsum(0)
    first, count = torch.arange(graph.num_cols, device=col.device), torch.ones_like(degree)
    first[nodes], count[nodes] = graph.num_cols + ends - counts, counts
    owner = torch.repeat_interleave(torch.arange(nodes.numel(), device=col.device), counts)
    return Spread(first, count, nodes, owner)
