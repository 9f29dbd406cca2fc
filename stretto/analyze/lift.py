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
from typing import Any

import sympy
import torch
from torch import Tensor

from stretto.analyze.specs import Matrix, Size, Spec
from stretto.analyze.trace import Trace
from stretto.errors import fail

NAMES = {
    "n": "nodes",
    "m": "edges as given",
    "a": "edges without self-loops",
    "e": "edges with one self-loop per node: a + n",
    "t": "nodes in the train mask",
}
SYMBOLS = {name: sympy.Symbol(name, positive=True, integer=True) for name in NAMES}


@dataclass(frozen=True)
class Sizes:
    """The sizes that a step on a graph can depend on."""

    n: int
    m: int
    a: int
    e: int
    t: int

    @staticmethod
    def of(data: Any) -> Sizes:
        """Sizes of a PyG Data (or of anything with x, edge_index and maybe train_mask)."""
        edges = getattr(data, "edge_index", None)
        if not isinstance(edges, Tensor) or edges.layout != torch.strided:
            fail("analyze: 'data' has no edge_index tensor; pass homogeneous data, or look at it with stretto.profile")
        n = int(data.num_nodes)
        loops = int((edges[0] == edges[1]).sum())
        a = edges.size(1) - loops
        mask = getattr(data, "train_mask", None)
        return Sizes(n, edges.size(1), a, a + n, int(mask.sum()) if isinstance(mask, Tensor) else 0)

    def table(self, others: Mapping[str, Size]) -> dict[int, Size]:
        """Number here -> what stands for it there. The larger numbers are tried first."""
        mine = dataclasses.asdict(self)
        return {mine[name]: others[name] for name in ("e", "m", "a", "n", "t")}


# n, a, m and e / 2 are prime, so that none divides a width of a sane model.
PROBES = (Sizes(61, 331, 313, 374, 23), Sizes(73, 367, 349, 422, 29), Sizes(97, 557, 541, 638, 31))


def probe(data: Any, widths: set[int]) -> tuple[Any, Sizes]:
    """The data cut to probe sizes, with random edges; widths: numbers the sizes must differ from."""
    for sizes in PROBES:
        ours = set(dataclasses.asdict(sizes).values())
        if not any(w % size == 0 for w in widths for size in ours if w):
            break
    else:
        fail(f"analyze: the model's widths {sorted(widths)} clash with every probe size")
    small = copy.copy(data)
    generator = torch.Generator().manual_seed(0)
    n, m = data.num_nodes, data.edge_index.size(1)
    edges = _edges(sizes, generator)
    for name in list(small.keys()) if callable(small.keys) else list(small.keys):
        value = small[name]
        if name == "edge_index" or not isinstance(value, Tensor) or not value.dim():
            continue
        if data.is_edge_attr(name) and value.size(0) == m:
            small[name] = _rows(value, sizes.m)
        elif value.size(0) == n:
            small[name] = _rows(value, sizes.n)
    small.edge_index = edges.to(data.edge_index.device)
    small.num_nodes = sizes.n
    if isinstance(getattr(small, "train_mask", None), Tensor):
        small.train_mask = torch.arange(sizes.n, device=edges.device) < sizes.t
        y = getattr(small, "y", None)
        if isinstance(y, Tensor) and not y.is_floating_point():
            small.y = y.clamp(min=0)
    return small, sizes


def _edges(sizes: Sizes, generator: torch.Generator) -> Tensor:
    """m distinct random edges, m - a of them self-loops; every node has at least one edge."""
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


def rescale(trace: Trace, table: Mapping[int, Size]) -> Trace:
    """The trace with every size found in the table (or a multiple of one) replaced, and its costs counted anew."""
    bigger = Trace(classes=trace.classes, takes=[], gives=list(trace.gives))
    for op in trace.ops:
        new = dataclasses.replace(
            op,
            args=_put(op.args, table),
            kwargs={k: _put(v, table) for k, v in op.kwargs.items()},
            out=_put(op.out, table),
            seconds=0.0,
        )
        new.cost = new.recount()
        bigger.ops.append(new)
    for index, number, spec, size in trace.takes:
        spec = None if spec is None else _put(spec, table)
        bigger.takes.append((index, number, spec, size if spec is None else spec.numel * spec.itemsize))
    if all(isinstance(value, int) for value in table.values()):
        bigger.peak_bytes = peak(bigger)
    return bigger


def _put(value: Any, table: Mapping[int, Size]) -> Any:
    if isinstance(value, Spec):
        return dataclasses.replace(value, shape=tuple(_size(s, table) for s in value.shape))
    if isinstance(value, Matrix):
        sizes = {name: _size(getattr(value, name), table) for name in ("num_rows", "num_cols", "num_edges")}
        return dataclasses.replace(value, **sizes)
    if isinstance(value, tuple):
        return tuple(_put(v, table) for v in value)
    if isinstance(value, dict):
        return {k: _put(v, table) for k, v in value.items()}
    return value


def _size(size: Size, table: Mapping[int, Size]) -> Size:
    for number, other in table.items():
        if number and size and size % number == 0:
            return other * (size // number)
    return size


def peak(trace: Trace) -> int:
    """Most bytes alive at once, from what the trace took and gave back."""
    events: list[tuple[int, int, int]] = []
    sizes = {}
    for index, number, _, size in trace.takes:
        sizes[number] = size
        events.append((index, 1, size))
    # What was freed before op i ran no longer counts when op i takes its own.
    events += [(index, 0, -sizes[number]) for index, number in trace.gives]
    live = most = 0
    for _, _, change in sorted(events, key=lambda event: event[:2]):
        live += change
        most = max(most, live)
    return most
