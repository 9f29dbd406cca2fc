"""From a small probe to any size: name the sizes in a trace, then put symbols or other numbers in their place.

A probe is the user's data cut down to sizes that cannot be mistaken for one another or for a width of the model. Its
trace, with n, m, ... written over those sizes, gives work, bytes and memory of the same step on the real graph without
running it there: that is how a step that does not fit can be foreseen.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from stretto.errors import fail
from stretto.observe.nested import mapped
from stretto.observe.specs import Matrix, Size, Spec, matrices, tensors
from stretto.observe.trace import OpRecord, Trace
from stretto.observe.workload import train_mask

NAMES = {
    "n": "nodes",
    "m": "edges as given",
    "a": "edges without self-loops",
    "e": "edges with one self-loop per node: a + n",
    "l": "self-loops: m - a",
    "t": "nodes in the train mask",
    "g": "graphs in the batch",
}
SYMBOLS = {name: sympy.Symbol(name, positive=True, integer=True) for name in NAMES}


@dataclass(frozen=True)
class Sizes:
    """The sizes that a step on a graph can depend on. g: 0 without a vector that says which graph a node is in."""

    n: int
    m: int
    a: int
    e: int
    t: int
    g: int = 0
    nodes_by_type: tuple[int, ...] = ()
    edges_by_type: tuple[int, ...] = ()

    @staticmethod
    def of(data: Any) -> Sizes:
        """Sizes of a PyG Data (or of anything with x, edge_index and maybe train_mask)."""
        edges = getattr(data, "edge_index", None)
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            fail(
                "analyze: 'data' has no edge_index tensor; pass PyG data that has one, or look at it by stretto.profile"
            )
        n = int(data.num_nodes)
        loops = int((edges[0] == edges[1]).sum())
        a = edges.size(1) - loops
        mask = train_mask(data)
        return Sizes(n, edges.size(1), a, a + n, 0 if mask is None else int(mask.sum()), _num_graphs(data, n))

    @property
    def nodes(self) -> set[int]:
        """Numbers of rows that a tensor over nodes may have."""
        return {self.n, *self.nodes_by_type}

    @property
    def edges(self) -> set[int]:
        """Numbers of rows that a tensor over edges may have."""
        return {self.m, self.a, self.e, *self.edges_by_type}

    def numbers(self) -> dict[str, int]:
        """The sizes by the letters of NAMES."""
        return {**{name: getattr(self, name) for name in NAMES if name != "l"}, "l": self.m - self.a}

    def table(self, others: Mapping[str, Size]) -> Table:
        """What stands there for the numbers here. The larger numbers are tried first."""
        mine = self.numbers()
        known = [name for name in ("e", "m", "a", "n", "l", "t", "g") if name in others and mine[name]]
        ends = {mine[name] + 1: others[name] + 1 for name in known if name in ("n", "g")}
        return Table({mine[name]: others[name] for name in known}, ends)


class Table(NamedTuple):
    """Number -> what stands for it."""

    sizes: dict[int, Size]  # or for as many times as much
    ends: dict[int, Size]  # where pointers into rows end: one more than the rows


def _num_graphs(data: Any, n: int) -> int:
    batch = getattr(data, "batch", None)
    if not isinstance(batch, Tensor) or batch.numel() != n or not n:
        return 0
    return int(getattr(data, "num_graphs", 0) or int(batch.max()) + 1)


# n, a and m are prime, so that none divides a width of a sane model; t and g are prime too, and self-loops, of which
# there is an even number then, are twice a prime.
PROBES = (
    Sizes(61, 347, 313, 374, 23, 19),
    Sizes(73, 431, 409, 482, 29, 17),
    Sizes(97, 587, 541, 638, 31, 13),
    Sizes(83, 457, 419, 502, 37, 11),
    Sizes(101, 523, 461, 562, 41, 17),
)


def usable(data: Any, widths: set[int]) -> list[Sizes]:
    """The probes none of whose sizes divides one of the widths."""
    batched = bool(_num_graphs(data, int(data.num_nodes)))
    sizes = [one if batched else dataclasses.replace(one, g=0) for one in PROBES]
    return [
        one
        for one in sizes
        if not any(w % size == 0 for w in widths if w for size in one.table(SYMBOLS).sizes)
        and not widths & one.table(SYMBOLS).ends.keys()
    ]


def shrunk(data: Any, sizes: Sizes) -> Any:
    """The data cut to these sizes: rows from its start, random edges in the order that its own are in."""
    small = copy.copy(data)
    generator = torch.Generator().manual_seed(0)
    n, m, graphs = data.num_nodes, data.edge_index.size(1), _num_graphs(data, data.num_nodes)
    edges = _edges(sizes, generator)
    if _by_target(data.edge_index):
        edges = edges[:, (edges[1] * sizes.n + edges[0]).argsort()]
    for name in list(small.keys()) if callable(small.keys) else list(small.keys):
        value = small[name]
        if name == "edge_index" or not isinstance(value, Tensor) or not value.dim():
            continue
        if data.is_edge_attr(name) and value.size(0) == m:
            small[name] = _rows(value, sizes.m)
        elif value.size(0) == n:
            small[name] = _rows(value, sizes.n)
        elif graphs and value.size(0) == graphs:
            small[name] = _rows(value, sizes.g)
    small.edge_index = edges.to(data.edge_index.device)
    small.num_nodes = sizes.n
    if graphs:
        _batch(small, sizes)
    if train_mask(data) is not None:
        small.train_mask = torch.arange(sizes.n, device=edges.device) < sizes.t
    y = getattr(small, "y", None)
    if isinstance(y, Tensor) and not y.is_floating_point():
        small.y = y.clamp(min=0)
    return small


def _batch(small: Any, sizes: Sizes) -> None:
    """Nodes in graphs of about equal size."""
    batch = torch.arange(sizes.n, device=small.edge_index.device) * sizes.g // sizes.n
    small.batch = batch
    if isinstance(getattr(small, "ptr", None), Tensor):
        small.ptr = torch.searchsorted(batch, torch.arange(sizes.g + 1, device=batch.device))
    if hasattr(small, "_num_graphs"):
        small._num_graphs = sizes.g


def _by_target(edge_index: Tensor) -> bool:
    """Whether the edges are in the order of their destinations, which some aggregations ask for."""
    target = edge_index[1]
    return bool((target[1:] >= target[:-1]).all())


def _edges(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Make m distinct random edges, m - a of them self-loops; every node has at least one edge."""
    codes = torch.randperm(sizes.n * sizes.n, generator=generator)
    source, target = codes // sizes.n, codes % sizes.n
    chosen = codes[source != target][: sizes.a]
    loops = torch.arange(sizes.m - sizes.a) * (sizes.n + 1)
    codes = torch.cat([chosen, loops]).sort().values
    return torch.stack([codes // sizes.n, codes % sizes.n])


def _rows(value: Tensor, count: int) -> Tensor:
    if value.layout != torch.strided:
        value = value.to_dense()
    return value[torch.arange(count, device=value.device) % value.size(0)]


def rescale(trace: Trace, table: Table) -> Trace:
    """The trace with every size found in the table (or a multiple of one) replaced, and its costs counted anew."""
    bigger = Trace(classes=trace.classes, takes=[], gives=list(trace.gives))
    for op in trace.ops:
        new = dataclasses.replace(
            op,
            args=_put(op.args, table),
            kwargs=_put(op.kwargs, table),
            out=_put(op.out, table),
            seconds=0.0,
        )
        new.cost = new.recount()
        bigger.ops.append(new)
    for index, number, spec, size in trace.takes:
        spec = None if spec is None else _put(spec, table)
        bigger.takes.append((index, number, spec, size if spec is None else spec.numel * spec.itemsize))
    if all(isinstance(value, int) for value in table.sizes.values()):
        bigger.peak_bytes = peak(bigger)
    return bigger


def _put(value: Any, table: Table) -> Any:
    def anew(leaf: Any) -> Any:
        if isinstance(leaf, Spec):
            return dataclasses.replace(leaf, shape=tuple(_size(s, table) for s in leaf.shape))
        if isinstance(leaf, Matrix):
            sizes = {name: _size(getattr(leaf, name), table) for name in ("num_rows", "num_cols", "num_edges")}
            return dataclasses.replace(leaf, **sizes)
        return leaf

    return mapped(value, anew)


def _size(size: Size, table: Table) -> Size:
    for number, other in table.sizes.items():
        if size and size % number == 0:
            return other * (size // number)
    return table.ends.get(size, size)


def difference(first: Trace, second: Trace) -> str:
    """Where two traces of one step are not the same ops on the same sizes, in words; empty: nowhere."""
    for one, other in zip(first.ops, second.ops, strict=False):
        if (one.name, one.phase) != (other.name, other.phase):
            return f"{other.name} runs where {one.name} did"
        if _shapes(one) != _shapes(other):
            return f"{one.name} of {one.path or 'the model'} has sizes that follow neither nodes nor edges"
    if len(first.ops) != len(second.ops):
        return f"the step has {len(first.ops)} ops on one graph and {len(second.ops)} on another"
    return "" if peak(first) == peak(second) else "memory follows neither nodes nor edges"


def _shapes(op: OpRecord) -> list[Any]:
    inputs = (op.args, op.kwargs, op.out)
    sparse = [(m.num_rows, m.num_cols, m.num_edges) for m in matrices(inputs)]
    return [*(spec.shape for spec in tensors(inputs)), *sparse]


def peak(trace: Trace) -> int:
    """Most bytes alive at once, from what the trace took and gave back and what its kernels took meanwhile."""
    events: list[tuple[int, int, int]] = []
    sizes = {}
    for index, number, _, size in trace.takes:
        sizes[number] = size
        events.append((index, 1, size))
    # What was freed before op i ran no longer counts when op i takes its own.
    events += [(index, 0, -sizes[number]) for index, number in trace.gives]
    # What a kernel takes for itself lies beside its results, and is gone before the next op.
    events += [(op.index, when, size) for op in trace if (own := op.scratch) for when, size in ((2, own), (3, -own))]
    live = maximum = 0
    for _, _, change in sorted(events, key=lambda event: event[:2]):
        live += change
        maximum = max(maximum, live)
    return maximum
