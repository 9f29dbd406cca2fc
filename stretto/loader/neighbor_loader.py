"""NeighborLoader and LinkNeighborLoader: PyG's classes and signatures over the threaded engine."""

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.loader as pyg
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import EdgeSamplerInput, HeteroSamplerOutput, SamplerOutput

from stretto.errors import expect
from stretto.loader import checks
from stretto.loader.batch import put
from stretto.loader.clock import mixed
from stretto.loader.sampler import NeighborSampler
from stretto.loader.store import Store
from stretto.loader.stream import Task
from stretto.loader.threaded import Threaded

# Arguments of stretto's sampler that PyG's does not have.
_OF_SAMPLER = ("method", "semantics", "layer_dependency", "e_id")


class NeighborLoader(Threaded, pyg.NeighborLoader):  # type: ignore[misc]
    """PyG's NeighborLoader, several times faster and in one process. `data` may also be a stretto.loader.Store.

    All of PyG's arguments mean what they mean there; num_workers is the number of threads. Beyond them:

    device       where batches arrive; for a GPU, one asynchronous copy per batch from pinned memory
    num_threads  threads that prepare batches (default: num_workers, or half the cores, at most 4)
    memory       bytes of batches prepared ahead (default 256 MiB)
    method       "uniform", or "labor": fewer nodes per batch at the same fan-out
    semantics    "frontier" as PyG, or "layered" as SALIENT: every hop samples all nodes known so far
    layer_dependency, batch_dependency   labor: share random numbers between hops, and between so many batches
    e_id         False: leave edge ids out
    trim         True: batch.layers lists what each layer of a model needs (stretto.loader.layers)
    """

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        **kwargs: Any,
    ) -> None:
        options = {name: kwargs.pop(name) for name in _OF_SAMPLER if name in kwargs}
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data,
                num_neighbors,
                subgraph_type=subgraph_type,
                replace=replace,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                directed=directed,
                **options,
            )
        self._take_options(kwargs)
        self.sampler_ = neighbor_sampler
        if isinstance(data, Store):
            self.store, data = data, data.data
        super().__init__(
            data,
            num_neighbors,
            input_nodes=input_nodes,
            input_time=input_time,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
        seeds = self.input_data
        _check_seeds(seeds.node, neighbor_sampler, seeds.input_type, "input_nodes")
        _check_times(seeds.time, seeds.node, "input_time")

    def _task(self, index: Tensor, seed: int, epoch: int, number: int, key: int) -> Task:
        inputs = self.input_data
        input_id = index if inputs.input_id is None else inputs.input_id[index]
        nodes, time = inputs.node[index], None if inputs.time is None else inputs.time[index]
        if inputs.input_type is None:
            return Task([nodes], [time], (input_id, time), key)
        kind = inputs.input_type
        seeds, times = self.sampler_.by_type({kind: nodes}, None if time is None else {kind: time})
        return Task(seeds, times, (input_id, time), key)

    def _label(self, batch: Any, task: Task) -> None:
        input_id, time = task.metadata
        if self.device is not None:
            input_id, time = self._here(input_id), self._here(time)
        store = batch if self.input_data.input_type is None else batch[self.input_data.input_type]
        values = {"input_id": input_id, "seed_time": time, "batch_size": input_id.numel()}
        put(store, values, plain=type(batch) in (Data, HeteroData))


class LinkNeighborLoader(Threaded, pyg.LinkNeighborLoader):  # type: ignore[misc]
    """PyG's LinkNeighborLoader over the threaded engine; options beyond PyG's as in NeighborLoader."""

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        transform_sampler_output: Callable[[Any], Any] | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        **kwargs: Any,
    ) -> None:
        options = {name: kwargs.pop(name) for name in _OF_SAMPLER if name in kwargs}
        if neighbor_sampler is None:
            neighbor_sampler = NeighborSampler(
                data,
                num_neighbors,
                subgraph_type=subgraph_type,
                replace=replace,
                disjoint=disjoint,
                temporal_strategy=temporal_strategy,
                time_attr=time_attr,
                weight_attr=weight_attr,
                is_sorted=is_sorted,
                directed=directed,
                **options,
            )
        self._take_options(kwargs)
        self.sampler_ = neighbor_sampler
        if isinstance(data, Store):
            self.store, data = data, data.data
        super().__init__(
            data,
            num_neighbors,
            edge_label_index=edge_label_index,
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            neg_sampling=neg_sampling,
            neg_sampling_ratio=neg_sampling_ratio,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
        ends = self.input_data.input_type or (None, None, None)
        _check_seeds(self.input_data.row, neighbor_sampler, ends[0], "edge_label_index")
        _check_seeds(self.input_data.col, neighbor_sampler, ends[2], "edge_label_index")
        _check_times(self.input_data.time, self.input_data.row, "edge_label_time")

    def _task(self, index: Tensor, seed: int, epoch: int, number: int, key: int) -> Task:
        """PyG prepares the seeds (negatives, labels, times); what it hands to the sampler is the task."""
        inputs: EdgeSamplerInput = self.input_data[index]
        asked: list[Any] = []

        def record(seeds: Any, times: Any = None) -> Any:
            asked.extend((seeds, times))
            empty = torch.empty(0, dtype=torch.int64)
            if isinstance(seeds, dict):
                return HeteroSamplerOutput(node={}, row={}, col={}, edge={}, batch={})
            return SamplerOutput(node=empty, row=empty, col=empty, edge=empty, batch=empty)

        with torch.random.fork_rng(devices=[]):  # negatives depend on seed, epoch and batch alone
            torch.manual_seed(mixed(seed, epoch, number + 1))
            negatives: Any = self.neg_sampling
            out = self.sampler_.edge_sample(inputs, record, negatives)
        seeds, times = self.sampler_.by_type(*asked)
        return Task(seeds, times, out.metadata, key, inputs.row.numel() if self.sampler_.disjoint else 0)

    def _label(self, batch: Any, task: Task) -> None:
        metadata = [self._here(value) for value in task.metadata]
        edge_type = self.input_data.input_type
        of_edges = batch if edge_type is None else batch[edge_type]
        source, target = (batch, batch) if edge_type is None else (batch[edge_type[0]], batch[edge_type[-1]])
        of_edges.input_id = metadata[0]
        negatives: Any = self.neg_sampling
        if negatives is None or negatives.is_binary():
            of_edges.edge_label_index, of_edges.edge_label, of_edges.edge_label_time = metadata[1:4]
            return
        source.src_index, target.dst_pos_index, target.dst_neg_index = metadata[1:4]
        source.seed_time = target.seed_time = metadata[4]
        if edge_type is None or edge_type in batch.edge_types:  # they may be attributes of the whole data
            del of_edges.edge_label_index
            del of_edges.edge_label_time


def _check_seeds(seeds: Tensor, sampler: Any, node_type: Any, argument: str) -> None:
    """Seeds outside the graph are told when the loader is made, not an epoch later."""
    if not isinstance(sampler, NeighborSampler):
        return
    types = sampler.graph.num_nodes
    expect(node_type in types, f"NeighborLoader: '{argument}' names {node_type!r}, which is no node type of the data")
    if seeds.numel():
        checks.indices("NeighborLoader", argument, seeds, types[node_type])


def _check_times(times: Tensor | None, seeds: Tensor, argument: str) -> None:
    """One time for each seed, and in whole numbers, as those of the graph."""
    if times is not None:
        times = checks.indices("NeighborLoader", argument, times)
        wanted = seeds.numel()
        expect(times.numel() == wanted, f"NeighborLoader: '{argument}' has {times.numel()} times, wanted {wanted}")
