"""Every accelerated layer at any width, with options that take its several paths, and what to feed it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.nn.models.schnet import CFConv

from tests.layers.inputs import flat

DIM, RELATIONS = 8, 3  # channels of edges, number of relations


@dataclass(frozen=True)
class Sized:
    """make(c): the layer from c channels to c. What stands behind edge_index: "", weight, attr, type or lengths."""

    make: Callable[[int], nn.Module]
    edge: str = ""
    first: str = "x"  # or "twice", "pair" (two types of nodes), "hetero", "meta"


def network(i: int, o: int, inner: int | None = None) -> nn.Module:
    """Two Linears."""
    return Sequential(Linear(i, o if inner is None else inner), ReLU(), Linear(o if inner is None else inner, o))


def pna(c: int, **options: Any) -> nn.Module:
    """All four aggregations, two scalers."""
    degrees = torch.tensor([0, 10, 20, 9])
    return pyg.PNAConv(c, c, ["mean", "min", "max", "std"], ["identity", "amplification"], degrees, **options)


def relations(c: int) -> nn.Module:
    """Two relations into b, one into a."""
    kinds = (("a", "to", "b"), ("b", "back", "a"), ("b", "among", "b"))
    return pyg.HeteroConv({kind: pyg.SAGEConv((c, c), c) for kind in kinds}, aggr="sum")


METADATA = (["a", "b"], [("a", "to", "b"), ("b", "back", "a"), ("b", "among", "b")])


class EdgeModel(nn.Module):
    """A network of both ends and the edge."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.net = network(2 * c + DIM, DIM, c)

    def forward(self, src: Tensor, dst: Tensor, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
        return self.net(torch.cat([src, dst, edge_attr], 1))


class NodeModel(nn.Module):
    """A network of the node and what arrives there."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.second = network(c + DIM, c), Linear(2 * c, c)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
        row, col = edge_index
        messages = self.first(torch.cat([x[row], edge_attr], 1))
        return self.second(torch.cat([x, pyg.global_add_pool(messages, col, x.size(0))], 1))


class UserNetwork(pyg.MessagePassing):
    """A layer of a user's own: net([x_i, x_j, e])."""

    def __init__(self, c: int) -> None:
        super().__init__(aggr="mean")
        self.net = network(2 * c + DIM, c)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.net(torch.cat([x_i, x_j, edge_attr], dim=-1))


class UserWeights(pyg.MessagePassing):
    """A layer of a user's own: w x_j."""

    def __init__(self, c: int) -> None:
        super().__init__(aggr="sum")
        self.lin = Linear(c, c)

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), w=w)

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return w.view(-1, 1) * x_j


class Points(nn.Module):
    """PointNetConv or PointGNNConv, whose positions are the first three channels."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, x[:, :3], edge_index)


def point_gnn(c: int) -> nn.Module:
    """Its three networks."""
    return pyg.PointGNNConv(network(c, 3), network(c + 3, c), network(c, c))


LAYERS: dict[str, Sized] = {
    "GCNConv": Sized(lambda c: pyg.GCNConv(c, c)),
    "GCNConv weights": Sized(lambda c: pyg.GCNConv(c, c), "weight"),
    "SAGEConv": Sized(lambda c: pyg.SAGEConv(c, c)),
    "SAGEConv max": Sized(lambda c: pyg.SAGEConv(c, c, aggr="max")),
    "SAGEConv project": Sized(lambda c: pyg.SAGEConv(c, c, project=True)),
    "GraphConv": Sized(lambda c: pyg.GraphConv(c, c)),
    "GraphConv weights": Sized(lambda c: pyg.GraphConv(c, c), "weight"),
    "GINConv": Sized(lambda c: pyg.GINConv(network(c, c), train_eps=True)),
    "SGConv": Sized(lambda c: pyg.SGConv(c, c, K=2)),
    "SSGConv": Sized(lambda c: pyg.SSGConv(c, c, alpha=0.2, K=2)),
    "TAGConv": Sized(lambda c: pyg.TAGConv(c, c, K=2)),
    "LGConv": Sized(lambda c: pyg.LGConv()),
    "APPNP": Sized(lambda c: pyg.APPNP(3, 0.1)),
    "ChebConv": Sized(lambda c: pyg.ChebConv(c, c, K=3)),
    "GCN2Conv": Sized(lambda c: pyg.GCN2Conv(c, 0.2), first="twice"),
    "ARMAConv": Sized(lambda c: pyg.ARMAConv(c, c, num_stacks=2, num_layers=2)),
    "LEConv": Sized(lambda c: pyg.LEConv(c, c)),
    "ClusterGCNConv": Sized(lambda c: pyg.ClusterGCNConv(c, c)),
    "MFConv": Sized(lambda c: pyg.MFConv(c, c)),
    "GATConv": Sized(lambda c: pyg.GATConv(c, c // 4, heads=4)),
    "GATConv edges": Sized(lambda c: pyg.GATConv(c, c // 4, heads=4, edge_dim=DIM), "attr"),
    "GATv2Conv": Sized(lambda c: pyg.GATv2Conv(c, c // 4, heads=4)),
    "GATv2Conv edges": Sized(lambda c: pyg.GATv2Conv(c, c // 4, heads=4, edge_dim=DIM), "attr"),
    "GATEConv": Sized(lambda c: GATEConv(c, c, DIM), "attr"),
    "TransformerConv": Sized(lambda c: pyg.TransformerConv(c, c // 4, heads=4, beta=True)),
    "TransformerConv edges": Sized(lambda c: pyg.TransformerConv(c, c // 4, heads=4, edge_dim=DIM), "attr"),
    "AGNNConv": Sized(lambda c: pyg.AGNNConv()),
    "SuperGATConv": Sized(lambda c: pyg.SuperGATConv(c, c // 4, heads=4)),
    "RGCNConv": Sized(lambda c: pyg.RGCNConv(c, c, RELATIONS), "type"),
    "RGCNConv bases": Sized(lambda c: pyg.RGCNConv(c, c, RELATIONS, num_bases=2), "type"),
    "FastRGCNConv": Sized(lambda c: pyg.FastRGCNConv(c, c, RELATIONS), "type"),
    "FiLMConv": Sized(lambda c: pyg.FiLMConv(c, c)),
    "ResGatedGraphConv": Sized(lambda c: pyg.ResGatedGraphConv(c, c)),
    "ResGatedGraphConv edges": Sized(lambda c: pyg.ResGatedGraphConv(c, c, edge_dim=DIM), "attr"),
    "GINEConv": Sized(lambda c: pyg.GINEConv(network(c, c), edge_dim=DIM), "attr"),
    "EdgeConv": Sized(lambda c: pyg.EdgeConv(network(2 * c, c))),
    "EdgeConv sum": Sized(lambda c: pyg.EdgeConv(network(2 * c, c), aggr="sum")),
    "EdgeConv linear": Sized(lambda c: pyg.EdgeConv(Linear(2 * c, c), aggr="sum")),
    "CGConv": Sized(lambda c: pyg.CGConv(c, DIM), "attr"),
    "NNConv": Sized(lambda c: pyg.NNConv(c, 4, network(DIM, 4 * c, 16)), "attr"),
    "GMMConv": Sized(lambda c: pyg.GMMConv(c, c, DIM, 2), "attr"),
    "GENConv": Sized(lambda c: pyg.GENConv(c, c, learn_t=True, norm="layer")),
    "GENConv edges": Sized(lambda c: pyg.GENConv(c, c, edge_dim=DIM, norm="layer"), "attr"),
    "PNAConv": Sized(pna),
    "PNAConv edges": Sized(lambda c: pna(c, edge_dim=DIM), "attr"),
    "CFConv": Sized(lambda c: CFConv(c, c, c, network(DIM, c), 4.0), "lengths"),
    "HypergraphConv": Sized(lambda c: pyg.HypergraphConv(c, c)),
    "HANConv": Sized(lambda c: pyg.HANConv(c, c, METADATA, heads=4), first="hetero"),
    "HGTConv": Sized(lambda c: pyg.HGTConv(c, c, METADATA, heads=4), first="hetero"),
    "HeteroConv": Sized(relations, first="hetero"),
    "MetaLayer": Sized(lambda c: pyg.MetaLayer(EdgeModel(c), NodeModel(c)), "attr"),
    "PointNetConv": Sized(lambda c: Points(pyg.PointNetConv(network(c + 3, c), network(c, c)))),
    "PointGNNConv": Sized(lambda c: Points(point_gnn(c))),
    "a user's network": Sized(UserNetwork, "attr"),
    "a user's weights": Sized(UserWeights, "weight"),
}


def inputs(layer: Sized, edges: Tensor, nodes: int, width: int, seed: int = 0) -> tuple[list[Any], list[int]]:
    """The arguments of a call in fp64, and which of them are learned."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:  # numbers that fp32 holds exactly
        return torch.randn(*shape, generator=generator).double()

    count = edges.size(1)
    if layer.first == "hetero":
        back, among = edges.flip(0), (edges + 1) % nodes
        kinds = dict(zip(METADATA[1], (edges, back, among), strict=True))
        return [{"a": values(nodes, width), "b": values(nodes, width)}, kinds], [0]
    given: list[Any] = [values(nodes, width)] + ([values(nodes, width)] if layer.first == "twice" else []) + [edges]
    learned = [0, 1] if layer.first == "twice" else [0]
    if layer.edge == "weight":
        given.append(values(count).abs() + 0.1)
    elif layer.edge == "attr":
        given.append(values(count, DIM))
    elif layer.edge == "type":
        given.append(torch.randint(RELATIONS, (count,), generator=generator))
    elif layer.edge == "lengths":
        given += [values(count).abs(), values(count, DIM)]
    if layer.edge not in ("", "type"):
        learned += list(range(len(given)))[-(2 if layer.edge == "lengths" else 1) :]
    return given, learned


def converted(value: Any, dtype: torch.dtype) -> Any:
    """An argument with its numbers in another type."""
    if isinstance(value, dict):
        return {key: converted(part, dtype) for key, part in value.items()}
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def gradients_of(layer: nn.Module, given: Sequence[Any], learned: Sequence[int], seed: int = 9) -> dict[str, Tensor]:
    """Results and all gradients by name, from a cotangent that is drawn at random."""
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: leaf(part) for key, part in value.items()}
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1]

    args = [leaf(value) if at in learned else value for at, value in enumerate(given)]
    results = flat(layer(*args))
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in results]
    parameters = dict(layer.named_parameters())
    wanted = [*leaves, *parameters.values()]
    found = torch.autograd.grad(results, wanted, cotangents, allow_unused=True, materialize_grads=True)
    names = [*(f"result {k}" for k in range(len(results))), *(f"input {k}" for k in range(len(leaves))), *parameters]
    return dict(zip(names, [*(out.detach() for out in results), *found], strict=True))
