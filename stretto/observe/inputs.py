"""What stretto.analyze was handed, made one thing: data to run a step on, its graph, and what must be said about it.

PyG data as they are; the first batch of a loader; HeteroData, whose types together are one graph; the arguments of the
model's forward as a tuple, or as a dict by name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from stretto.errors import expect, fail
from stretto.observe.lift import Sizes
from stretto.observe.workload import by_name, names_of, train_mask

WANTED = "PyG data with an edge_index, HeteroData, a loader of either, or (x, edge_index, ...)"


@dataclass(frozen=True)
class Inputs:
    """data: what a step runs on. edge_index [2, E], num_nodes: of all types together."""

    data: Any
    edge_index: Tensor
    num_nodes: int
    sizes: Sizes
    whole: bool  # the step is on all of `data`, so that a smaller one stands for it
    remarks: tuple[str, ...] = ()

    @property
    def hetero(self) -> bool:
        """Whether nodes have types."""
        return is_hetero(self.data)


def is_hetero(data: Any) -> bool:
    """Whether this is PyG's HeteroData, or a batch of it."""
    return hasattr(data, "node_types") and hasattr(data, "edge_types")


def inputs_of(model: nn.Module, data: Any) -> Inputs:
    """The data behind whatever was passed."""
    refuse_a_list(data, "analyze")
    remarks: tuple[str, ...] = ()
    if isinstance(data, (tuple, list, dict)):
        data = _named(model, data)
    elif is_loader(data):
        first, remarks = first_batch(data, "analyze")
        data = _named(model, first) if isinstance(first, (tuple, list)) else first
    expect(data is not None, f"analyze: 'data' is None, wanted {WANTED}")
    if is_hetero(data):
        return _together(data, remarks)
    sizes = Sizes.of(data)
    _check(data.edge_index, sizes.n, "edge_index")
    # A sampled batch keeps the number of its seeds as a number: cut down, it would no longer fit the rest.
    whole = not remarks and (bool(sizes.g) or not isinstance(getattr(data, "batch_size", None), int))
    return Inputs(data, data.edge_index, sizes.n, sizes, whole, remarks)


def _named(model: nn.Module, values: Any) -> Any:
    """Arguments of forward as data, each under its parameter's name."""
    if isinstance(values, dict):
        return _with_edges(values if by_name(model, values) else {names_of(model)[0]: values})
    names = names_of(model)
    expect(len(values) <= len(names), f"analyze: 'data' has {len(values)} values, forward takes {', '.join(names)}")
    return _with_edges(dict(zip(names, values, strict=False)))


def _with_edges(values: dict[str, Any]) -> Any:
    if not isinstance(values.get("edge_index"), Tensor):
        fail(f"analyze: 'data' is {', '.join(values)} of forward, without an edge_index; wanted {WANTED}")
    return Data(**values)


def refuse_a_list(data: Any, who: str) -> None:
    """A list of graphs is no data yet: PyG makes a batch of it."""
    kind = type(data[0]).__name__ if isinstance(data, (tuple, list)) and data else ""
    if kind and (hasattr(data[0], "edge_index") or is_hetero(data[0])):
        fail(f"{who}: 'data' is {len(data)} {kind}, wanted one: torch_geometric.data.Batch.from_data_list(data)")


def is_loader(data: Any) -> bool:
    """Whether it gives batches one after the other."""
    known = hasattr(data, "edge_index") or is_hetero(data) or isinstance(data, (tuple, list, dict, str, Tensor))
    return not known and hasattr(data, "__iter__")


def first_batch(loader: Any, who: str) -> tuple[Any, tuple[str, ...]]:
    """The first batch of a loader, and what must be said about it. It is also the first that the user will get next:
    random numbers are as they were."""
    holders = (loader, getattr(loader, "sampler", None))
    own = [g for g in (getattr(holder, "generator", None) for holder in holders) if isinstance(g, torch.Generator)]
    states, state, others = [g.get_state() for g in own], random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            first = next(iter(loader), None)
    finally:
        random.setstate(state)
        np.random.set_state(others)
        for generator, before in zip(own, states, strict=True):
            generator.set_state(before)
    expect(first is not None, f"{who}: 'data' is a loader without a batch")
    count = f"one of {len(loader)} batches" if hasattr(loader, "__len__") else "one batch"
    return first, (f"All numbers are of {count} of the {type(loader).__name__}, the first it gave",)


def _together(data: Any, remarks: tuple[str, ...]) -> Inputs:
    """All types as one graph, for its statistics and partitions; the step runs on the data as they are."""
    starts, total = {}, 0
    counts = {kind: int(data[kind].num_nodes or 0) for kind in data.node_types}
    for kind, count in counts.items():
        starts[kind], total = total, total + count
    parts, sizes = [], []
    for edge_type in data.edge_types:
        edges = getattr(data[edge_type], "edge_index", None)
        if not isinstance(edges, Tensor):
            fail(f"analyze: {edge_type} has no edge_index tensor")
        for row, kind in zip(edges, (edge_type[0], edge_type[-1]), strict=True):
            _check(row, counts[kind], f"edge_index of {edge_type}")
        parts.append(edges + torch.tensor([[starts[edge_type[0]]], [starts[edge_type[-1]]]], device=edges.device))
        loops = int((edges[0] == edges[1]).sum()) if edge_type[0] == edge_type[-1] else 0
        sizes += [edges.size(1), edges.size(1) - loops, edges.size(1) - loops + counts[edge_type[-1]]]
    expect(bool(parts), "analyze: 'data' has no edges of any type")
    together = torch.cat(parts, dim=1)
    m, a = together.size(1), int((together[0] != together[1]).sum())
    masks = [train_mask(data[kind]) for kind in data.node_types]
    targets = sum(int(mask.sum()) for mask in masks if mask is not None)
    result = Sizes(
        total, m, a, a + total, targets, nodes_by_type=tuple(counts.values()), edges_by_type=tuple(sorted(set(sizes)))
    )
    said = f"{len(counts)} types of nodes and {len(parts)} of edges: graph and partitions are of all of them together"
    return Inputs(data, together, total, result, False, (*remarks, said))


def _check(places: Tensor, count: int, name: str) -> None:
    if not places.numel():
        return
    low, high = int(places.min()), int(places.max())
    expect(low >= 0, f"analyze: '{name}' names node {low}, wanted 0 or more")
    expect(high < count, f"analyze: '{name}' names node {high}, but there are {count} nodes")
