"""Models as users write them: layers followed by a BatchNorm or a Linear, in forwards of all kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Linear, ModuleList, ReLU, Sequential

NORMED = True  # a constant that a forward decides by


class Base(torch.nn.Module):
    """Two layers, two norms and a head; 5 channels in, 3 out."""

    def __init__(self, conv=pyg.GCNConv, norm=BatchNorm1d):
        super().__init__()
        self.conv1, self.bn1 = conv(5, 6), norm(6)
        self.conv2, self.bn2 = conv(6, 6), norm(6)
        self.lin = Linear(6, 3)
        self.dropout, self.normed = 0.5, True


class Plain(Base):
    def forward(self, x, edge_index):
        x = F.relu(self.bn1(self.conv1(x, edge_index)), inplace=True)
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.bn2(self.conv2(x, edge_index))
        return self.lin(x.relu())


class Ending(Base):
    """The second layer ends in a BatchNorm and a Linear."""

    def forward(self, x, edge_index):
        x = self.bn1(self.conv1(x, edge_index)).tanh()
        return F.log_softmax(self.lin(self.bn2(self.conv2(x, edge_index))), dim=-1)


class OnlyLinear(Base):
    def forward(self, x, edge_index):
        return self.lin(self.conv1(x, edge_index)), {"rows": x.size(0)}


class Weighted(Base):
    def forward(self, x, edge_index, edge_weight=None, *, scale=1.0):
        if edge_weight is not None:
            x = self.conv1(x, edge_index, edge_weight)
        else:
            x = self.conv1(x, edge_index)
        return self.bn1(x) * scale


class Listed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = ModuleList([pyg.GCNConv(5, 6), pyg.SAGEConv(6, 6), pyg.GATConv(6, 3, heads=2)])
        self.norms = ModuleList([BatchNorm1d(6), pyg.BatchNorm(6), BatchNorm1d(6)])
        self.act = torch.relu

    def forward(self, x, edge_index):
        every = []
        for i, (conv, norm) in enumerate(zip(self.convs[:-1], self.norms)):  # noqa: B905
            x = self.act(norm(conv(x, edge_index)))
            every.append(x)
            if i == len(self.convs) - 2:
                x = self.norms[-1](self.convs[i + 1](x, edge_index=edge_index))
        return torch.cat([*every, x], dim=-1)


class OfData(Base):
    def forward(self, data):
        x, edge_index, batch = data.x, data.edge_index, data.batch
        x = self.bn1(self.conv1(x, edge_index)).relu()
        return self.lin(pyg.global_mean_pool(x, batch))


class InMethods(Base):
    def __init__(self):
        super().__init__()
        self.block = Sequential(self.bn1, ReLU(inplace=True), Linear(6, 6))

    def encode(self, x, edge_index):
        return self.conv1(x, edge_index)

    def forward(self, x, edge_index):
        return self.block(self.encode(x, edge_index))


class OfConstants(Base):
    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index)
        return self.bn1(x) if self.normed and NORMED else x


# name -> (model, how many layers something is folded into, how often batch_norm still runs)
FOLDING = {
    "plain": (Plain, 2, 0),
    "SAGE": (lambda: Plain(pyg.SAGEConv), 2, 0),
    "GraphConv": (lambda: Plain(pyg.GraphConv, pyg.BatchNorm), 2, 0),
    "GAT": (lambda: Plain(pyg.GATConv), 2, 0),
    "ending": (Ending, 2, 0),
    "only a Linear": (OnlyLinear, 1, 0),
    "weighted": (Weighted, 1, 0),
    "listed": (Listed, 2, 1),  # a GATConv with a keyword is none that folds
    "in methods": (InMethods, 1, 0),
    "of constants": (OfConstants, 1, 0),
    "normalised SAGE": (lambda: Plain(lambda i, o: pyg.SAGEConv(i, o, normalize=i == 6)), 1, 1),
}


class Residual(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) + h


class Returned(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h), {"hidden": [h]}


class Jumping(Base):
    def __init__(self):
        super().__init__()
        self.jk = pyg.JumpingKnowledge("max")

    def forward(self, x, edge_index):
        every = [self.conv1(x, edge_index)]
        every.append(self.conv2(self.bn1(every[0]).relu(), edge_index))
        return self.jk(every)


class Shared(Base):
    def forward(self, x, edge_index):
        x = self.bn1(self.conv1(x, edge_index)).relu()
        return self.bn1(self.conv2(x, edge_index))


class SharedLayer(Base):
    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index)[:, :6]
        x = self.bn1(self.conv2(x, edge_index))
        return self.bn2(self.conv2(x, edge_index))


class Edited(Base):
    """The layer's result is changed before the norm sees it."""

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        h.mul_(2)
        return self.bn1(h)


class Viewed(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        top = h[:1]
        return self.bn1(h) + top


class Branching(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) if h.sum() > 0 else h


class ByShape(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        if x.size(0) > 3:
            return self.bn1(h)
        return h


class ByResult(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        kept = dict(a=None).get("a", h)  # noqa: C408
        if kept is None:
            return h
        return self.bn1(h)


class ByText(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) if f"{h.dtype}" == "torch.float32" else h


class ByRandom(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) if torch.ones(1) < 0 else h


class ByType(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return h if isinstance(x, torch.Tensor) else self.bn1(h)


class Caught(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        try:
            more = bool(h.sum() == h.sum())
        except Exception:  # what a trace raises
            more = False
        return h + self.bn1(h) if more else self.bn1(h)


class LooksAround(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) + locals()["h"]


class Stores(Base):
    def forward(self, x, edge_index):
        self.last = self.conv1(x, edge_index)
        return self.bn1(self.last)


class Collects(Base):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        self.seen.append(h)
        return self.bn1(h) + self.seen[-1]


class Closed(Base):
    def forward(self, x, edge_index):
        h = self.conv1(x, edge_index)
        return self.bn1(h) + (lambda: h)()


class Inherited(Plain):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index)


class AnyArguments(Base):
    def forward(self, *args):
        return self.bn1(self.conv1(*args))


class ReadsWeights(Base):
    def forward(self, x, edge_index):
        return self.bn1(self.conv1(x, edge_index)) + self.bn1.weight


class Wider(Base):
    def __init__(self):
        super().__init__()
        self.lin = Linear(6, 60)

    def forward(self, x, edge_index):
        return self.lin(self.conv1(x, edge_index))


# name -> (model, words of the reason that the report gives, "" for none)
TRAPS = {
    "residual": (Residual, "read more than once"),
    "returned": (Returned, "read more than once"),
    "jumping knowledge": (Jumping, "read more than once"),
    "shared norm": (Shared, "called more than once"),
    "shared layer": (SharedLayer, "called more than once"),
    "edited": (Edited, "read more than once"),
    "viewed": (Viewed, "read more than once"),
    "branch on values": (Branching, "could not be traced"),
    "branch on a shape": (ByShape, "could not be traced"),
    "branch on a result": (ByResult, "is None"),
    "branch on text": (ByText, "makes text of a tensor"),
    "branch on a tensor of its own": (ByRandom, "could not be traced"),
    "branch on a type": (ByType, "could not be traced"),
    "catches": (Caught, "a with or a try"),
    "looks around": (LooksAround, "locals"),
    "stores": (Stores, "STORE_ATTR"),
    "collects": (Collects, "seen, which is a list"),
    "a closure of its own": (Closed, "read more than once"),
    "inherited": (Inherited, "super"),
    "any arguments": (AnyArguments, "*args"),
    "reads weights": (ReadsWeights, "reads weight"),
    "wider": (Wider, "wider"),
    "statistics of the batch": (
        lambda: Plain(norm=lambda c: BatchNorm1d(c, track_running_stats=False)),
        "no fixed statistics",
    ),
    "norm of another kind": (lambda: Plain(norm=pyg.LayerNorm), ""),
}
