"""Layers with a network on each edge as users write them, what to feed them, and how they compare with stock."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import Linear, ReLU, Sequential, SiLU
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing

import stretto
from stretto.layers import record_of
from tests.graphs import ZOO

IN, DIM, HIDDEN = 8, 3, 8
GRAPHS = ("unsorted", "isolated", "self_loops", "duplicates", "directed", "empty", "one_node", "no_nodes", "hub")


def values(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Edges(MessagePassing):
    """What all have in common: x, positions, features and a weight of edges, and a network."""

    width = 2 * IN + DIM

    def __init__(self, net=None, **options):
        super().__init__(**options)
        wide = self.width
        self.net = Sequential(Linear(wide, HIDDEN), ReLU(), Linear(HIDDEN, DIM)) if net is None else net(wide)

    def forward(self, x, pos, edge_index, attr, w):
        return self.propagate(edge_index, x=x, pos=pos, attr=attr, w=w)


class Mesh(Edges):
    """MeshGraphNet's node update: the sum of an MLP of both ends and the edge, and a network on nodes."""

    def __init__(self, net=None, **options):
        super().__init__(net, **options)
        self.node = Sequential(Linear(IN + DIM, HIDDEN), ReLU(), Linear(HIDDEN, IN))

    def forward(self, x, pos, edge_index, attr, w):
        return x + self.node(torch.cat([x, self.propagate(edge_index, x=x, attr=attr)], dim=-1))

    def message(self, x_i, x_j, attr):
        return self.net(torch.cat([x_i, x_j, attr], dim=1)) + attr


class Equivariant(Edges):
    """EGNN: messages from squared distances, and shifts of coordinates from messages, in one propagate()."""

    width = 2 * IN + 1

    def __init__(self, net=None, **options):
        super().__init__(net or (lambda i: Sequential(Linear(i, HIDDEN), SiLU(), Linear(HIDDEN, 5), SiLU())), **options)
        self.shift = Sequential(Linear(5, HIDDEN), SiLU(), Linear(HIDDEN, 1, bias=False))

    def message(self, x_i, x_j, pos_i, pos_j):
        d = pos_i - pos_j
        m = self.net(torch.cat([x_i, x_j, (d * d).sum(dim=-1, keepdim=True)], dim=-1))
        return torch.cat([m, d * self.shift(m)], dim=-1)


class Reversed(Edges):
    """Another order, a number an edge, and a length."""

    width = DIM + 1 + IN + 1 + 1

    def message(self, x_j, pos_i, pos_j, attr, w):
        length = torch.norm(pos_j - pos_i, dim=-1, keepdim=True)
        return self.net(torch.cat([attr, w.view(-1, 1), x_j, length, w[:, None].exp()], -1))


class Differences(Edges):
    """x_j - x_i, which is wide enough to move, pos_i - pos_j, which is not, and the target's own features."""

    width = 3 * IN + 3

    def message(self, x_i, x_j, pos_i, pos_j):
        return self.net(torch.cat([x_i, x_j - x_i, pos_i - pos_j, x_i + x_j], dim=-1))


class Difference(Edges):
    width = IN

    def message(self, x_i, x_j):
        return self.net(x_j - x_i)


class Gated(Edges):
    """Two networks and functions between them; one Linear reads a source alone."""

    width = 2 * IN

    def __init__(self, net=None, **options):
        super().__init__(net, **options)
        self.lin, self.gate, self.act = Linear(IN, DIM), Linear(2 * DIM, DIM, bias=False), nn.LeakyReLU()

    def message(self, x_i, x_j, attr, w):
        gate = F.softplus(self.gate(torch.cat([self.act(self.lin(x_j)), attr], dim=-1))) / 2
        return gate.sigmoid() * self.net(torch.cat([x_j, x_i], dim=-1)) * w.unsqueeze(-1) - attr[:, :1]


class Shared(Edges):
    """One network called twice."""

    width = 2 * IN

    def message(self, x_i, x_j):
        return self.net(torch.cat([x_i, x_j], -1)) + self.net(torch.cat([x_j, x_i], -1)).tanh()


class Optional(Edges):
    """Features of edges or none."""

    width = 2 * IN

    def forward(self, x, pos, edge_index, attr, w):
        return self.propagate(edge_index, x=x, attr=None)

    def message(self, x_i, x_j, attr):
        h = torch.cat([x_i, x_j], dim=-1)
        if attr is not None:
            h = torch.cat([h, attr], dim=-1)
        return self.net(h)


KINDS = (Mesh, Equivariant, Reversed, Differences, Difference, Gated, Shared, Optional)


def inputs(name, dtype=torch.float64):
    index, (n, _) = ZOO[name]()
    e = index.size(1)
    x, pos = values(n, IN, seed=1, dtype=dtype), values(n, 3, seed=2, dtype=dtype)
    return [x, pos, index, values(e, DIM, seed=3, dtype=dtype), values(e, seed=4, dtype=dtype)]


def gradients(layer, args, train=True, call=None):
    """Results and all gradients."""
    fresh = [a.clone().requires_grad_() if a.is_floating_point() else a for a in args]
    torch.manual_seed(3)
    out = (call or layer.train(train))(*fresh)
    leaves = [a for a in fresh if a.is_floating_point()] + list(layer.parameters())
    flow = values(*out.shape, seed=9, dtype=out.dtype)
    return [
        out.detach(),
        *torch.autograd.grad((out * flow).sum(), leaves, allow_unused=True, materialize_grads=True),
    ]


def pair(make):
    torch.manual_seed(0)
    stock = make().double()
    return stock, stretto.accelerate(copy.deepcopy(stock))


def same(stock, fast, args, train=True, path="fast", how=""):
    wanted, got = gradients(stock, args, train), gradients(fast, args, train)
    record = record_of(fast)
    assert record.path == path, record.reason
    assert how in record.plan
    for mine, theirs in zip(got, wanted, strict=True):
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10 * max(scale, 1.0))
    for mine, theirs in zip(fast.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
