"""ClusterData and ClusterLoader (Cluster-GCN): PyG's classes, without pyg-lib or torch-sparse, over the native engine.

A graph is cut into parts once, by METIS: PyG's own where it has one, else pymetis (`pip install stretto[partition]`).
A batch is some parts and every edge between them: the subgraph their nodes induce, made by native threads ahead of the
trainer.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch_geometric.loader as pyg
import torch_geometric.typing
from torch import Tensor

from stretto.errors import fail
from stretto.loader import checks
from stretto.loader.arrays import EdgeArrays, GraphArrays, own
from stretto.loader.batch import Blueprint, remember
from stretto.loader.native_sampler import NativeSampler, NodeType, Relation, Sampling
from stretto.loader.slot import Slot
from stretto.loader.stream import Stream, Task
from stretto.loader.threaded import MEMORY, OF_PROCESSES, thread_count


class ClusterData(pyg.ClusterData):
    """PyG's ClusterData; where PyG finds no METIS, pymetis cuts the graph."""

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        if torch_geometric.typing.WITH_TORCH_SPARSE or torch_geometric.typing.WITH_METIS:
            return super()._metis(edge_index, num_nodes)
        return metis(edge_index, num_nodes, self.num_parts, recursive=self.recursive).to(edge_index.device)


def metis(edge_index: Tensor, num_nodes: int, num_parts: int, *, recursive: bool = False) -> Tensor:
    """The part of every node, by METIS. edge_index [2, E] -> [num_nodes] int64 in 0 .. num_parts - 1.

    METIS wants both directions of every edge, and no self-loops: a directed graph is cut as if it were undirected.
    """
    checks.count("ClusterData", "num_parts", num_parts, 1, 2**31 - 1)
    if num_parts == 1 or num_nodes == 0:
        return torch.zeros(num_nodes, dtype=torch.int64)
    ends = checks.edges("ClusterData", "edge_index", edge_index, num_nodes, num_nodes)
    try:
        import pymetis
    except ImportError:
        fail("ClusterData: cutting a graph needs METIS: pip install pymetis (or pyg-lib, or torch-sparse)")
    source, target = (end.long().numpy() for end in ends)
    rows, cols = np.concatenate([source, target]), np.concatenate([target, source])
    pairs = np.unique(rows[rows != cols] * num_nodes + cols[rows != cols])
    pointers = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(pairs // num_nodes, minlength=num_nodes), out=pointers[1:])
    adjacency = pymetis.CSRAdjacency(pointers, pairs % num_nodes)
    _, parts = pymetis.part_graph(num_parts, adjacency=adjacency, recursive=recursive)
    return torch.as_tensor(np.asarray(parts, dtype=np.int64))


class _Cut:
    """What Blueprint reads of a sampler: here, of the whole graph that parts are taken from."""

    e_id = True

    def __init__(self, num_nodes: int, edges: EdgeArrays) -> None:
        self.graph = GraphArrays([None], [None], {None: num_nodes}, {None: edges})


class ClusterLoader(pyg.ClusterLoader):
    """PyG's ClusterLoader: the same batches, made by native threads; num_workers is their number.

    Beyond PyG's arguments: num_threads, and memory (bytes of batches prepared ahead). With sparse_format="csc" a
    batch's edges come by target, and its edge_index carries its CSR.
    """

    def __init__(self, cluster_data: Any, **kwargs: Any) -> None:
        asked = checks.count("ClusterLoader", "num_workers", kwargs.get("num_workers", 0))
        for name in OF_PROCESSES:
            kwargs.pop(name, None)
        self.num_threads = thread_count("ClusterLoader", kwargs.pop("num_threads", None), asked)
        self.memory = checks.count("ClusterLoader", "memory", kwargs.pop("memory", None) or MEMORY, 1)
        super().__init__(cluster_data, **kwargs)  # type: ignore[no-untyped-call]
        self._made: tuple[Blueprint, NativeSampler] | None = None

    def __iter__(self) -> Any:
        if self.batch_sampler is None:
            return super().__iter__()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        blueprint, native = self._prepared()
        # torch's iterator draws a number for its workers first: with it drawn, the same seed gives the same order.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        stream = Stream(
            native, threads=self.num_threads, memory=self.memory, ahead=self.num_threads + 1, across=False,
            tasks=self._tasks,
        )  # fmt: skip
        stream.begin(0, 0)
        while (found := stream.next()) is not None:
            yield self._build(blueprint, found[0])

    def _tasks(self, seed: int, epoch: int) -> Iterator[Task]:
        assert self.batch_sampler is not None
        for number, parts in enumerate(self.batch_sampler):
            yield Task([self._nodes(parts)], [None], None, number)

    def _collate(self, batch: Any) -> Any:
        """The batch of these parts, made on this thread."""
        blueprint, native = self._prepared()
        return self._build(blueprint, native.sample(0, 0, 0, [self._nodes(batch)], [None]))

    def _nodes(self, parts: Any) -> Tensor:
        """The nodes of some parts, which follow each other in the permuted data."""
        ends = self.cluster_data.partition.partptr
        picked = checks.indices("ClusterLoader", "parts", torch.as_tensor(parts), ends.numel() - 1, of="part")
        return torch.cat([torch.arange(int(ends[p]), int(ends[p + 1])) for p in picked.tolist()])

    def _prepared(self) -> tuple[Blueprint, NativeSampler]:
        if self._made is not None and self._made[0].current() == self._made[0].signature:
            return self._made
        partition = self.cluster_data.partition
        parts = checks.indices("ClusterLoader", "partptr", partition.partptr)
        num_nodes = max(checks.indices("ClusterLoader", "indptr", partition.indptr).numel() - 1, 0)
        edges = EdgeArrays(*own("ClusterLoader", partition.indptr, partition.index, num_nodes, num_nodes))
        checks.pointers("ClusterLoader", "partptr", parts, max(parts.numel() - 1, 0), num_nodes)
        cut: Any = _Cut(num_nodes, edges)
        blueprint = Blueprint(self.cluster_data.data, cut)
        flags = Sampling.INDUCED | Sampling.EDGE_ID | (Sampling.CSR if self._by_target else Sampling(0))
        native = NativeSampler(
            [NodeType(num_nodes)], [Relation(edges.colptr, edges.row, [])], 0, flags, blueprint.slices
        )
        self._made = blueprint, native
        return self._made

    @property
    def _by_target(self) -> bool:
        return bool(self.cluster_data.partition.sparse_format == "csc")

    def _build(self, blueprint: Blueprint, slot: Slot) -> Any:
        with torch.inference_mode(False):  # ordinary tensors, whose graphs can be remembered
            out: Any = blueprint.build(slot)
            # The native side groups by target. PyG's usual format groups by source: there it was given the transpose.
            out.edge_index = remember(slot, 0) if self._by_target else slot.edge_index().flip(0)
            for name in ("n_id", "e_id"):
                if name not in self.cluster_data.data:
                    del out[name]
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}
