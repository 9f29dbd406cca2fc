"""The models a MetaLayer is made of, as PyG's documentation writes them, and others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential, Tanh
from torch_geometric.utils import scatter

from tests.layers.spec import DIM, IN

ALL = 4  # features of a graph


class EdgeModel(nn.Module):
    """net([src, dst, e, u[batch]])"""

    width = 2 * IN + DIM + ALL

    def __init__(self, norm=False):
        super().__init__()
        inner = BatchNorm1d(6) if norm else nn.Identity()
        self.net = Sequential(Linear(self.width, 6), inner, ReLU(), Linear(6, DIM))

    def forward(self, src, dst, edge_attr, u, batch):
        return self.net(torch.cat([src, dst, edge_attr, u[batch]], 1))


class ResidualEdges(EdgeModel):
    """Neither graph nor source; the old features are added."""

    width = IN + DIM

    def forward(self, src, dst, edge_attr, u, batch):
        return edge_attr + self.net(torch.cat([edge_attr, dst], dim=-1)).tanh()


class EdgesByLookup(EdgeModel):
    def forward(self, src, dst, edge_attr, u, batch):
        return self.net(torch.cat([src, dst, edge_attr, u.index_select(0, batch)], 1))


class NodeModel(nn.Module):
    """A network of source and edge, reduced at the target; another of nodes."""

    width = IN + DIM

    def __init__(self, norm=False):
        super().__init__()
        inner = BatchNorm1d(7) if norm else nn.Identity()
        self.first = Sequential(Linear(self.width, 7), inner, ReLU(), Linear(7, 5))
        self.second = Sequential(Linear(IN + 5 + ALL, 6), Tanh(), Linear(6, IN))

    def forward(self, x, edge_index, edge_attr, u, batch):
        row, col = edge_index
        out = self.first(torch.cat([x[row], edge_attr], dim=1))
        out = scatter(out, col, dim=0, dim_size=x.size(0), reduce="mean")
        return self.second(torch.cat([x, out, u[batch]], dim=1))


class SourceNodes(NodeModel):
    """Reduced at the source, of both ends and what their graph has."""

    width = 2 * IN + DIM + ALL + ALL

    def forward(self, x, edge_index, edge_attr, u, batch):
        row, col = edge_index[0], edge_index[1]
        message = self.first(torch.cat([x[col], edge_attr, u[batch][row], x[row], u[batch[col]]], dim=-1)).relu()
        out = scatter(message, row, 0, x.shape[0], "max")
        return x + self.second(torch.cat([x, out, u[batch]], dim=1)).sigmoid()


class TwiceScattered(NodeModel):
    def forward(self, x, edge_index, edge_attr, u, batch):
        row, col = edge_index
        out = self.first(torch.cat([x[row], edge_attr], dim=1))
        out = scatter(out, col, 0, x.size(0), "sum") + scatter(out, row, 0, x.size(0), "sum")
        return self.second(torch.cat([x, out, u[batch]], dim=1))


class OwnSize(NodeModel):
    def forward(self, x, edge_index, edge_attr, u, batch):
        row, col = edge_index
        out = scatter(self.first(torch.cat([x[row], edge_attr], dim=1)), col, 0, u.size(0) + x.size(0), "sum")
        return self.second(torch.cat([x, out[: x.size(0)], u[batch]], dim=1))


class Watched(NodeModel):
    """The messages are used a second time."""

    def forward(self, x, edge_index, edge_attr, u, batch):
        row, col = edge_index
        out = self.first(torch.cat([x[row], edge_attr], dim=1))
        return self.second(torch.cat([x, scatter(out, col, 0, x.size(0), "sum"), u[batch]], dim=1)) + out.mean()


class GlobalModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Sequential(Linear(ALL + IN, 6), ReLU(), Linear(6, ALL))

    def forward(self, x, edge_index, edge_attr, u, batch):
        return self.net(torch.cat([u, scatter(x, batch, 0, u.size(0), "mean")], dim=1))
