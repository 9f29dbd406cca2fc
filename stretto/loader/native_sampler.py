"""The native sampler (csrc/sampler) as a Python object: tensors in, slots of tensors out."""

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from stretto.errors import expect
from stretto.lifetime import Owned
from stretto.loader.abi import (
    Call,
    NodeTypeStruct,
    PlanStruct,
    RelationStruct,
    SliceStruct,
    address,
    failure,
    library,
)
from stretto.loader.slot import Slot


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
    """Rows of `value` that a batch takes along, by node or by edge. int8 with `scale` [columns] arrives as float."""

    value: Tensor
    type: int = 0
    of_edges: bool = False
    scale: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.scale is not None else self.value.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered row."""
        return int(np.prod(self.value.shape[1:], dtype=np.int64)) * self.dtype.itemsize


def running_weights(colptr: Tensor, weight: Tensor) -> Tensor:
    """Running sums of the weights within each target, both in CSC order. weight [edges] -> [edges] float64."""
    lib = library()
    weight = weight.detach().to(torch.float64).contiguous().view(-1)
    out = torch.empty(weight.numel(), dtype=torch.float64)
    if lib.stretto_sampler_weights(colptr.data_ptr(), colptr.numel() - 1, weight.data_ptr(), 1, out.data_ptr()) < 0:
        raise failure(lib)
    return out


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
        self.num_hops, self.flags = num_hops, flags
        # What batches read at random places.
        self.arrays: list[Tensor | None] = [array for r in self.relations for array in (r.colptr, r.row)]
        self.arrays += [s.value for s in self.slices]
        if Sampling.EDGE_ID in flags or any(s.of_edges for s in self.slices):
            self.arrays += [r.edge_id for r in self.relations]
        self.slots = 0  # how many were made, up to where it matters
        entries = len(self.node_types) * (4 + num_hops) + len(self.relations) * (5 + num_hops) + len(self.slices)
        self._table_size = 2 + entries  # what a slot tells of itself
        self._calls: list[Call] = []  # those nobody uses now
        fanouts = [np.asarray(r.fanout, dtype=np.int64) for r in self.relations]
        for relation, fanout in zip(self.relations, fanouts, strict=True):
            expect(len(fanout) == num_hops, f"sampler: 'fanout' has {len(fanout)} hops, wanted {num_hops}")
            expect(relation.colptr.dtype == torch.int64, f"sampler: 'colptr' is {relation.colptr.dtype}, wanted int64")
            wanted = self.node_types[relation.target].num_nodes + 1
            got = relation.colptr.numel()
            expect(got == wanted, f"sampler: 'colptr' has {got} entries, wanted {wanted} (targets + 1)")
        c_types = (NodeTypeStruct * len(self.node_types))(
            *(NodeTypeStruct(t.num_nodes, address(t.time)) for t in self.node_types)
        )
        c_relations = (RelationStruct * len(self.relations))()
        for r, relation, fanout in zip(c_relations, self.relations, fanouts, strict=True):
            r.colptr, r.row = relation.colptr.data_ptr(), relation.row.data_ptr()
            r.edge_id, r.time, r.running = map(address, (relation.edge_id, relation.time, relation.running))
            r.fanout, r.row_bytes = fanout.ctypes.data, relation.row.element_size()
            r.id_bytes = 8 if relation.edge_id is None else relation.edge_id.element_size()
            r.source, r.target = relation.source, relation.target
        c_slices = (SliceStruct * len(self.slices))()
        for s, part in zip(c_slices, self.slices, strict=True):
            s.data, s.scale = part.value.data_ptr(), address(part.scale)
            s.row_bytes, s.of_edges, s.type = part.row_bytes, int(part.of_edges), part.type
            s.columns = part.value.shape[1] if part.scale is not None else 0
        plan = PlanStruct(
            *(c.cast(array, c.c_void_p) for array in (c_types, c_relations, c_slices)),
            len(c_types), len(c_relations), len(c_slices), num_hops, int(flags),
        )  # fmt: skip
        handle = lib.stretto_sampler_create(c.byref(plan))
        if not handle:
            raise failure(lib)
        self.handle = handle
        kept = (self.node_types, self.relations, self.slices)
        self._owned = Owned(lib.stretto_sampler_destroy, handle, kept)

    def sample(
        self, seed: int, epoch: int, batch: int, seeds: Sequence[Tensor | None], times: Sequence[Tensor | None]
    ) -> Slot:
        """One batch, on this thread. seeds and times: one int64 tensor (or None) per node type."""
        lib = library()
        call = self.borrow()
        kept = call.fill(seed, epoch, batch, seeds, times)
        if lib.stretto_sampler_sample(self.handle, call.seeds, call.slot) < 0:
            raise failure(lib)
        del kept
        return self.slot(call)

    def borrow(self) -> Call:
        """A call to fill; several threads may have one each. Not given back, it is forgotten."""
        try:
            return self._calls.pop()
        except IndexError:
            return Call(len(self.node_types), self._table_size)

    def give_back(self, call: Call) -> None:
        self._calls.append(call)

    def slot(self, call: Call) -> Slot:
        """What came back from a call, which is given back."""
        slot = Slot(self, *call.answer(library()))
        self._calls.append(call)
        return slot
