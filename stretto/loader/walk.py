"""Random walks, of first order or node2vec's (second order, with p and q), over a CSR by source.

Every step of all walks is a few gathers over whole tensors. `install()` offers them under the name that PyG's Node2Vec
calls, torch.ops.pyg.random_walk, where pyg-lib is not there to define it; part of stretto.patch().
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from stretto.errors import expect
from stretto.kernels import build

_NODE2VEC = "torch_geometric.nn.models.node2vec"
_SCHEMA = "random_walk(Tensor rowptr, Tensor col, Tensor seed, int walk_length, float p=1.0, float q=1.0) -> Tensor"
_offered: Any = None


def random_walk(
    rowptr: Tensor,
    col: Tensor,
    start: Tensor,
    walk_length: int,
    p: float = 1.0,
    q: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Nodes of walks along edges (row -> col), the start first. start [W] -> [W, walk_length + 1].

    A neighbour is drawn uniformly where p = q = 1; otherwise with weight 1/p for the node the walk came from, 1 for its
    neighbours and 1/q for all others, which needs the columns of every row in ascending order. A walk stays at a node
    without edges. rowptr [n + 1], col [edges].
    """
    n = rowptr.numel() - 1
    expect(walk_length >= 0, f"random_walk: 'walk_length' is {walk_length}, wanted at least 0")
    expect(p > 0 and q > 0, f"random_walk: 'p' and 'q' are {p} and {q}, wanted numbers above 0")
    if start.numel():
        least, most = build.minmax(start)
        expect(
            least >= 0 and most < n,
            f"random_walk: 'start' has node {most if least >= 0 else least}, wanted 0 <= node < {n}",
        )
    walks = torch.empty(walk_length + 1, start.numel(), dtype=torch.int64)
    walks[0] = start
    first_order = p == q == 1 or col.numel() == 0
    edges = None if first_order else torch.repeat_interleave(rowptr.diff(), output_size=col.numel()) * n + col
    expect(
        edges is None or bool((edges[1:] >= edges[:-1]).all()),
        "random_walk: 'col' is not in ascending order within every row, which 'p' and 'q' need",
    )
    for i in range(walk_length):
        if edges is None or i == 0:
            walks[i + 1] = _step(rowptr, col, walks[i], generator)
            continue
        at, before, fresh = walks[i], walks[i - 1], walks[i].clone()
        left = torch.arange(at.numel())
        while left.numel():  # draw uniformly, and keep a draw with its share of the largest weight
            drawn = _step(rowptr, col, at[left], generator)
            weight = _weights(edges, n, before[left], drawn, p, q) / max(1 / p, 1.0, 1 / q)
            alone = rowptr[at[left] + 1] == rowptr[at[left]]
            kept = (torch.rand(left.numel(), generator=generator, dtype=torch.float64) < weight) | alone
            fresh[left[kept]] = drawn[kept]
            left = left[~kept]
        walks[i + 1] = fresh
    return walks.t().contiguous()


def _step(rowptr: Tensor, col: Tensor, at: Tensor, generator: torch.Generator | None) -> Tensor:
    """A uniform neighbour of every node; the node itself where it has none."""
    begin = rowptr[at]
    degree = rowptr[at + 1] - begin
    place = (torch.rand(at.numel(), generator=generator, dtype=torch.float64) * degree).long()
    if col.numel() == 0:
        return at.clone()
    drawn = col[(begin + place).clamp(max=col.numel() - 1)].long()
    return torch.where(degree > 0, drawn, at)


def _weights(edges: Tensor, n: int, before: Tensor, drawn: Tensor, p: float, q: float) -> Tensor:
    """node2vec's weight of each draw, by its distance from the node before."""
    key = before * n + drawn
    found = edges[torch.searchsorted(edges, key).clamp(max=edges.numel() - 1)] == key
    weight = torch.where(found, 1.0, 1 / q).double()
    return weight.masked_fill_(drawn == before, 1 / p)


def install() -> None:
    """Let PyG's Node2Vec walk without pyg-lib. Calling it twice is calling it once."""
    global _offered
    if _offered is not None or hasattr(torch.ops.pyg, "random_walk"):
        return
    library = torch.library.Library("pyg", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("random_walk", random_walk, "CPU")
    module: Any = importlib.import_module(_NODE2VEC)
    _offered = library, module.WITH_PYG_LIB
    module.WITH_PYG_LIB = True


def remove() -> None:
    """Take the offer back."""
    global _offered
    if _offered is None:
        return
    library, before = _offered
    module: Any = importlib.import_module(_NODE2VEC)
    module.WITH_PYG_LIB, _offered = before, None
    library._destroy()
