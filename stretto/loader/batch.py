"""Blueprint: how a slot becomes a batch of the user's own type.

Read once per loader: which attributes of `data` the native threads slice (contiguous CPU tensors, along dimension 0),
and which are indexed when the batch is made. The result has the attributes PyG's loader gives, in views of the slot.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import index_select
from torch_geometric.typing import SparseTensor

from stretto.graph import Graph
from stretto.graph_formats import plain
from stretto.kernels import Csr, build, pages
from stretto.kernels.looks import look
from stretto.loader.native_sampler import Slice
from stretto.loader.sampler import NeighborSampler
from stretto.loader.slot import Slot
from stretto.loader.store import Store


@dataclass
class _Entry:
    """One attribute: where it lives, and the slice that brings it (-1: indexed when the batch is made)."""

    store: Any
    number: int  # of the node or edge type
    key: str
    of_edges: bool
    slice: int


class Blueprint:
    """What a batch of `data` holds, for a Data or HeteroData."""

    def __init__(self, data: Data | HeteroData, sampler: NeighborSampler, store: Store | None = None) -> None:
        self.data, self.sampler = data, sampler
        self.slices: list[Slice] = []
        self.entries: list[_Entry] = []
        self.edge_keys: list[tuple[Any, int, str]] = []  # edge_index or adj_t of each edge type
        self.counted: list[tuple[Any, int]] = []  # node types that store num_nodes
        if store is not None:
            self._read_store(store)
            return
        graph = sampler.graph
        node_stores = [(t, i, data[t] if graph.is_hetero else data._store) for i, t in enumerate(graph.node_types)]
        edge_stores = [(t, r, data[t] if graph.is_hetero else data._store) for r, t in enumerate(graph.edge_types)]
        for key, number, held in node_stores:
            for name, value in held.items():
                if name == "num_nodes":
                    self.counted.append((key, number))
                elif held.is_node_attr(name):
                    self._add(key, number, held, name, value, of_edges=False)
        for key, number, held in edge_stores:
            for name, value in held.items():
                if name in ("edge_index", "adj_t"):
                    self.edge_keys.append((key, number, name))
                elif held.is_edge_attr(name):
                    self._add(key, number, held, name, value, of_edges=True)
        self.signature = self.current()

    def _read_store(self, store: Store) -> None:
        """The attributes of a Store: all are sliced, int8 ones with their scale; the edges are the sampler's."""
        graph = self.sampler.graph
        self.counted += [(kind, number) for number, kind in enumerate(graph.node_types)]
        self.edge_keys += [(kind, number, "edge_index") for number, kind in enumerate(graph.edge_types)]
        for a in store.attributes:
            if a.of_edges and not self.sampler.e_id:
                continue
            number = (graph.edge_types if a.of_edges else graph.node_types).index(a.type)
            value = self._store(self.data, a.type)[a.name]
            self.entries.append(_Entry(a.type, number, a.name, a.of_edges, len(self.slices)))
            pages.read_here_and_there(value)
            self.slices.append(Slice(value, number, a.of_edges, store.scale(a.type, a.name)))
        self.signature = self.current()

    def _add(self, key: Any, number: int, store: Any, name: str, value: Any, *, of_edges: bool) -> None:
        at = -1
        dim = store._parent().__cat_dim__(name, value, store)
        fits = (
            type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.device.type == "cpu"
        )
        if fits and dim == 0 and value.is_contiguous() and (self.sampler.e_id or not of_edges):
            at = len(self.slices)
            self.slices.append(Slice(value.detach(), number, of_edges))
        self.entries.append(_Entry(key, number, name, of_edges, at))

    def current(self) -> list[Any]:
        """What must not change while batches are prepared ahead: the attributes' identity and look."""
        out: list[Any] = []
        for entry in self.entries:
            store = self._store(self.data, entry.store)
            value = store.get(entry.key)
            out.append((entry.store, entry.key, id(value), look(plain(value)) if isinstance(value, Tensor) else None))
        return out

    def _store(self, data: Any, key: Any) -> Any:
        return data[key] if self.sampler.is_hetero else data._store

    def build(self, slot: Slot, device: torch.device | None = None) -> Data | HeteroData:
        """The batch in `slot`, without what depends on the seeds (batch_size, input_id, ...)."""
        out = copy.copy(self.data)
        hetero = self.sampler.is_hetero
        graph = self.sampler.graph
        for key, number in self.counted:
            self._store(out, key).num_nodes = slot.num_nodes(number)
        for entry in self.entries:
            store = self._store(out, entry.store)
            if entry.slice >= 0:
                store[entry.key] = slot.slice(entry.slice)
                continue
            index = slot.edge_id(entry.number, host=True) if entry.of_edges else slot.n_id(entry.number, host=True)
            value = store[entry.key]
            store[entry.key] = None if index is None else _index(value, index, store, entry.key, device)
        for key, relation, name in self.edge_keys:
            store = self._store(out, key)
            if name == "edge_index":
                store.edge_index = remember(slot, relation)
            else:
                store.adj_t = _adjacency(slot, relation, store.adj_t)
        for number, key in enumerate(graph.node_types):
            store = out[key] if hetero else out
            if "n_id" not in store:
                store.n_id = slot.n_id(number)
        for number, key in enumerate(graph.edge_types):
            store = out[key] if hetero else out
            e_id = slot.edge_id(number)
            if e_id is not None and "e_id" not in store:
                store.e_id = e_id
        return out


def remember(slot: Slot, relation: int) -> Tensor:
    """The relation's edge_index, whose CSR Graph.of knows from now on."""
    edge_index = slot.edge_index(relation)
    rowptr, col = slot.rowptr(relation), slot.col(relation)
    if rowptr is not None and col is not None:
        ends = slot.sampler.relations[relation]
        sizes = slot.num_nodes(ends.source), slot.num_nodes(ends.target)
        csr = Csr(rowptr, col, None, sizes[1], sizes[0], col.numel())
        if slot.on_device:  # plan from the host's copy, so that nothing waits for the device
            host = slot.rowptr(relation, host=True)
            assert host is not None
            csr.tasks, csr.hubs, csr.num_slots = build.schedule(host, csr.num_rows, csr.num_edges)
        Graph.remember(edge_index, Graph(csr), sizes)
    return edge_index


def _index(value: Any, index: Tensor, store: Any, key: str, device: torch.device | None) -> Any:
    """Rows of an attribute that the native threads could not slice."""
    dim = store._parent().__cat_dim__(key, value, store)
    where = value.device if isinstance(value, Tensor) else torch.device("cpu")
    out = index_select(value, index.to(where), dim=dim)
    return out.to(device, non_blocking=True) if device is not None and isinstance(out, Tensor) else out


def _adjacency(slot: Slot, relation: int, value: Any) -> Any:
    """adj_t of the batch: rows are targets."""
    row, col = slot.edge_index(relation)
    ends = slot.sampler.relations[relation]
    sizes = slot.num_nodes(ends.target), slot.num_nodes(ends.source)
    e_id = slot.edge_id(relation)
    if isinstance(value, Tensor):  # torch.sparse
        ones = value.to_sparse_csr().values()[e_id] if e_id is not None else torch.ones(row.numel())
        rowptr = torch._convert_indices_from_coo_to_csr(col, sizes[0])
        return torch.sparse_csr_tensor(rowptr, row, ones, size=sizes)
    stored = value.storage.value()
    weight = None if stored is None or e_id is None else index_select(stored, e_id, dim=0)
    return SparseTensor(row=col, col=row, value=weight, sparse_sizes=sizes, is_sorted=False, trust_data=True)
