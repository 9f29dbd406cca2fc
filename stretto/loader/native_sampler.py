"""The native sampler (csrc/sampler) as a Python object: tensors in, slots of tensors out."""

import ctypes as c
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.errors import fail
from stretto.kernels.abi import NODE_TYPE, RELATION, SAMPLING_PLAN, SLICE
from stretto.lifetime import Owned
from stretto.loader import checks
from stretto.loader.abi import Call, address, failure, library
from stretto.loader.slot import Slot

MOST_HOPS = 1 << 10
MOST_DRAWN = 2**31 - 1  # nodes and edges of one batch
# Neighbours of one node with replacement, which are drawn however few there are: beyond, one node takes gigabytes.
MOST_REPLACED = 2**24


class Sampling(IntFlag):
    """How to sample; see stretto_sampling in csrc/abi.h."""

    REPLACE = 1
    DISJOINT = 2
    LAYERED = 4
    LAST = 8
    INDUCED = 16
    LABOR = 32
    SHARED = 64
    EDGE_ID = 128
    CSR = 256


@dataclass
class NodeType:
    """Nodes of one type; time [num_nodes] int64."""

    num_nodes: int
    time: Tensor | None = None


@dataclass
class Relation:
    """One edge type in CSC form: colptr [targets + 1] int64, row and edge_id [edges] int32 or int64."""

    colptr: Tensor
    row: Tensor
    fanout: Sequence[int]
    source: int = 0
    target: int = 0
    edge_id: Tensor | None = None
    time: Tensor | None = None
    running: Tensor | None = None


@dataclass
class Slice:
    """Rows of `value` that a batch takes along, by node or by edge. int8 with `scale` [columns] arrives as float.

    Rows may be any number of bytes apart; the values of each lie side by side.
    """

    value: Tensor
    type: int = 0
    of_edges: bool = False
    scale: Tensor | None = None
    name: str = "value"  # in errors

    def __post_init__(self) -> None:
        self.delivered = torch.float32 if self.scale is not None else self.value.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered row."""
        return math.prod(self.value.shape[1:]) * self.delivered.itemsize


def running_weights(colptr: Tensor, weight: Tensor) -> Tensor:
    """Running sums of the weights within each target, both in CSC order. weight [edges] -> [edges] float64."""
    lib = library()
    weight = checks.real("sampler", "weight", weight)
    weight = weight.detach().to("cpu", torch.float64).contiguous().view(-1)
    checks.vector("sampler", "colptr", colptr, (torch.int64,))
    checks.pointers("sampler", "colptr", colptr, max(colptr.numel() - 1, 0), weight.numel(), rising=False)
    out = torch.empty(weight.numel(), dtype=torch.float64)
    if lib.stretto_sampler_weights(colptr.data_ptr(), colptr.numel() - 1, weight.data_ptr(), 1, out.data_ptr()) < 0:
        raise failure(lib)
    return out


def _fanout(fanout: Sequence[int], num_hops: int, flags: Sampling) -> list[int]:
    """The fan-out of every hop; beyond what a batch holds it is all there are, or refused with replacement."""
    if len(fanout) != num_hops:
        fail(f"sampler: 'fanout' has {len(fanout)} hops, wanted {num_hops}")
    most = MOST_REPLACED if Sampling.REPLACE in flags else 2**64
    return [min(checks.count("sampler", "fanout", k, -1, most), MOST_DRAWN) for k in fanout]


def _check_nodes(nodes: NodeType) -> None:
    checks.count("sampler", "num_nodes", nodes.num_nodes)
    if nodes.time is not None:
        checks.vector("sampler", "time", nodes.time, (torch.int64,), nodes.num_nodes)


def _check_relation(relation: Relation, node_types: Sequence[NodeType]) -> None:
    """All but whether colptr rises and row lies in range, which the native side looks at as it is made."""
    for name in ("source", "target"):
        checks.count("sampler", name, getattr(relation, name), 0, len(node_types) - 1)
    num_edges = checks.vector("sampler", "row", relation.row, checks.INDEX).numel()
    colptr = checks.vector("sampler", "colptr", relation.colptr, (torch.int64,))
    checks.pointers("sampler", "colptr", colptr, node_types[relation.target].num_nodes, num_edges, rising=False)
    for name, dtypes in (("edge_id", checks.INDEX), ("time", (torch.int64,)), ("running", (torch.float64,))):
        if getattr(relation, name) is not None:
            checks.vector("sampler", name, getattr(relation, name), dtypes, num_edges)


def _check_slice(part: Slice, node_types: Sequence[NodeType], relations: Sequence[Relation]) -> None:
    """One row for each node or edge that a batch may ask for, each with its values side by side."""
    who = "NeighborLoader"
    checks.count(who, "type", part.type, 0, len(relations if part.of_edges else node_types) - 1)
    if checks.row_stride(part.value) is None:
        fail(
            f"{who}: '{part.name}' is {checks.shape_of(part.value)}, wanted an array in memory with one row for each "
            f"{'edge' if part.of_edges else 'node'}, the values of a row side by side"
        )
    rows = part.value.size(0)
    wanted = relations[part.type].row.numel() if part.of_edges else node_types[part.type].num_nodes
    if rows != wanted:
        fail(
            f"{who}: '{part.name}' has {rows} rows, wanted {wanted}, one for each {'edge' if part.of_edges else 'node'}"
        )
    edge_id = relations[part.type].edge_id if part.of_edges else None
    if edge_id is not None:
        checks.in_range(who, f"edge ids of {part.name}", edge_id, rows, of="edge")
    if part.scale is not None:
        if part.value.dtype != torch.int8 or part.value.dim() != 2:
            fail(f"{who}: '{part.name}' is {checks.shape_of(part.value)}, wanted int8 [rows, columns]: it has a scale")
        checks.vector(who, f"{part.name}.scale", part.scale, (torch.float32,), part.value.size(1))


class NativeSampler:
    """A sampler over fixed graph arrays, which it keeps alive."""

    def __init__(
        self,
        node_types: Sequence[NodeType],
        relations: Sequence[Relation],
        num_hops: int,
        flags: Sampling,
        slices: Sequence[Slice] = (),
    ) -> None:
        lib = library()
        self.node_types, self.relations, self.slices = list(node_types), list(relations), list(slices)
        self.num_hops, self.flags = checks.count("sampler", "num_hops", num_hops, most=MOST_HOPS), flags
        if Sampling.CSR in flags and Sampling.LAYERED in flags:
            fail("sampler: 'flags' has CSR and LAYERED: a target has edges of several hops there, no one row")
        # What batches read at random places.
        self.arrays: list[Tensor | None] = [array for r in self.relations for array in (r.colptr, r.row)]
        self.arrays += [s.value for s in self.slices]
        if Sampling.EDGE_ID in flags or any(s.of_edges for s in self.slices):
            self.arrays += [r.edge_id for r in self.relations]
        self.slots = 0  # how many were made, up to where it matters
        # What a slot tells of itself: two words, then of each node type, of each relation and of each slice.
        self.nodes_at = [2 + i * (4 + num_hops) for i in range(len(self.node_types))]
        edges_at = 2 + len(self.node_types) * (4 + num_hops)
        self.edges_at = [edges_at + r * (5 + num_hops) for r in range(len(self.relations))]
        self.slices_at = edges_at + len(self.relations) * (5 + num_hops)
        self._table_size = self.slices_at + len(self.slices)
        self._calls: list[Call] = []  # those nobody uses now
        fanouts = [np.asarray(_fanout(r.fanout, num_hops, flags), dtype=np.int64) for r in self.relations]
        for node_type in self.node_types:
            _check_nodes(node_type)
        for relation in self.relations:
            _check_relation(relation, self.node_types)
        for part in self.slices:
            _check_slice(part, self.node_types, self.relations)
        plan, inputs = self._plan(fanouts)
        handle = lib.stretto_sampler_create(c.byref(plan))
        if not handle:
            raise failure(lib)
        self.handle = handle
        del inputs  # the native side has copied them, and points to what the types, relations and slices hold
        checks.fixed(*self._bound())
        self._owned = Owned(lib.stretto_sampler_destroy, handle, (self.node_types, self.relations, self.slices))

    def _plan(self, fanouts: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """What is sampled from, as the native side reads it, and the arrays that this points to."""
        c_types = (NODE_TYPE * len(self.node_types))(
            *(NODE_TYPE(t.num_nodes, address(t.time)) for t in self.node_types)
        )
        c_relations = (RELATION * len(self.relations))()
        for r, relation, fanout in zip(c_relations, self.relations, fanouts, strict=True):
            r.colptr, r.row = relation.colptr.data_ptr(), relation.row.data_ptr()
            r.edge_id, r.time, r.running = map(address, (relation.edge_id, relation.time, relation.running))
            r.fanout, r.row_bytes = fanout.ctypes.data, relation.row.element_size()
            r.id_bytes = 8 if relation.edge_id is None else relation.edge_id.element_size()
            r.source, r.target = relation.source, relation.target
        c_slices = (SLICE * len(self.slices))()
        for s, part in zip(c_slices, self.slices, strict=True):
            s.data, s.scale = part.value.data_ptr(), address(part.scale)
            s.row_bytes, s.of_edges, s.type = part.row_bytes, int(part.of_edges), part.type
            s.stride = checks.row_stride(part.value)
            s.columns = part.value.shape[1] if part.scale is not None else 0
        plan = SAMPLING_PLAN(
            *(c.cast(array, c.c_void_p) for array in (c_types, c_relations, c_slices)),
            len(c_types), len(c_relations), len(c_slices), self.num_hops, int(self.flags),
        )  # fmt: skip
        return plan, (c_types, c_relations, c_slices, fanouts)

    def sample(
        self, seed: int, epoch: int, batch: int, seeds: Sequence[Tensor | None], times: Sequence[Tensor | None]
    ) -> Slot:
        """One batch, on this thread. seeds and times: one int64 tensor (or None) per node type."""
        lib = library()
        call = self.borrow()
        inputs = call.fill(seed, epoch, batch, seeds, times)
        if lib.stretto_sampler_sample(self.handle, call.seeds, call.slot) < 0:
            raise failure(lib)
        del inputs
        handle, table = call.answer()
        self._calls.append(call)
        return Slot(self, handle, table)

    def _bound(self) -> list[Tensor | None]:
        """Every array the native side has the address of."""
        of_edges = [a for r in self.relations for a in (r.colptr, r.row, r.edge_id, r.time, r.running)]
        return [*(t.time for t in self.node_types), *of_edges, *(a for s in self.slices for a in (s.value, s.scale))]

    def borrow(self) -> Call:
        """A call to fill; several threads may have one each. Not given back, it is forgotten."""
        try:
            return self._calls.pop()
        except IndexError:
            return Call(len(self.node_types), self._table_size)
