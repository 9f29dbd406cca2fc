"""Graph: one CSR by destination and all that derives from it, computed once and kept on the object.

Rows are destinations, columns sources: PyG's flow "source_to_target". Row i of the CSR lists the neighbours whose
messages node i receives. Cached backward is not a feature of its own: it is `graph.T`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stretto.errors import expect, fail
from stretto.graph import formats
from stretto.graph.derived import V, bytes_of, kept, lasting
from stretto.graph.memo import Memo, MemoInfo
from stretto.graph.traced import TracedGraph
from stretto.kernels import Csr, build
from stretto.lifetime import popped_from

_numbers = itertools.count(1)
_by_number: dict[int, weakref.ref[Graph]] = {}


class Graph:
    """A sparse matrix of num_rows destinations by num_cols sources, with its edges in the user's order.

    Make one with Graph.of(edge_index). Per-edge arrays handed to ops are in the order of that edge_index.
    """

    def __init__(
        self, csr: Csr, *, source: Csr | None = None, ids_known: bool = True, transposed: Csr | None = None
    ) -> None:
        """Internal. source: the matrix this is the transpose of; ids_known: whether csr.edge_id says the edge order;
        transposed: its transpose, where that came with it."""
        if csr.tasks is None:
            csr.tasks, csr.hubs, csr.num_slots = build.schedule(csr.rowptr, csr.num_rows, csr.num_edges)
        self.csr = csr
        self.num_rows, self.num_cols, self.num_edges = csr.num_rows, csr.num_cols, csr.num_edges
        self._source = source
        self._ids_known = ids_known
        self._transposed = transposed
        self._T: Graph | None = None
        self._parent: weakref.ref[Graph] | None = None
        self._derived: dict[Any, Any] = {}
        self.number = next(_numbers)
        self.handle = torch.from_numpy(np.array([self.number]))  # what torch.library ops carry instead of the object
        _by_number[self.number] = popped_from(_by_number, self.number, self)

    # ---- making one ----

    @staticmethod
    def of(
        edges: Any,
        num_nodes: int | tuple[int | None, int | None] | None = None,
        *,
        flow: str = "source_to_target",
    ) -> Graph:
        """The graph of an edge_index, EdgeIndex, torch sparse COO/CSR/CSC tensor or SparseTensor; remembered.

        edge_index [2, E] holds sources in row 0 and destinations in row 1. A sparse matrix has destinations as rows
        (PyG's adj_t). num_nodes: an int, or (num_src, num_dst) for a bipartite graph; None, for all or for one side: as
        many as the indices need.
        """
        if isinstance(edges, Graph):
            return edges
        if isinstance(edges, TracedGraph):
            return cast(Graph, edges)
        expect(
            flow in ("source_to_target", "target_to_source"),
            f"Graph.of: 'flow' is {flow!r}, wanted 'source_to_target' or 'target_to_source'",
        )
        if torch.compiler.is_compiling():
            return cast(Graph, TracedGraph.of(edges, num_nodes, flow))
        sizes = formats.sizes_of(edges, num_nodes)
        return _memo.get(formats.plain(edges), (sizes, flow), lambda: _build(edges, sizes, flow))

    @staticmethod
    def is_known(edges: Tensor, sizes: tuple[int, int] | int, *, flow: str = "source_to_target") -> bool:
        """Whether Graph.of (or, given a number of segments, of_segments) would find this very tensor's graph."""
        return _memo.knows(edges, ("segments", sizes) if isinstance(sizes, int) else (sizes, flow))

    @staticmethod
    def of_segments(index: Tensor, num_segments: int | None = None) -> Graph:
        """The graph that sends message e to segment index[e]: [num_segments, E], one entry per column; remembered."""
        index = formats.plain(index)
        formats.check_segments(index, num_segments)
        if torch.compiler.is_compiling():
            return cast(Graph, TracedGraph.of_segments(index, num_segments))
        return _memo.get(index, ("segments", num_segments), lambda: _build_segments(index, num_segments))

    @staticmethod
    def of_pointers(
        rowptr: Tensor, col: Tensor | None, num_cols: int, *, edge_id: Tensor | None = None, known: bool = False
    ) -> Graph:
        """A graph from CSR arrays, which are not copied; known: they are right (a sampler's) and not looked at."""
        if not known:
            formats.check_csr(rowptr, col, num_cols, edge_id)
        num_edges = col.numel() if col is not None else num_cols
        return Graph(Csr(rowptr, col, edge_id, rowptr.numel() - 1, num_cols, num_edges))

    @staticmethod
    def remember(
        edges: Tensor,
        graph: Graph | functools.partial[Graph],
        num_nodes: int | tuple[int, int],
        *,
        flow: str = "source_to_target",
    ) -> None:
        """Tell Graph.of that `edges` is `graph`, or what `graph` makes when it is asked for, so that it need not sort
        (a loader knows its batches' CSR)."""
        sizes = (num_nodes, num_nodes) if isinstance(num_nodes, int) else num_nodes
        _memo.put(edges, (sizes, flow), graph)

    @staticmethod
    def known(edges: Any) -> list[Graph]:
        """The graphs that were made of this very tensor."""
        return _memo.graphs(edges)

    @staticmethod
    def cache_info() -> MemoInfo:
        """How often Graph.of found, recognised by content, or built a graph, and what it holds."""
        return _memo.info()

    @staticmethod
    def cache_clear() -> None:
        """Forget every graph."""
        _memo.clear()

    @staticmethod
    def numbered(number: int) -> Graph:
        """The live graph of that number (the handle torch.library ops carry)."""
        known = _by_number.get(number)
        graph = None if known is None else known()
        if graph is None:
            fail(f"graph {number} is gone: keep the edge_index alive, or raise STRETTO_GRAPH_CACHE")
        return graph

    # ---- what derives from it ----

    @property
    def T(self) -> Graph:
        """The transpose; made once. A symmetric structure shares its arrays."""
        if self._T is not None:
            return self._T
        parent = self._parent() if self._parent is not None else None
        if parent is not None:
            return parent
        if torch.compiler.is_compiling():
            return cast(Graph, TracedGraph.standing_for(self).T)
        # _source: the graph this was the transpose of is gone, its arrays are not.
        made = Graph(self._source) if self._source is not None else self._transpose()
        made._parent = weakref.ref(self)
        self._T = self._derived.setdefault("transpose", made)  # of two threads' transposes, the first
        return self._T

    def _transpose(self) -> Graph:
        if self._transposed is not None:
            return Graph(self._transposed, source=self.csr)
        with lasting():
            return self._sorted_by_column()

    def _sorted_by_column(self) -> Graph:
        csr = self.csr
        if csr.col is csr.edge_id:  # segments: every message goes to exactly one row
            rowptr = torch.arange(csr.num_edges + 1, device=csr.device)
            return Graph(Csr(rowptr, self.segment_index, None, csr.num_cols, csr.num_rows, csr.num_edges), source=csr)
        rowptr, col, ids = build.transpose(csr)
        if build.passing(csr):
            return Graph(Csr(rowptr, col, ids, csr.num_cols, csr.num_rows, csr.num_edges), source=csr)
        few = csr.num_edges < build.FEW_EDGES  # the order of their edges is kept, which else is made when asked for
        if csr.num_rows == csr.num_cols and _same(rowptr, csr.rowptr) and csr.col is not None and _same(col, csr.col):
            shared = Csr(csr.rowptr, csr.col, ids if few else None, csr.num_rows, csr.num_cols, csr.num_edges)
            shared.tasks, shared.hubs, shared.num_slots = csr.tasks, csr.hubs, csr.num_slots
            return Graph(shared, source=csr, ids_known=few)
        if few:
            return Graph(Csr(rowptr, col, ids, csr.num_cols, csr.num_rows, csr.num_edges), source=csr)
        return Graph(Csr(rowptr, col, None, csr.num_cols, csr.num_rows, csr.num_edges), source=csr, ids_known=False)

    @property
    def is_symmetric(self) -> bool:
        """Whether the transpose has the same structure, row by row (rows in column order)."""
        return self.num_rows == self.num_cols and (self.T.csr.rowptr is self.csr.rowptr or self._same_as_transpose)

    @kept
    def _same_as_transpose(self) -> bool:
        """The comparison that was left out when the transpose of a mini-batch was made."""
        one, other = self.csr, self.T.csr
        if not build.passing(one) or one.col is None or other.col is None:
            return False
        return _same(one.rowptr, other.rowptr) and _same(one.col, other.col)

    @property
    def edge_csr(self) -> Csr:
        """The CSR with the positions of its entries in the user's order; a transpose learns them on first use."""
        if not self._ids_known:
            assert self._source is not None
            # A new Csr: another thread may be inside a kernel with the old one.
            with lasting():
                self.csr = replace(self.csr, edge_id=build.transpose(self._source)[2], cache={})
            self._ids_known = True
        return self.csr

    @kept
    def degree(self) -> Tensor:
        """Number of entries of each row. [n] int64."""
        return self.csr.rowptr.diff()

    def degree_power(self, power: float, dtype: torch.dtype) -> Tensor:
        """Every degree to a power, 0 where the degree is 0. [n]; kept."""
        return self.derived(("degree", power, dtype), lambda: _power(self.degree, power, dtype))

    def mean_scale(self, dtype: torch.dtype) -> Tensor:
        """1 / max(degree, 1). [n]; kept."""
        return self.derived(("mean", dtype), lambda: self.degree.clamp(min=1).to(dtype).reciprocal())

    @kept
    def edge_index(self) -> Tensor:
        """The edges as PyG writes them, in the user's order: sources, destinations. [2, E] int64."""
        csr = self.edge_csr
        return torch.stack([csr.to_user_order(csr.columns()), csr.to_user_order(csr.rows())])

    @property
    def segments(self) -> Graph:
        """The graph that sends edge e's message to its destination: [n, E], columns are edges in the user's order."""
        csr = self.edge_csr
        own = csr.col is csr.edge_id and csr.num_cols == csr.num_edges
        return self if own else self._segments  # itself it does not keep: nothing but the collector would free it

    @kept
    def _segments(self) -> Graph:
        csr = self.edge_csr
        ids = Csr(csr.rowptr, csr.edge_id, csr.edge_id, csr.num_rows, csr.num_edges, csr.num_edges)
        ids.tasks, ids.hubs, ids.num_slots = csr.tasks, csr.hubs, csr.num_slots
        return Graph(ids)

    @kept
    def segment_index(self) -> Tensor:
        """Destination of every edge in the user's order. [E] int32 or int64."""
        csr = self.edge_csr
        index = csr.edge_id if csr.edge_id is not None else csr.col
        return csr.to_user_order(csr.rows().to(index.dtype if index is not None else torch.int64))

    @kept
    def has_self_loops(self) -> bool:
        return bool((self.csr.rows() == self.csr.columns()).any())

    @kept
    def with_self_loops(self) -> Graph:
        """Every node with exactly one self-loop: PyG's add_remaining_self_loops.

        Edge order: the edges that are no loops in the user's order (`kept_edges` says which), then one loop per node.
        """
        expect(
            self.num_rows == self.num_cols,
            f"with_self_loops: the graph is {self.num_rows}x{self.num_cols}, wanted a square one",
        )
        had = "edge_index" in self.__dict__
        source, target = self.edge_index
        if not had:  # 16 bytes an edge, wanted here only
            self.__dict__.pop("edge_index", None)
        loops = torch.arange(self.num_rows, device=source.device)
        if self.has_self_loops:
            source, target = source[self.kept_edges], target[self.kept_edges]
        pairs = torch.stack([torch.cat([source, loops]), torch.cat([target, loops])])
        in_order = None if self.num_edges == 0 else False  # the loops stand last: sorted without a look at a device
        return _from_pairs(pairs[1], pairs[0], self.num_rows, self.num_cols, in_order)

    @kept
    def kept_edges(self) -> Tensor:
        """Positions of the edges that are no self-loops, in the user's order. [E'] int64."""
        pairs: Tensor = self.edge_index
        return (pairs[0] != pairs[1]).nonzero().view(-1)

    def derived(self, key: Any, make: Callable[[], V]) -> V:
        """What `make()` gave the first time for this key; kept as long as the graph."""
        if key not in self._derived:
            with lasting():
                self._derived.setdefault(key, make())
        value: V = self._derived[key]
        return value

    @staticmethod
    def forget_derived() -> None:
        """Have every live graph drop what was derived for it; what it is asked for again is made again."""
        for reference in list(_by_number.values()):
            graph = reference()
            if graph is None:
                continue
            graph._derived.clear()
            for name in ("weight", "scale"):  # copies of users' tensors; the rest is the matrix's own
                graph.csr.cache.pop(name, None)

    @kept
    def size_class(self) -> tuple[int, int, int, bool]:
        """Coarse sizes for the tuner: powers of two of rows, columns, edges, and whether some row had to be cut."""
        csr = self.csr
        return (
            csr.num_rows.bit_length(),
            csr.num_cols.bit_length(),
            csr.num_edges.bit_length(),
            csr.num_slots > 0,
        )

    # ---- facts about the object ----

    @property
    def device(self) -> torch.device:
        return self.csr.device

    @property
    def index_bytes(self) -> int:
        """Bytes of a column index."""
        return 0 if self.csr.col is None else self.csr.col.element_size()

    def memory(self) -> dict[str, int]:
        """Bytes of each part held; what parts share (a symmetric transpose, say) is counted with the first."""
        seen = {id(self)}
        parts = {"csr": bytes_of(_arrays(self.csr), seen), "transpose": bytes_of((self._transposed, self._T), seen)}
        for name in ("segments", "with_self_loops"):
            made = self.__dict__.get("_segments" if name == "segments" else name)
            if made is not None:
                parts[name] = bytes_of((made,), seen)
        parts["derived"] = bytes_of(vars(self).values(), seen)
        return parts

    @property
    def nbytes(self) -> int:
        """Bytes of everything this graph holds, transpose included."""
        return sum(self.memory().values())

    def __repr__(self) -> str:
        return f"Graph({self.num_rows}x{self.num_cols}, {self.num_edges} edges, {self.nbytes} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.edge_csr,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return self  # a graph never changes


def _arrays(csr: Csr) -> tuple[Tensor | None, ...]:
    return csr.rowptr, csr.col, csr.edge_id, csr.tasks, csr.hubs


def _unpickle(csr: Csr) -> Graph:
    return Graph(csr)


def _power(degree: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    scaled = degree.to(dtype).pow(power)
    return scaled.masked_fill_(degree == 0, 0)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _build(edges: Any, sizes: formats.Sizes | None, flow: str) -> Graph:
    with lasting():
        few = formats.few(edges, sizes, flow)
        if few is not None:
            return Graph(few[0], transposed=few[1])
        return _from_pairs(*formats.pairs(edges, sizes, flow))


def _build_segments(index: Tensor, num_segments: int | None) -> Graph:
    with lasting():
        formats.check_readable("index", index)
        if num_segments is None:
            num_segments = build.minmax(index)[1] + 1
        formats.check_range("segment", index, num_segments)
        dtype = formats.index_dtype(num_segments, index.numel())
        rowptr, _, order = build.compress(index, None, num_segments, dtype)
    # Column e is message e: the order of the entries is at once their column.
    return Graph(Csr(rowptr, order, order, num_segments, index.numel(), index.numel()))


def _from_pairs(target: Tensor, source: Tensor, num_rows: int, num_cols: int, in_order: bool | None = None) -> Graph:
    dtype = formats.index_dtype(max(num_rows, num_cols), source.numel())
    rowptr, col, edge_id = build.compress(target, source, num_rows, dtype, in_order=in_order)
    return Graph(Csr(rowptr, col, edge_id, num_rows, num_cols, source.numel()))


_memo: Memo[Graph] = Memo()
