"""Slot: one batch in one block of memory, as tensors."""

import math
from typing import TYPE_CHECKING

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
        self._words = self._bytes.view("int64")
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
    def _view(self, offset: int, count: int, dtype: torch.dtype, *, host: bool = False) -> Tensor:
        size = count * dtype.itemsize
        if host or self._device is None:
            return torch.from_numpy(self._bytes[offset : offset + size]).view(dtype)
        return self._device.narrow(0, offset, size).view(dtype).data

    # The table (stretto_slot_table in csrc/abi.h): sampler.nodes_at and edges_at say where a type's entries begin. What
    # every batch has is read from the host's words right here: small batches feel each call.

    def num_nodes(self, node_type: int = 0) -> int:
        return self.table[self.sampler.nodes_at[node_type]]

    def num_edges(self, relation: int = 0) -> int:
        return self.table[self.sampler.edges_at[relation]]

    def n_id(self, node_type: int = 0, *, host: bool = False) -> Tensor:
        """Global ids of the sampled nodes, seeds first. [nodes]."""
        at = self.sampler.nodes_at[node_type]
        count, offset = self.table[at], self.table[at + 1]
        if host or self._device is None:
            return torch.from_numpy(self._words[offset >> 3 : (offset >> 3) + count])
        return self._view(offset, count, torch.int64)

    def tree(self, node_type: int = 0) -> Tensor | None:
        """In disjoint sampling, the seed each node belongs to. [nodes]."""
        at = self.sampler.nodes_at[node_type]
        return None if self.table[at + 2] < 0 else self._view(self.table[at + 2], self.table[at], torch.int64)

    def nodes_per_hop(self, node_type: int = 0) -> list[int]:
        at = self.sampler.nodes_at[node_type]
        return self.table[at + 3 : at + 4 + self.sampler.num_hops]

    def edge_index(self, relation: int = 0) -> Tensor:
        """Local source and target of every edge, grouped by target. [2, edges]."""
        at = self.sampler.edges_at[relation]
        count, offset = 2 * self.table[at], self.table[at + 1]
        if self._device is None:
            return torch.from_numpy(self._words[offset >> 3 : (offset >> 3) + count].reshape(2, -1))
        return self._view(offset, count, torch.int64).view(2, -1)

    def rowptr(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """Where each target's edges start; host: as it was before the slot went to a device. [targets + 1]."""
        at = self.sampler.edges_at[relation]
        targets = self.table[self.sampler.nodes_at[self.sampler.relations[relation].target]]
        if self.table[at + 2] < 0:
            return None
        return self._view(self.table[at + 2], targets + 1, torch.int64, host=host)

    def col(self, relation: int = 0) -> Tensor | None:
        """Local source of every edge, int32. [edges]."""
        at = self.sampler.edges_at[relation]
        return None if self.table[at + 3] < 0 else self._view(self.table[at + 3], self.table[at], torch.int32)

    def edge_id(self, relation: int = 0, *, host: bool = False) -> Tensor | None:
        """The user's number of every edge. [edges]."""
        at = self.sampler.edges_at[relation]
        count, offset = self.table[at], self.table[at + 4]
        if offset < 0:
            return None
        if host or self._device is None:
            return torch.from_numpy(self._words[offset >> 3 : (offset >> 3) + count])
        return self._view(offset, count, torch.int64)

    def edges_per_hop(self, relation: int = 0) -> list[int]:
        at = self.sampler.edges_at[relation]
        return self.table[at + 5 : at + 5 + self.sampler.num_hops]

    def slice(self, number: int) -> Tensor:
        """The rows of slice `number`. [nodes or edges, ...]."""
        part, table, sampler = self.sampler.slices[number], self.table, self.sampler
        rows = table[sampler.edges_at[part.type] if part.of_edges else sampler.nodes_at[part.type]]
        shape, offset = (rows, *part.value.shape[1:]), table[sampler.slices_at + number]
        dtype = part.delivered
        size = math.prod(shape) * dtype.itemsize
        if self._device is None:
            return torch.from_numpy(self._bytes[offset : offset + size]).view(dtype).view(shape)
        return self._view(offset, math.prod(shape), dtype).view(shape)
