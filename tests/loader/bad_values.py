"""What the tests of bad inputs share: a small graph, and tensors that are not what they should be."""

import torch
from torch_geometric.data import Data

from stretto.loader.native_sampler import NativeSampler, NodeType, Relation, Sampling
from tests.loader.graphs import csc

N, E = 40, 200
GENERATOR = torch.Generator().manual_seed(0)
EDGES = torch.randint(0, N, (2, E), generator=GENERATOR)
COLPTR, ROW, ORDER = csc(EDGES, N)
X = torch.arange(N * 6, dtype=torch.float32).view(N, 6)
INT = torch.int64


def gone(x):
    """A tensor whose memory was let go."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def decreasing(pointers):
    out = pointers.clone()
    out[1] = out[-1]
    return out


def with_value(x, value):
    out = x.clone()
    out[0] = value
    return out


def native(*, colptr=COLPTR, row=ROW, fanout=(3, 2), hops=2, flags=Sampling.EDGE_ID, num_nodes=N, slices=(), **more):
    relation = Relation(colptr, row, list(fanout), **more)
    return NativeSampler([NodeType(num_nodes, more.get("node_time"))], [relation], hops, flags, slices)


def data(**changes):
    out = Data(x=X, edge_index=EDGES, y=torch.arange(N), edge_attr=torch.rand(E, 3), num_nodes=N)
    for name, value in changes.items():
        out[name] = value
    return out


def first(loader):
    return next(iter(loader))
