"""The native sampler and engine (csrc/sampler) as Python objects: tensors in, slots of tensors out."""

import ctypes as c
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.errors import StrettoError, expect, fail
from stretto.kernels import native


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


class _NodeType(c.Structure):
    _fields_ = (("num_nodes", c.c_int64), ("time", c.c_void_p))


class _Relation(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("colptr", "row", "edge_id", "time", "running", "fanout")),
        *((name, c.c_int64) for name in ("row_bytes", "id_bytes", "source", "target")),
    )


class _Slice(c.Structure):
    _fields_ = (
        ("data", c.c_void_p),
        ("scale", c.c_void_p),
        *((name, c.c_int64) for name in ("row_bytes", "of_edges", "type", "columns")),
    )


class _Plan(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("node_types", "relations", "slices")),
        *((name, c.c_int64) for name in ("num_node_types", "num_relations", "num_slices", "num_hops", "flags")),
    )


class _Seeds(c.Structure):
    _fields_ = (
        *((name, c.c_uint64) for name in ("seed", "epoch", "batch")),
        *((name, c.c_void_p) for name in ("seeds", "counts", "times")),
    )


PIN = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_uint64, c.c_uint)
UNPIN = c.CFUNCTYPE(c.c_int, c.c_void_p)

_P, _I64 = c.c_void_p, c.c_int64
# name -> (result, arguments)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "stretto_sampler_create": (_P, (_P,)),
    "stretto_sampler_destroy": (None, (_P,)),
    "stretto_sampler_weights": (c.c_int, (_P, _I64, _P, c.c_int, _P)),
    "stretto_sampler_sample": (c.c_int, (_P, _P, _P)),
    "stretto_slot_table": (_I64, (_P, _P, _I64)),
    "stretto_slot_release": (None, (_P,)),
    "stretto_engine_create": (_P, (_P, c.c_int, _I64, _P, _P)),
    "stretto_engine_submit": (c.c_int, (_P, _P)),
    "stretto_engine_next": (c.c_int, (_P, _I64, _P)),
    "stretto_engine_cancel": (None, (_P,)),
    "stretto_engine_destroy": (None, (_P,)),
    "stretto_engine_state": (None, (_P, _P)),
}
_declared: Any = None


def library() -> Any:
    """libstretto with the sampler's functions declared; says why where it is not there."""
    global _declared
    if _declared is None:
        lib = native.library()
        if lib is None:
            fail(f"loader: sampling needs libstretto, which is not loaded: {native.why_not()}")
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        _declared = lib
    return _declared


def _failure(lib: Any) -> StrettoError:
    lib.stretto_error.restype = c.c_char_p
    return StrettoError(lib.stretto_error().decode())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


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
        raise _failure(lib)
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
        fanouts = [np.asarray(r.fanout, dtype=np.int64) for r in self.relations]
        for relation, fanout in zip(self.relations, fanouts, strict=True):
            expect(len(fanout) == num_hops, f"sampler: 'fanout' has {len(fanout)} hops, wanted {num_hops}")
            expect(relation.colptr.dtype == torch.int64, f"sampler: 'colptr' is {relation.colptr.dtype}, wanted int64")
            wanted = self.node_types[relation.target].num_nodes + 1
            got = relation.colptr.numel()
            expect(got == wanted, f"sampler: 'colptr' has {got} entries, wanted {wanted} (targets + 1)")
        c_types = (_NodeType * len(self.node_types))(
            *(_NodeType(t.num_nodes, _address(t.time)) for t in self.node_types)
        )
        c_relations = (_Relation * len(self.relations))()
        for r, relation, fanout in zip(c_relations, self.relations, fanouts, strict=True):
            r.colptr, r.row = relation.colptr.data_ptr(), relation.row.data_ptr()
            r.edge_id, r.time, r.running = map(_address, (relation.edge_id, relation.time, relation.running))
            r.fanout, r.row_bytes = fanout.ctypes.data, relation.row.element_size()
            r.id_bytes = 8 if relation.edge_id is None else relation.edge_id.element_size()
            r.source, r.target = relation.source, relation.target
        c_slices = (_Slice * len(self.slices))()
        for s, part in zip(c_slices, self.slices, strict=True):
            s.data, s.scale = part.value.data_ptr(), _address(part.scale)
            s.row_bytes, s.of_edges, s.type = part.row_bytes, int(part.of_edges), part.type
            s.columns = part.value.shape[1] if part.scale is not None else 0
        plan = _Plan(
            *(c.cast(array, c.c_void_p) for array in (c_types, c_relations, c_slices)),
            len(c_types), len(c_relations), len(c_slices), num_hops, int(flags),
        )  # fmt: skip
        handle = lib.stretto_sampler_create(c.byref(plan))
        if not handle:
            raise _failure(lib)
        self.handle = handle
        kept = (self.node_types, self.relations, self.slices)
        weakref.finalize(self, _destroy, lib.stretto_sampler_destroy, handle, kept)

    def sample(
        self, seed: int, epoch: int, batch: int, seeds: Sequence[Tensor | None], times: Sequence[Tensor | None]
    ) -> "Slot":
        """One batch, on this thread. seeds and times: one int64 tensor (or None) per node type."""
        lib = library()
        slot = c.c_void_p()
        c_seeds = _Pack(seed, epoch, batch, seeds, times)
        if lib.stretto_sampler_sample(self.handle, c.byref(c_seeds.struct), c.byref(slot)) < 0:
            raise _failure(lib)
        return Slot(self, slot)


def _destroy(function: Any, handle: int, *kept: Any) -> None:
    """Hands a handle back. `kept` are the objects whose memory the handle uses: they live until here."""
    function(handle)


class _Pack:
    """stretto_seeds and the arrays it points to."""

    def __init__(
        self, seed: int, epoch: int, batch: int, seeds: Sequence[Tensor | None], times: Sequence[Tensor | None]
    ) -> None:
        n = len(seeds)
        self._seeds = [None if s is None else s.to(torch.int64).contiguous() for s in seeds]
        self._times = [None if t is None else t.to(torch.int64).contiguous() for t in times]
        for s, t in zip(self._seeds, self._times, strict=True):
            if t is not None and (s is None or s.numel() != t.numel()):
                fail(f"sampler: {0 if s is None else s.numel()} seeds, but {t.numel()} times")
        self._pointers = (c.c_void_p * n)(*(_address(s) for s in self._seeds))
        self._counts = (c.c_int64 * n)(*(0 if s is None else s.numel() for s in self._seeds))
        self._time_pointers = (c.c_void_p * n)(*(_address(t) for t in self._times))
        self.struct = _Seeds(
            seed & 0xFFFFFFFFFFFFFFFF, epoch, batch,
            *(c.cast(array, c.c_void_p) for array in (self._pointers, self._counts, self._time_pointers)),
        )  # fmt: skip


class _Owner:
    """Holds a slot's memory for numpy and torch; gives it back when the last tensor on it is gone."""

    __slots__ = ("__array_interface__", "_release", "_slot")

    def __init__(self, slot: c.c_void_p, address: int, size: int, release: Any) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self._slot, self._release = slot, release

    def __del__(self) -> None:
        self._release(self._slot)


class Slot:
    """One batch in one block of memory. Every tensor is a view of `memory`, which may be moved to a device whole."""

    def __init__(self, sampler: NativeSampler, handle: c.c_void_p) -> None:
        lib = library()
        hops = sampler.num_hops
        size = 2 + len(sampler.node_types) * (4 + hops) + len(sampler.relations) * (5 + hops) + len(sampler.slices)
        table = (c.c_int64 * size)()
        lib.stretto_slot_table(handle, table, size)
        self.table: list[int] = list(table)
        self.sampler = sampler
        owner = _Owner(handle, self.table[0], self.table[1], lib.stretto_slot_release)
        self.memory = torch.from_numpy(np.asarray(owner))
        self.host: Tensor | None = None  # where memory came from, once it is on a device

    def _view(self, offset: int, count: int, dtype: torch.dtype, memory: Tensor | None = None) -> Tensor:
        # .data: a version counter of its own, so that changing one attribute in place leaves the others as they were.
        return (self.memory if memory is None else memory).narrow(0, offset, count * dtype.itemsize).view(dtype).data

    def _nodes(self, node_type: int) -> int:
        return 2 + node_type * (4 + self.sampler.num_hops)

    def _edges(self, relation: int) -> int:
        hops = self.sampler.num_hops
        return 2 + len(self.sampler.node_types) * (4 + hops) + relation * (5 + hops)

    def num_nodes(self, node_type: int = 0) -> int:
        return self.table[self._nodes(node_type)]

    def num_edges(self, relation: int = 0) -> int:
        return self.table[self._edges(relation)]

    def n_id(self, node_type: int = 0, *, host: bool = False) -> Tensor:
        """Global ids of the sampled nodes, seeds first. [nodes]"""
        at = self._nodes(node_type)
        return self._view(self.table[at + 1], self.table[at], torch.int64, self.host if host else None)

    def tree(self, node_type: int = 0) -> Tensor | None:
        """In disjoint sampling, the seed each node belongs to. [nodes]"""
        at = self._nodes(node_type)
        return None if self.table[at + 2] < 0 else self._view(self.table[at + 2], self.table[at], torch.int64)

    def nodes_per_hop(self, node_type: int = 0) -> list[int]:
        at = self._nodes(node_type)
        return self.table[at + 3 : at + 4 + self.sampler.num_hops]

    def edge_index(self, relation: int = 0) -> Tensor:
        """Local source and target of every edge, grouped by target. [2, edges]"""
        at = self._edges(relation)
        return self._view(self.table[at + 1], 2 * self.table[at], torch.int64).view(2, self.table[at])

    def rowptr(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """Where each target's edges start; host: as it was before the slot went to a device. [targets + 1]"""
        at = self._edges(relation)
        targets = self.num_nodes(self.sampler.relations[relation].target)
        if self.table[at + 2] < 0:
            return None
        return self._view(self.table[at + 2], targets + 1, torch.int64, self.host if host else None)

    def col(self, relation: int = 0) -> Tensor | None:
        """Local source of every edge, int32. [edges]"""
        at = self._edges(relation)
        return None if self.table[at + 3] < 0 else self._view(self.table[at + 3], self.table[at], torch.int32)

    def edge_id(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """The user's number of every edge. [edges]"""
        at = self._edges(relation)
        if self.table[at + 4] < 0:
            return None
        return self._view(self.table[at + 4], self.table[at], torch.int64, self.host if host else None)

    def edges_per_hop(self, relation: int = 0) -> list[int]:
        at = self._edges(relation)
        return self.table[at + 5 : at + 5 + self.sampler.num_hops]

    def slice(self, number: int) -> Tensor:
        """The rows of slice `number`. [nodes or edges, ...]"""
        part = self.sampler.slices[number]
        offset = self.table[self._edges(len(self.sampler.relations)) + number]
        rows = self.num_edges(part.type) if part.of_edges else self.num_nodes(part.type)
        shape = (rows, *part.value.shape[1:])
        return self._view(offset, int(np.prod(shape, dtype=np.int64)), part.dtype).view(shape)


class Engine:
    """Threads that prepare submitted batches ahead of their reader; see csrc/sampler/engine.h."""

    def __init__(
        self, sampler: NativeSampler, *, threads: int, memory: int, pin: Any = None, unpin: Any = None
    ) -> None:
        expect(threads >= 1, f"engine: 'threads' is {threads}, wanted at least 1")
        expect(memory >= 1, f"engine: 'memory' is {memory} bytes, wanted at least 1")
        lib = library()
        self.sampler = sampler
        callbacks = [None if f is None else c.cast(f, c.c_void_p) for f in (pin, unpin)]
        handle = lib.stretto_engine_create(sampler.handle, threads, memory, *callbacks)
        if not handle:
            raise _failure(lib)
        self.handle = handle
        self.close = weakref.finalize(self, _destroy, lib.stretto_engine_destroy, handle, sampler, pin, unpin)

    def _open(self) -> Any:
        """The engine's handle; an error once it is closed."""
        if not self.close.alive:
            fail("engine: used after it was closed")
        return self.handle

    def submit(
        self, seed: int, epoch: int, batch: int, seeds: Sequence[Tensor | None], times: Sequence[Tensor | None]
    ) -> None:
        lib = library()
        if lib.stretto_engine_submit(self._open(), c.byref(_Pack(seed, epoch, batch, seeds, times).struct)) < 0:
            raise _failure(lib)

    def next(self) -> Slot:
        """The next batch in order of submission. Wakes ten times a second, so that Ctrl-C is heard."""
        while (slot := self.poll(100)) is None:
            pass
        return slot

    def poll(self, milliseconds: int = 0) -> Slot | None:
        """The next batch if it is ready within that time."""
        lib = library()
        slot = c.c_void_p()
        status = lib.stretto_engine_next(self._open(), milliseconds, c.byref(slot))
        if status < 0:
            raise _failure(lib)
        return Slot(self.sampler, slot) if status else None

    def cancel(self) -> None:
        library().stretto_engine_cancel(self._open())

    def state(self) -> dict[str, int]:
        """Bytes waiting, bytes kept for reuse, the most of the first so far, and batches prepared."""
        values = (c.c_int64 * 4)()
        library().stretto_engine_state(self._open(), values)
        return dict(zip(("waiting", "kept", "peak", "prepared"), values, strict=True))
