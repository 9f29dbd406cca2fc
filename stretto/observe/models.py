"""The models that the command line and the tests look at, by name; two layers of a PyG conv unless said otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg_nn

from stretto.errors import fail

pyg: Any = pyg_nn  # its convs inherit abstract methods that no checker sees implemented


class Stack(nn.Module):
    """Convs with ReLU in between; forward(x, edge_index)."""

    def __init__(self, convs: list[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = F.relu(x) if i else x
            x = conv(x, edge_index)
        return x


class Propagate(nn.Module):
    """A linear map, then a propagation without weights: APPNP's shape."""

    def __init__(self, lin: nn.Module, conv: nn.Module) -> None:
        super().__init__()
        self.lin, self.conv = lin, conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(self.lin(x), edge_index)
        return out


def _stacked(conv: Callable[[int, int], nn.Module]) -> Callable[[int, int, int, int], nn.Module]:
    def make(inputs: int, hidden: int, outputs: int, layers: int) -> nn.Module:
        widths = [inputs, *[hidden] * (layers - 1), outputs]
        return Stack([conv(a, b) for a, b in itertools.pairwise(widths)])

    return make


def _mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))


HOPS, HEADS = 3, 4


def _heads(a: int, b: int) -> nn.Module:
    conv: nn.Module = pyg.GATConv(a, b, heads=HEADS, concat=False)
    return conv


# name -> make(inputs, hidden, outputs, layers)
MODELS: dict[str, Callable[[int, int, int, int], nn.Module]] = {
    "gcn": _stacked(pyg.GCNConv),
    "sage": _stacked(pyg.SAGEConv),
    "gin": _stacked(lambda a, b: pyg.GINConv(_mlp(a, b))),
    "gat": _stacked(_heads),
    "edgeconv": _stacked(lambda a, b: pyg.EdgeConv(_mlp(2 * a, b))),
    "sgc": lambda i, h, o, layers: pyg.SGConv(i, o, K=HOPS),
    "cheb": _stacked(lambda a, b: pyg.ChebConv(a, b, K=HOPS)),
    "appnp": lambda i, h, o, layers: Propagate(nn.Linear(i, o), pyg.APPNP(K=HOPS, alpha=0.1)),
    "tag": _stacked(lambda a, b: pyg.TAGConv(a, b, K=HOPS)),
    "graphconv": _stacked(pyg.GraphConv),
    "agnn": lambda i, h, o, layers: Propagate(nn.Linear(i, o), pyg.AGNNConv()),
    "resgated": _stacked(pyg.ResGatedGraphConv),
    "sagepool": _stacked(lambda a, b: pyg.SAGEConv(a, b, aggr="max", project=True)),
    "gatv2": _stacked(lambda a, b: pyg.GATv2Conv(a, b, heads=HEADS, concat=False)),
    "arma": _stacked(lambda a, b: pyg.ARMAConv(a, b, num_layers=HOPS)),
}


def make(name: str, inputs: int, hidden: int, outputs: int, layers: int = 2) -> nn.Module:
    """The model called `name`."""
    if name not in MODELS:
        fail(f"analyze: no model {name!r}, wanted one of {', '.join(MODELS)}")
    torch.manual_seed(0)
    return MODELS[name](inputs, hidden, outputs, layers)


def as_data(dataset: Any, *, width: int = 64) -> Any:
    """A PyG Data of a Dataset; random features and labels where it has none."""
    from torch_geometric.data import Data

    torch.manual_seed(0)
    n = dataset.num_nodes
    x = dataset.x if dataset.x is not None else torch.randn(n, width)
    classes = dataset.num_classes if dataset.y is not None and len(dataset.y) == n else 0
    y = dataset.y if classes else torch.randint(8, (n,))
    data = Data(x=x, edge_index=dataset.edge_index, y=y, num_nodes=n)
    mask = dataset.masks.get("train") if classes else None
    data.train_mask = torch.rand(n) < 0.6 if mask is None else mask
    return data
