"""What a graph is like, and what a partition of it costs: degrees, skew, density, locality; halo, cut, imbalance."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from stretto.dist.partition import PARTITIONERS, cut, levels, order_of


@dataclass(frozen=True)
class GraphStats:
    """Facts about one graph. Degrees are in-degrees: the neighbours a node aggregates."""

    num_nodes: int
    num_edges: int
    self_loops: int
    isolated: int
    max_degree: int
    mean_degree: float
    degree_quantiles: dict[str, float]
    skew: float  # largest over mean degree
    density: float
    diameter_at_least: int
    diameter_at_most: int | None  # None: not connected
    reuse_distance: float  # median distance, in edges, between two uses of the same source row
    sorted_by_destination: bool


def graph_stats(edge_index: Tensor, num_nodes: int) -> GraphStats:
    """Statistics of edge_index [2, E]."""
    source, target = (row.numpy() for row in edge_index.cpu())
    m = source.size
    degree = np.bincount(target, minlength=num_nodes)
    out = np.bincount(source, minlength=num_nodes)
    marks = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "q99": 0.99, "max": 1.0}
    quantiles = {name: float(np.quantile(degree, q)) if num_nodes else 0.0 for name, q in marks.items()}
    mean = m / num_nodes if num_nodes else 0.0
    least, maximum = _diameter(source, target, num_nodes, int(np.argmax(degree + out)) if num_nodes else 0)
    return GraphStats(
        num_nodes=num_nodes,
        num_edges=m,
        self_loops=int((source == target).sum()),
        isolated=int(((degree + out) == 0).sum()),
        max_degree=int(degree.max()) if num_nodes else 0,
        mean_degree=mean,
        degree_quantiles=quantiles,
        skew=float(degree.max() / mean) if m else 0.0,
        density=m / num_nodes**2 if num_nodes else 0.0,
        diameter_at_least=least,
        diameter_at_most=maximum,
        reuse_distance=_reuse(source),
        sorted_by_destination=bool((np.diff(target) >= 0).all()) if m else True,
    )


def _reuse(source: np.ndarray) -> float:
    """Median gap between two edges with the same source, in the order given; infinite where no row is used twice."""
    if source.size < 2:
        return float("inf")
    order = np.argsort(source, kind="stable")
    gaps = np.diff(order)[np.diff(source[order]) == 0]
    return float(np.median(gaps)) if gaps.size else float("inf")


def _diameter(source: np.ndarray, target: np.ndarray, num_nodes: int, start: int) -> tuple[int, int | None]:
    """Bounds by two sweeps: the eccentricity of the farthest node found, and twice that of a central one."""
    if not num_nodes or not source.size:
        return 0, 0 if num_nodes <= 1 else None
    first = levels(source, target, num_nodes, start)
    second = levels(source, target, num_nodes, int(first.argmax()))
    return int(second.max()), None if (first < 0).any() else 2 * int(first.max())


@dataclass(frozen=True)
class Partition:
    """A split of the nodes into P parts and what it makes the parts exchange."""

    parts: int
    method: str
    rows: tuple[int, ...]  # nodes of each part
    edges: tuple[int, ...]  # edges into each part
    halo: tuple[int, ...]  # distinct remote sources of each part: rows to pull
    push: tuple[int, ...]  # distinct remote (destination, part) pairs that each part would push partial sums to
    pairs: int  # ordered pairs of parts that exchange anything
    best: int  # rows where each pair takes the smaller of pulling and pushing
    cut: int  # edges between parts
    interior: tuple[int, ...] = ()  # edges into rows of each part that need no rows of others
    blocks: tuple[float, ...] = ()  # most over mean edges, where P workers have blocks of 1.5-D, 2-D and 3-D; 0: none

    @property
    def imbalance(self) -> dict[str, float]:
        """Largest over mean, of rows, edges and halo."""

        def ratio(values: tuple[int, ...]) -> float:
            return max(values) * len(values) / sum(values) if sum(values) else 1.0

        return {"rows": ratio(self.rows), "edges": ratio(self.edges), "halo": ratio(self.halo)}

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {**asdict(self), "imbalance": self.imbalance}


def replicas(parts: int) -> int:
    """Copies of every block with which 1.5-D moves fewest words; 0: so many workers cannot be shared out evenly."""
    return min((c for c in range(2, parts) if parts % c == 0), key=lambda c: 1 / c + c / parts, default=0)


def grids(parts: int) -> tuple[tuple[int, int] | None, ...]:
    """Rows and columns of the blocks in which 1.5-D, 2-D and 3-D share out the matrix to so many workers."""
    copies, square, cube = replicas(parts), round(math.sqrt(parts)), round(parts ** (1 / 3))
    return (
        (parts // copies, copies) if copies else None,
        (square, square) if parts > 1 and square**2 == parts else None,
        (cube, cube**2) if parts > 1 and cube**3 == parts else None,
    )


def _by_part(part: np.ndarray, counts: np.ndarray, parts: int) -> tuple[int, ...]:
    return tuple(np.bincount(part, counts, minlength=parts).astype(int).tolist())


class Partitioner:
    """Splits one graph for several P; what does not depend on P is made once."""

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        self.source, self.target = (row.numpy() for row in edge_index.cpu())
        self.num_nodes = num_nodes
        self._orders: dict[str, np.ndarray] = {}  # by method
        self._uneven: dict[tuple[int, int], float] = {}  # by rows and columns of blocks

    def assign(self, parts: int, method: str) -> np.ndarray:
        """The part of every node; parts hold about as many edges each."""
        if method not in self._orders:
            self._orders[method] = order_of(self.source, self.target, self.num_nodes, method)
        return cut(self._orders[method], self.target, parts)

    def split(self, parts: int, method: str = "blocks") -> Partition:
        """The partition's numbers, counted exactly."""
        owner = self.assign(parts, method)
        of_source, of_target = owner[self.source], owner[self.target]
        crossing = of_source != of_target
        pair = of_target[crossing] * parts + of_source[crossing]
        n = max(self.num_nodes, 1)
        pulls = np.unique(pair * n + self.source[crossing])
        pushes = np.unique(pair * n + self.target[crossing])
        pairs, pulled = np.unique(pulls // n, return_counts=True)
        needs = np.zeros(n, dtype=bool)
        needs[self.target[crossing]] = True
        pushed = np.unique(pushes // n, return_counts=True)[1]  # of the same pairs
        return Partition(
            parts=parts,
            method=method,
            rows=tuple(np.bincount(owner, minlength=parts).tolist()),
            edges=tuple(np.bincount(of_target, minlength=parts).tolist()),
            halo=_by_part(pairs // parts, pulled, parts),
            push=_by_part(pairs % parts, pushed, parts),
            pairs=pairs.size,
            best=int(np.minimum(pulled, pushed).sum()),
            cut=int(crossing.sum()),
            interior=tuple(np.bincount(of_target[~needs[self.target]], minlength=parts).tolist()),
            blocks=tuple(self.uneven(*sides) if sides else 0.0 for sides in grids(parts)),
        )

    def uneven(self, rows: int, columns: int) -> float:
        """Most over mean edges of the blocks of a grid; nodes are shuffled first, as those who cut matrices do."""
        if (rows, columns) not in self._uneven:
            place = np.random.default_rng(0).permutation(self.num_nodes)
            n, m = max(self.num_nodes, 1), self.source.size
            block = place[self.target] * rows // n * columns + place[self.source] * columns // n
            maximum = int(np.bincount(block, minlength=rows * columns).max())
            self._uneven[rows, columns] = maximum * rows * columns / m if m else 1.0
        return self._uneven[rows, columns]

    def best(self, parts: int) -> Partition:
        """The partitioner with the smallest halo."""
        return min((self.split(parts, method) for method in PARTITIONERS), key=lambda p: sum(p.halo))
