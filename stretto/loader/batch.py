"""Blueprint: how a slot becomes a batch of the user's own type.

Read once per loader: which attributes of `data` the native threads slice (tensors in memory, along dimension 0, whose
rows are contiguous, however far apart), and which torch indexes as the batch is made: a transposed table, say, of which
no copy is taken. The result has the attributes PyG's loader gives, in views of the slot.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import index_select
from torch_geometric.typing import SparseTensor

from stretto.errors import fail
from stretto.graph import Graph
from stretto.kernels import Csr, build
from stretto.loader import checks
from stretto.loader.arrays import by_target
from stretto.loader.native_sampler import Slice
from stretto.loader.sampler import NeighborSampler
from stretto.loader.slot import Slot
from stretto.loader.store import Store
from stretto.memory import pages


@dataclass
class _Entry:
    """One attribute: where it lives, and the slice that brings it (-1: indexed when the batch is made)."""

    store: Any
    number: int  # of the node or edge type
    key: str
    of_edges: bool
    slice: int


class _Signature:
    """Values as they were: the objects themselves, which no other can be mistaken for while they are held, and what
    was in them."""

    def __init__(self, names: list[Any], values: list[Any]) -> None:
        self.names, self.values = names, values
        self.states = [checks.state(v) if isinstance(v, Tensor) else None for v in values]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Signature) or self.names != other.names or self.states != other.states:
            return False
        return all(a is b for a, b in zip(self.values, other.values, strict=True))

    __hash__ = None  # type: ignore[assignment]


class Blueprint:
    """What a batch of `data` holds, for a Data or HeteroData."""

    def __init__(self, data: Data | HeteroData, sampler: NeighborSampler, store: Store | None = None) -> None:
        self.data, self.sampler = data, sampler
        self.slices: list[Slice] = []
        self.entries: list[_Entry] = []
        self.edge_keys: list[tuple[Any, int, str]] = []  # edge_index or adj_t of each edge type
        self.counted: list[tuple[Any, int]] = []  # node types that store num_nodes
        self.values: dict[Any, Tensor] = {}  # of a torch.sparse adj_t, by edge type
        # Attributes of PyG's own classes are set in the mapping behind them; a subclass may do more where one is set.
        self.plain = type(data) in (Data, HeteroData)
        self.from_store = store is not None
        if store is not None:
            self._read_store(store)
            return
        graph = sampler.graph
        for number, key in enumerate(graph.node_types):
            if "num_nodes" in self._store(data, key):
                self.counted.append((key, number))
        for number, key in enumerate(graph.edge_types):
            for name in ("edge_index", "adj_t"):
                if name in self._store(data, key):
                    self.edge_keys.append((key, number, name))
                    self._keep_values(key, self._store(data, key)[name])
        for key, number, name, of_edges in self._attributes():
            held = self._store(data, key)
            self._add(key, number, held, name, held[name], of_edges=of_edges)
        self.signature = self.current()

    def _attributes(self) -> list[tuple[Any, int, str, bool]]:
        """What PyG takes for attributes of nodes or edges now: type, its number, name, and whether it is of edges."""
        graph, out = self.sampler.graph, []
        for number, key in enumerate(graph.node_types):
            held = self._store(self.data, key)
            out += [(key, number, n, False) for n in held if n != "num_nodes" and held.is_node_attr(n)]
        for number, key in enumerate(graph.edge_types):
            held = self._store(self.data, key)
            of_edges = [n for n in held if n not in ("edge_index", "adj_t") and held.is_edge_attr(n)]
            out += [(key, number, n, True) for n in of_edges]
        return out

    def _keep_values(self, key: Any, adjacency: Any) -> None:
        """The values of a torch.sparse adj_t in the order of the sampler's edges."""
        if isinstance(adjacency, Tensor) and adjacency.layout != torch.strided:
            graph = self.sampler.graph
            source, target = graph.ends(key)
            sizes = graph.num_nodes[graph.node_types[source]], graph.num_nodes[graph.node_types[target]]
            self.values[key] = by_target(adjacency, *sizes).values()

    def _read_store(self, store: Store) -> None:
        """The attributes of a Store: all are sliced, int8 ones with their scale; the edges are the sampler's."""
        graph = self.sampler.graph
        self.counted += [(kind, number) for number, kind in enumerate(graph.node_types)]
        self.edge_keys += [(kind, number, "edge_index") for number, kind in enumerate(graph.edge_types)]
        for a in store.attributes:
            if a.of_edges and not self.sampler.e_id:
                continue
            number = (graph.edge_types if a.of_edges else graph.node_types).index(a.type)
            held = self._store(self.data, a.type)
            self._add(
                a.type, number, held, a.name, held[a.name], of_edges=a.of_edges, scale=store.scale(a.type, a.name)
            )
            if self.entries[-1].slice >= 0:
                pages.read_here_and_there(held[a.name])
        self.signature = self.current()

    def _add(
        self, key: Any, number: int, store: Any, name: str, value: Any, *, of_edges: bool, scale: Tensor | None = None
    ) -> None:
        at = -1
        dim = store._parent().__cat_dim__(name, value, store)
        self._check_length(key, number, name, value, dim, of_edges=of_edges)
        if dim == 0 and checks.row_stride(value) is not None and (self.sampler.e_id or not of_edges):
            at = len(self.slices)
            self.slices.append(Slice(value.detach(), number, of_edges, scale, name))
        elif scale is not None:
            fail(f"NeighborLoader: {name!r} has a scale and is {checks.shape_of(value)}, wanted rows of int8 in memory")
        self.entries.append(_Entry(key, number, name, of_edges, at))

    def _check_length(self, key: Any, number: int, name: str, value: Any, dim: Any, *, of_edges: bool) -> None:
        """An attribute may have been replaced since the graph was read: it still has one row for each node or edge."""
        graph = self.sampler.graph
        if not isinstance(value, Tensor) or not isinstance(dim, int) or value.dim() == 0:
            return
        edges = graph.edges[graph.edge_types[number]].row.numel() if of_edges else 0
        rows, wanted = value.size(dim), edges if of_edges else graph.num_nodes[graph.node_types[number]]
        checks.whole("NeighborLoader", name, value)
        if rows != wanted:
            fail(
                f"NeighborLoader: {name!r}{'' if key is None else f' of {key!r}'} has {rows} rows, wanted {wanted}: "
                f"the loader was made for a graph of so many {'edges' if of_edges else 'nodes'}"
            )

    def current(self) -> "_Signature":
        """What must not change while batches are prepared ahead: which attributes there are, and their values."""
        names = [(entry.store, entry.number, entry.key, entry.of_edges) for entry in self.entries]
        now = names if self.from_store else self._attributes()
        values = [self._store(self.data, key).get(name) for key, _, name, _ in now]
        return _Signature(now, values + [self._store(self.data, key).get("adj_t") for key in self.values])

    def _store(self, data: Any, key: Any) -> Any:
        return data[key] if self.sampler.graph.hetero else data._store

    def build(self, slot: Slot, device: torch.device | None = None) -> Data | HeteroData:
        """The batch in `slot`, without what depends on the seeds (batch_size, input_id, ...)."""
        out: Any = self.data.__copy__()  # type: ignore[no-untyped-call]
        hetero, graph, plain = self.sampler.graph.hetero, self.sampler.graph, self.plain
        for key, number in self.counted:
            self._store(out, key).num_nodes = slot.num_nodes(number)
        self._set_attributes(out, slot, device)
        for key, relation, name in self.edge_keys:
            store = out[key] if hetero else out._store
            values = store._mapping if plain else store
            if name == "edge_index":
                values[name] = remember(slot, relation)
            else:
                store.adj_t = _adjacency(slot, relation, store.adj_t, self.values.get(key))
        for number, key in enumerate(graph.node_types):
            store = out[key] if hetero else out
            values = store._mapping if hetero else out._store._mapping
            if "n_id" in values:
                continue
            if plain:
                values["n_id"] = slot.n_id(number)
            else:
                store.n_id = slot.n_id(number)
        for number, key in enumerate(graph.edge_types):
            store = out[key] if hetero else out
            values = store._mapping if hetero else out._store._mapping
            e_id = slot.edge_id(number)
            if e_id is None or "e_id" in values:
                continue
            if plain:
                values["e_id"] = e_id
            else:
                store.e_id = e_id
        batch: Data | HeteroData = out
        return batch

    def _set_attributes(self, out: Any, slot: Slot, device: torch.device | None) -> None:
        """What the user's data holds of nodes and edges, cut to those of the batch."""
        for entry in self.entries:
            store = out[entry.store] if self.sampler.graph.hetero else out._store
            if entry.slice >= 0:
                values = store._mapping if self.plain else store
                values[entry.key] = slot.slice(entry.slice)
                continue
            index = slot.edge_id(entry.number, host=True) if entry.of_edges else slot.n_id(entry.number, host=True)
            value = store[entry.key]
            store[entry.key] = None if index is None else _index(value, index, store, entry.key, device)


def put(owner: Any, values: dict[str, Any], *, plain: bool) -> None:
    """Set attributes of a Data, or of a store of a HeteroData; None takes one away.

    plain: the class is PyG's own, so that nothing but the mapping behind it needs to know.
    """
    if not plain:
        for name, value in values.items():
            setattr(owner, name, value)
        return
    mapping = owner._store._mapping if type(owner) is Data else owner._mapping
    for name, value in values.items():
        if value is None:
            mapping.pop(name, None)
        else:
            mapping[name] = value


def remember(slot: Slot, relation: int) -> Tensor:
    """The relation's edge_index, whose CSR Graph.of knows from now on."""
    edge_index = slot.edge_index(relation)
    at = slot.sampler.edges_at[relation]
    if slot.table[at + 2] >= 0 and slot.table[at + 3] >= 0:  # rowptr and col are there
        ends, nodes_at = slot.sampler.relations[relation], slot.sampler.nodes_at
        sizes = slot.table[nodes_at[ends.source]], slot.table[nodes_at[ends.target]]
        Graph.remember(edge_index, functools.partial(_graph, slot, relation, sizes), sizes)
    return edge_index


def _graph(slot: Slot, relation: int, sizes: tuple[int, int]) -> Graph:
    """The relation's graph: ordinary tensors, whoever asks for it."""
    with torch.inference_mode(False):
        rowptr, col = slot.rowptr(relation), slot.col(relation)
        assert rowptr is not None
        assert col is not None
        csr = Csr(rowptr, col, None, sizes[1], sizes[0], col.numel())
        if slot.on_device:  # plan from the host's copy, so that nothing waits for the device
            host = slot.rowptr(relation, host=True)
            assert host is not None
            csr.tasks, csr.hubs, csr.num_slots = build.schedule(host, csr.num_rows, csr.num_edges)
        return Graph(csr)


def _index(value: Any, index: Tensor, store: Any, key: str, device: torch.device | None) -> Any:
    """Rows of an attribute that the native threads could not slice."""
    dim = store._parent().__cat_dim__(key, value, store)
    where = value.device if isinstance(value, Tensor) else torch.device("cpu")
    out = index_select(value, index.to(where), dim=dim)
    return out.to(device, non_blocking=True) if device is not None and isinstance(out, Tensor) else out


def _adjacency(slot: Slot, relation: int, value: Any, values: Tensor | None) -> Any:
    """adj_t of the batch: rows are targets. values: of a torch.sparse one, in the order of the sampler's edges."""
    row, col = slot.edge_index(relation)
    ends = slot.sampler.relations[relation]
    sizes = slot.num_nodes(ends.target), slot.num_nodes(ends.source)
    e_id = slot.edge_id(relation)
    if values is not None:  # torch.sparse
        ones = values[e_id] if e_id is not None else torch.ones(row.numel())
        rowptr = torch._convert_indices_from_coo_to_csr(col, sizes[0])
        return torch.sparse_csr_tensor(rowptr, row, ones, size=sizes)
    stored = value.storage.value()
    weight = None if stored is None or e_id is None else index_select(stored, e_id, dim=0)
    return SparseTensor(row=col, col=row, value=weight, sparse_sizes=sizes, is_sorted=False, trust_data=True)
