"""Random walks, of first order or node2vec's (second order, with p and q), over a CSR by source.

Every step of all walks is a few gathers over whole tensors. `install()` offers them under the name that PyG's Node2Vec
calls, torch.ops.pyg.random_walk, where pyg-lib is not there to define it; part of stretto.patch().
"""

import importlib
import numbers
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from stretto.errors import expect, fail
from stretto.loader import checks

WHO = "random_walk"
LEAST, MOST = 1e-300, 1e300  # p and q, whose inverses are numbers then
MOST_SQUARED = 3_000_000_000  # nodes: an edge is one number below their square
ROUNDS = 32  # of draws that may be refused, per step
MOST_EDGES = 1 << 22  # looked at together where draws were refused
_NODE2VEC = "torch_geometric.nn.models.node2vec"
_SCHEMA = "random_walk(Tensor rowptr, Tensor col, Tensor seed, int walk_length, float p=1.0, float q=1.0) -> Tensor"
_offered: Any = None
# rowptr -> the col and the states of both for which it was checked.
_known: MutableMapping[Tensor, tuple[Any, Any]] = WeakIdKeyDictionary()


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
    rowptr, col = _checked(rowptr, col)
    n = rowptr.numel() - 1
    start = checks.indices(WHO, "start", start, n)
    checks.count(WHO, "walk_length", walk_length)
    for name, value in (("p", p), ("q", q)):
        if not (isinstance(value, numbers.Real) and LEAST <= value <= MOST):
            fail(f"{WHO}: '{name}' is {value!r}, wanted a number from {LEAST} to {MOST}")
    walks = torch.empty(walk_length + 1, start.numel(), dtype=torch.int64)
    walks[0] = start
    first_order = p == q == 1 or col.numel() == 0
    edges = None if first_order else torch.repeat_interleave(rowptr.diff(), output_size=col.numel()) * n + col
    if edges is not None and n >= MOST_SQUARED:
        fail(f"{WHO}: 'rowptr' is of {n} nodes, wanted fewer than {MOST_SQUARED} where 'p' or 'q' is not 1")
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
        for _ in range(ROUNDS):  # draw uniformly, and keep a draw with its share of the largest weight
            if not left.numel():
                break
            drawn = _step(rowptr, col, at[left], generator)
            weight = _weights(edges, n, before[left], drawn, p, q) / max(1 / p, 1.0, 1 / q)
            alone = rowptr[at[left] + 1] == rowptr[at[left]]
            kept = (torch.rand(left.numel(), generator=generator, dtype=torch.float64) < weight) | alone
            fresh[left[kept]] = drawn[kept]
            left = left[~kept]
        for some in _of_few_edges(left, rowptr, at):  # what is refused again and again is drawn from all its neighbours
            fresh[some] = _draw_by_weight(rowptr, col, edges, before[some], at[some], p, q, generator)
        walks[i + 1] = fresh
    return walks.t().contiguous()


def _checked(rowptr: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    """Both as int64 in memory, once they are known to be a CSR; looked at again only where they were changed."""
    now = (checks.state(rowptr), checks.state(col)) if isinstance(rowptr, Tensor) and isinstance(col, Tensor) else None
    counted = now is not None and not rowptr.is_inference() and not col.is_inference()
    known = _known.get(rowptr) if counted else None
    pointers, columns = checks.indices(WHO, "rowptr", rowptr), checks.indices(WHO, "col", col)
    if known is not None and known[0]() is col and known[1] == now:
        return pointers, columns
    n = pointers.numel() - 1
    checks.pointers(WHO, "rowptr", pointers, max(n, 0), columns.numel())
    checks.in_range(WHO, "col", columns, n)
    if counted:
        _known[rowptr] = weakref.ref(col), now
    return pointers, columns


def _step(rowptr: Tensor, col: Tensor, at: Tensor, generator: torch.Generator | None) -> Tensor:
    """A uniform neighbour of every node; the node itself where it has none."""
    begin = rowptr[at]
    degree = rowptr[at + 1] - begin
    place = (torch.rand(at.numel(), generator=generator, dtype=torch.float64) * degree).long()
    if col.numel() == 0:
        return at.clone()
    place = torch.minimum(place, degree - 1).clamp_(min=0)  # a product may be rounded up to the degree
    drawn = col[(begin + place).clamp(max=col.numel() - 1)]
    return torch.where(degree > 0, drawn, at)


def _of_few_edges(left: Tensor, rowptr: Tensor, at: Tensor) -> Iterator[Tensor]:
    """The walks `left` in groups whose nodes have not too many edges between them, or one walk by itself."""
    total = torch.cumsum(rowptr[at[left] + 1] - rowptr[at[left]], 0)
    while left.numel():
        size = max(1, int(torch.searchsorted(total, MOST_EDGES, right=True)))
        yield left[:size]
        left, total = left[size:], total[size:] - total[size - 1]


def _draw_by_weight(
    rowptr: Tensor, col: Tensor, edges: Tensor, before: Tensor, at: Tensor, p: float, q: float, generator: Any
) -> Tensor:
    """A neighbour of every node by node2vec's weights, however small: the first of clocks that tick at these rates.

    Every node has neighbours. Times are compared by their logarithm, since rates may be 1e-300.
    """
    degree = rowptr[at + 1] - rowptr[at]
    walk = torch.repeat_interleave(degree)
    first = torch.cumsum(degree, 0) - degree
    drawn = col[rowptr[at][walk] + torch.arange(walk.numel()) - first[walk]]
    wait = torch.empty(walk.numel(), dtype=torch.float64).exponential_(generator=generator).log_()
    wait -= _weights(edges, rowptr.numel() - 1, before[walk], drawn, p, q).log_()
    soonest = torch.full((at.numel(),), torch.inf, dtype=torch.float64).scatter_reduce_(0, walk, wait, "amin")
    chosen = (wait == soonest[walk]).nonzero().view(-1)
    return torch.empty_like(at).index_copy_(0, walk[chosen], drawn[chosen])


def _weights(edges: Tensor, n: int, before: Tensor, drawn: Tensor, p: float, q: float) -> Tensor:
    """node2vec's weight of each draw, by its distance from the node before."""
    key = before * n + drawn
    found = edges[torch.searchsorted(edges, key).clamp(max=edges.numel() - 1)] == key
    weight = torch.full((drawn.numel(),), 1 / q, dtype=torch.float64).masked_fill_(found, 1.0)
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
