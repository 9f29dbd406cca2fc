"""What one rank holds of a graph: its own rows, the remote rows they read (the halo), and who sends what to whom.

Local ids: [interior | boundary | halo by owner]. Interior rows read own rows only; boundary rows read halo rows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from stretto.errors import expect
from stretto.graph import Graph

T = TypeVar("T")


@dataclass(eq=False)
class Piece:
    """The edges into some own rows. edge_index: sources among the part's rows, targets counted from `first`."""

    name: str
    first: int
    last: int
    num_sources: int  # interior rows need the own rows only
    edge_index: Tensor  # [2, e]
    weight: Tensor | None = None  # [e]

    @property
    def size(self) -> tuple[int, int]:
        """Sources and targets, as PyG's `size`."""
        return self.num_sources, self.last - self.first

    @cached_property
    def graph(self) -> Graph:
        """The same as a Graph [targets, sources]."""
        return Graph.of(self.edge_index, self.size)


@dataclass(eq=False)
class Part:
    """One rank's share of a graph."""

    rank: int
    own: Tensor  # [n_p] global ids, interior rows first
    interior: int  # how many of them
    halo: Tensor  # [h_p] global ids, by owner
    sends: list[tuple[int, Tensor]]  # peer, own rows it reads
    receives: list[tuple[int, int, int]]  # peer, first and last place in the halo
    edge_index: Tensor  # [2, e] all edges into own rows, local ids
    degree: Tensor  # [n_p + h_p] edges into each row in the whole graph
    loops: Tensor  # [n_p + h_p] of which from the row itself
    num_nodes: int  # of the whole graph
    _cached: dict[Any, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(edge_index: Tensor, owner: Tensor, rank: int) -> Part:
        """The share of `rank`. edge_index [2, E], owner [n]."""
        n = owner.numel()
        expect(edge_index.dim() == 2 and edge_index.size(0) == 2, f"Part: 'edge_index' is {list(edge_index.shape)}")
        source, target = (row.numpy() for row in edge_index.cpu())
        expect(not source.size or int(max(source.max(), target.max())) < n, f"Part: an edge leaves the {n} nodes")
        whose = owner.cpu().numpy()
        mine, parts = whose[target] == rank, int(whose.max()) + 1 if n else 1
        crossing = whose[source] != whose[target]
        reads_others = np.zeros(n, bool)
        reads_others[target[crossing & mine]] = True
        is_own = whose == rank
        own = np.concatenate([np.flatnonzero(is_own & ~reads_others), np.flatnonzero(is_own & reads_others)])
        local = np.full(n, -1, np.int64)
        local[own] = np.arange(own.size)
        sends, receives, halo, start = [], [], [], 0
        for peer in range(parts):
            if peer == rank:
                continue
            lacking = np.unique(source[mine & (whose[source] == peer)])
            wanted = np.unique(source[(whose[target] == peer) & (whose[source] == rank)])
            if lacking.size:
                receives.append((peer, start, start + lacking.size))
                local[lacking] = own.size + start + np.arange(lacking.size)
                halo.append(lacking)
            if wanted.size:
                sends.append((peer, torch.from_numpy(local[wanted])))
            start += lacking.size
        remote = np.concatenate(halo) if halo else np.zeros(0, np.int64)
        local_rows = np.concatenate([own, remote])
        return Part(
            rank=rank,
            own=torch.from_numpy(own),
            interior=int((is_own & ~reads_others).sum()),
            halo=torch.from_numpy(remote),
            sends=sends,
            receives=receives,
            edge_index=torch.from_numpy(np.stack([local[source[mine]], local[target[mine]]])),
            degree=torch.from_numpy(np.bincount(target, minlength=n)[local_rows]),
            loops=torch.from_numpy(np.bincount(target[source == target], minlength=n)[local_rows]),
            num_nodes=n,
        )

    def cached(self, key: Any, make: Callable[[], T]) -> T:
        """What make() gave the first time for this key."""
        if key not in self._cached:
            self._cached[key] = make()
        result: T = self._cached[key]
        return result

    def piece(self, name: str) -> Piece:
        """The edges into the "interior", "boundary" or "all" own rows."""
        return self.cached(("piece", name), lambda: self.cut(name, self.edge_index, None))

    def cut(self, name: str, edge_index: Tensor, weight: Tensor | None) -> Piece:
        """Those of the edges (local ids) that lead into the named rows."""
        own = self.own.numel()
        first, last = {"interior": (0, self.interior), "boundary": (self.interior, own), "all": (0, own)}[name]
        chosen = (edge_index[1] >= first) & (edge_index[1] < last)
        edges = edge_index[:, chosen] - torch.tensor([[0], [first]])
        sources = own if name == "interior" else own + self.halo.numel()
        return Piece(name, first, last, sources, edges, None if weight is None else weight[chosen])
