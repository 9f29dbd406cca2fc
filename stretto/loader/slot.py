"""Slot: one batch in one block of memory, as tensors."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from stretto.loader.abi import tensor_of
from stretto.memory import pages

if TYPE_CHECKING:
    from stretto.loader.native_sampler import NativeSampler


class Slot:
    """One batch in one block of memory, which may be moved to a device whole. Every tensor is a view of it."""

    def __init__(self, sampler: "NativeSampler", handle: int, table: list[int]) -> None:
        self.table = table
        self.sampler = sampler
        if sampler.slots < pages.USES:  # later ones would only be counted
            sampler.slots += 1
            pages.read_at_random(*sampler.arrays)
        self._bytes = tensor_of(handle).numpy()
        self._words = self._bytes.view(np.int64)
        self._device: Tensor | None = None  # the whole, once it is on a device

    @property
    def memory(self) -> Tensor:
        """The whole, where its tensors are."""
        return torch.from_numpy(self._bytes) if self._device is None else self._device

    @property
    def on_device(self) -> bool:
        return self._device is not None

    def move(self, memory: Tensor) -> None:
        """From now on tensors are views of this copy of the memory on a device."""
        self._device = memory

    # Tensors made from numpy's views have version counters of their own: changing one attribute in place leaves the
    # others as they were. On a device .data does the same.
    def _view(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        if self._device is None:
            return torch.from_numpy(self._bytes[offset : offset + size]).view(dtype)
        return self._device.narrow(0, offset, size).view(dtype).data

    def _wide(self, offset: int, count: int, *, rows: int = 0, host: bool = False) -> Tensor:
        """int64 of one or two dimensions, by fewer steps: small batches feel each. host: though there is a copy."""
        if host or self._device is None:
            words = self._words[offset >> 3 : (offset >> 3) + count]
            return torch.from_numpy(words.reshape(rows, -1) if rows else words)
        there = self._view(offset, count, torch.int64)
        return there.view(rows, -1) if rows else there

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
        return self._wide(self.table[at + 1], self.table[at], host=host)

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
        return self._wide(self.table[at + 1], 2 * self.table[at], rows=2)

    def rowptr(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """Where each target's edges start; host: as it was before the slot went to a device. [targets + 1]"""
        at = self._edges(relation)
        targets = self.num_nodes(self.sampler.relations[relation].target)
        if self.table[at + 2] < 0:
            return None
        return self._wide(self.table[at + 2], targets + 1, host=host)

    def col(self, relation: int = 0) -> Tensor | None:
        """Local source of every edge, int32. [edges]"""
        at = self._edges(relation)
        return None if self.table[at + 3] < 0 else self._view(self.table[at + 3], self.table[at], torch.int32)

    def edge_id(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """The user's number of every edge. [edges]"""
        at = self._edges(relation)
        if self.table[at + 4] < 0:
            return None
        return self._wide(self.table[at + 4], self.table[at], host=host)

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
