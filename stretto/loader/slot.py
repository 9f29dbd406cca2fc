"""Slot: one batch in one block of memory, as tensors."""

import ctypes as c
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto.kernels import pages
from stretto.loader.abi import library

if TYPE_CHECKING:
    from stretto.loader.native_sampler import NativeSampler


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

    def __init__(self, sampler: "NativeSampler", handle: c.c_void_p) -> None:
        lib = library()
        table = sampler.table_type()
        lib.stretto_slot_table(handle, table, len(table))
        self.table: list[int] = list(table)
        self.sampler = sampler
        if sampler.slots < pages.USES:  # later ones would only be counted
            sampler.slots += 1
            pages.read_at_random(*sampler.arrays)
        owner = _Owner(handle, self.table[0], self.table[1], lib.stretto_slot_release)
        self.memory = torch.from_numpy(np.asarray(owner))
        self._words: tuple[Any, Any] = (None, None)  # a memory, and the same as int64
        self.host: Tensor | None = None  # where memory came from, once it is on a device

    def _view(self, offset: int, count: int, dtype: torch.dtype, memory: Tensor | None = None) -> Tensor:
        # .data: a version counter of its own, so that changing one attribute in place leaves the others as they were.
        return (self.memory if memory is None else memory).narrow(0, offset, count * dtype.itemsize).view(dtype).data

    def _wide(self, offset: int, *shape: int, memory: Tensor | None = None) -> Tensor:
        """The same for int64 of one or two dimensions, by fewer steps: small batches feel each."""
        memory = self.memory if memory is None else memory
        if memory is not self._words[0]:
            self._words = memory, memory.view(torch.int64)
        return self._words[1].as_strided(shape, (shape[-1], 1)[-len(shape) :], offset // 8).data

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
        return self._wide(self.table[at + 1], self.table[at], memory=self.host if host else None)

    def tree(self, node_type: int = 0) -> Tensor | None:
        """In disjoint sampling, the seed each node belongs to. [nodes]"""
        at = self._nodes(node_type)
        return None if self.table[at + 2] < 0 else self._wide(self.table[at + 2], self.table[at])

    def nodes_per_hop(self, node_type: int = 0) -> list[int]:
        at = self._nodes(node_type)
        return self.table[at + 3 : at + 4 + self.sampler.num_hops]

    def edge_index(self, relation: int = 0) -> Tensor:
        """Local source and target of every edge, grouped by target. [2, edges]"""
        at = self._edges(relation)
        return self._wide(self.table[at + 1], 2, self.table[at])

    def rowptr(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """Where each target's edges start; host: as it was before the slot went to a device. [targets + 1]"""
        at = self._edges(relation)
        targets = self.num_nodes(self.sampler.relations[relation].target)
        if self.table[at + 2] < 0:
            return None
        return self._wide(self.table[at + 2], targets + 1, memory=self.host if host else None)

    def col(self, relation: int = 0) -> Tensor | None:
        """Local source of every edge, int32. [edges]"""
        at = self._edges(relation)
        return None if self.table[at + 3] < 0 else self._view(self.table[at + 3], self.table[at], torch.int32)

    def edge_id(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """The user's number of every edge. [edges]"""
        at = self._edges(relation)
        if self.table[at + 4] < 0:
            return None
        return self._wide(self.table[at + 4], self.table[at], memory=self.host if host else None)

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
