"""PyG's GCN, GraphSAGE and GAT on a loader's batch: no layer computes the nodes that are dropped right after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from stretto.layers.base import Quiet
from stretto.layers.layer import Layer
from stretto.loader import trim


def fast_basic(model: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What the forward of a BasicGNN computes, where PyG's trim_to_layer would drop nodes between its layers."""
    nodes, edges = (kwargs.pop(f"num_sampled_{what}_per_hop", None) for what in ("nodes", "edges"))
    plain = isinstance(x, Tensor) and type(edge_index) is Tensor and isinstance(nodes, list) and isinstance(edges, list)
    if args or not plain or any(value is not None for value in kwargs.values()):
        raise Quiet("not trimmed by hops, or further arguments")
    out = trim.run_by_hops(model, x, edge_index, nodes, edges)
    if out is None:
        raise Quiet("not as a loader gave it")
    return out


CONTAINERS: dict[type, Layer] = {kind: Layer(kind, fast_basic) for kind in (GCN, GraphSAGE, GAT)}
