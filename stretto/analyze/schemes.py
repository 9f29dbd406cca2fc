"""Training schemes: the work of an epoch by each, counted from real batches.

Full batch; neighbours sampled per vertex (GraphSAGE, VR-GCN), by the real loader; a sample per layer (FastGCN);
clusters (Cluster-GCN, GraphSAINT).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import subgraph

from stretto.analyze.graph_stats import Partitioner
from stretto.loader import NeighborLoader
from stretto.observe.put_back import put_back, uncached
from stretto.observe.workload import Workload

COUNTED = 3  # batches whose ops are counted; an epoch is as many of their mean as it has batches


@dataclass(frozen=True)
class Scheme:
    """One scheme: batches of an epoch, what they hold, and the flops they take."""

    name: str
    batches: int
    nodes: float  # of a batch, its support included
    edges: float
    flops: float  # of an epoch, counted
    exact: bool


def schemes(workload: Workload, *, layers: int, fanout: int = 10, batch: int = 1024) -> list[Scheme]:
    """An epoch of the model under each scheme. layers: rounds of aggregation, each of which is sampled."""
    with put_back(workload.model):
        return _schemes(workload, layers, fanout, batch)


def _schemes(workload: Workload, layers: int, fanout: int, batch: int) -> list[Scheme]:
    data = workload.data
    steps = -(-data.num_nodes // batch)
    makers = {
        "full batch": (iter([data]), 1),
        "GraphSAGE, VR-GCN": (iter(_sampled(data, [fanout] * layers, batch)), steps),
        "FastGCN": (_by_layer(data, batch * fanout, steps), steps),
        "Cluster-GCN, GraphSAINT": (_clusters(data, steps), steps),
    }
    result = []
    for name, (batches, count) in makers.items():
        seen = [b for b, _ in zip(batches, range(COUNTED), strict=False)]
        flops = [_counted(workload, b) for b in seen]
        nodes = sum(b.num_nodes for b in seen) / len(seen)
        edges = sum(b.num_edges for b in seen) / len(seen)
        result.append(Scheme(name, count, nodes, edges, sum(flops) / len(flops) * count, name == "full batch"))
    return result


def _counted(workload: Workload, batch: Any) -> float:
    """Flops of the step on a batch; the model's caches are of its own graph, and stay as they are."""
    with uncached(workload.model):
        return float(Workload(workload.model, batch, workload.mode, workload.step).trace().flops)


def _sampled(data: Any, fanouts: list[int], batch: int) -> Any:
    nodes = torch.arange(data.num_nodes)
    return NeighborLoader(data, fanouts, input_nodes=nodes, batch_size=min(batch, data.num_nodes), shuffle=True)


def _induced(data: Any, nodes: Tensor) -> Any:
    """The data of these nodes and the edges among them."""
    part = data.clone()
    part.edge_index, _, mine = subgraph(
        nodes, data.edge_index, relabel_nodes=True, num_nodes=data.num_nodes, return_edge_mask=True
    )
    for key, value in data.to_dict().items():
        if not isinstance(value, Tensor) or key == "edge_index" or not value.dim():
            continue
        if data.is_edge_attr(key) and value.size(0) == data.num_edges:
            part[key] = value[mine]
        elif value.size(0) == data.num_nodes:
            part[key] = value[nodes]
    part.num_nodes = nodes.numel()
    return part


def _by_layer(data: Any, size: int, steps: int) -> Iterator[Any]:
    """One sample of nodes serves every layer, drawn by degree as FastGCN does."""
    weight = torch.bincount(data.edge_index[1], minlength=data.num_nodes).double() + 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield _induced(data, weight.multinomial(min(size, data.num_nodes), generator=generator).sort().values)


def _clusters(data: Any, parts: int) -> Iterator[Any]:
    owner = torch.from_numpy(Partitioner(data.edge_index, data.num_nodes).assign(parts, "breadth-first"))
    for part in range(parts):
        yield _induced(data, (owner == part).nonzero().view(-1))
