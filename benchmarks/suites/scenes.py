"""What a layer or a small model is measured on: one input again and again, new mini-batches of molecules at every call
as a DataLoader makes them, or whole training steps over such batches.

A scene knows how to check a candidate (its output and gradients on the first input) and what call of it to time.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.models.schnet import GaussianSmearing

from stretto import datasets
from stretto.observe.peak_memory import tensor_bytes

BATCH = 128  # molecules
BATCHES = 100  # of a collection, in turn: more than Graph.of remembers by their content
CUTOFF = 10.0  # Angstrom: SchNet's
GAUSSIANS = 50
pyg: Any = torch_geometric.nn


@dataclass
class Molecules:
    """A mini-batch: edges are bonds, or all pairs of a molecule's atoms that are near enough."""

    index: Tensor
    z: Tensor
    pos: Tensor
    batch: Tensor
    attr: Tensor | None = None  # features of the edges, where they come with the data

    def clone(self) -> Molecules:
        return Molecules(*(None if t is None else t.clone() for t in vars(self).values()))  # type: ignore[arg-type]

    def attributes(self) -> tuple[Tensor, Tensor]:
        """Lengths of the edges, and the same as SchNet's features. [E], [E, GAUSSIANS]."""
        length = (self.pos[self.index[0]] - self.pos[self.index[1]]).norm(dim=1)
        attr = GaussianSmearing(0.0, CUTOFF, GAUSSIANS)(length)
        return length, attr.where(attr > 1e-30, 0.0)  # tiny numbers would slow every candidate's products


def batches(graph: str, count: int, *, near: bool = False) -> list[Molecules]:
    """The first `count` mini-batches of a collection of molecules. near: edges between all atoms within the cutoff."""
    data = datasets.load_graph(graph)
    nodes, edges, pos, z = (data.extras[key] for key in ("node_ptr", "edge_ptr", "pos", "z"))
    found = []
    for first in range(0, count * BATCH, BATCH):
        last = min(first + BATCH, nodes.numel() - 1)
        a, b = int(nodes[first]), int(nodes[last])
        sizes = nodes[first + 1 : last + 1] - nodes[first:last]
        member = torch.repeat_interleave(torch.arange(last - first), sizes)
        index = data.edge_index[:, int(edges[first]) : int(edges[last])] - a
        if near:
            alike = (member.unsqueeze(0) == member.unsqueeze(1)) & (torch.cdist(pos[a:b], pos[a:b]) < CUTOFF)
            index = alike.fill_diagonal_(False).nonzero().t()
        found.append(Molecules(index.contiguous(), z[a:b].clone(), pos[a:b].clone(), member))
        if not near:
            found[-1].attr = found[-1].attributes()[1]
    return found


class Scene(abc.ABC):
    """Nodes and edges of the first input, and the bytes that any candidate must hold beside its parameters."""

    num_nodes: int
    num_edges: int
    ends: int = 0
    result_bytes: int = 0

    @abc.abstractmethod
    def check(self, net: Any) -> list[Tensor]:
        """Output and gradients on the first input."""

    @abc.abstractmethod
    def call(self, net: Any) -> Callable[[], None]:
        """What is timed."""


def gradients(out: Tensor, wanted: list[Tensor], flow: Tensor | None = None) -> list[Tensor]:
    """The result and its gradients, zeros where there are none."""
    grads = torch.autograd.grad(out, wanted, flow, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


class Same(Scene):
    """Forward and backward of a layer on one input."""

    def __init__(self, first: nn.Module, inputs: tuple[Any, ...], num_nodes: int) -> None:
        self.inputs = inputs
        self.num_nodes, self.num_edges = num_nodes, inputs[1].size(1)
        self.learned = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        with torch.no_grad():
            self.flow = torch.randn_like(first(*inputs))
        self.result_bytes = tensor_bytes(self.flow)
        self.ends = tensor_bytes(self.flow, *self.learned)

    def check(self, net: Any) -> list[Tensor]:
        wanted = [*self.learned, *(p for p in net.parameters() if p.requires_grad)]
        return gradients(net(*self.inputs), wanted, self.flow)

    def call(self, net: Any) -> Callable[[], None]:
        def call() -> None:
            net(*self.inputs).backward(self.flow)
            for tensor in (*self.learned, *net.parameters()):
                tensor.grad = None

        return call


class Fresh(Same):
    """The same on a new mini-batch at every call: other molecules, in tensors nobody has seen."""

    def __init__(self, first: nn.Module, made: list[tuple[Any, ...]]) -> None:
        super().__init__(first, made[0], made[0][0].size(0))
        self.made = made
        with torch.no_grad():
            self.flows = [torch.randn_like(first(*inputs)) for inputs in made]

    def call(self, net: Any) -> Callable[[], None]:
        turns = itertools.cycle(zip(self.made, self.flows, strict=True))

        def call() -> None:
            (x, *rest), flow = next(turns)
            net(x.detach().clone().requires_grad_(), *(t.clone() for t in rest)).backward(flow)
            for tensor in net.parameters():
                tensor.grad = None

        return call


class Steps(Scene):
    """Whole training steps on new mini-batches: forward, loss, backward, Adam."""

    def __init__(self, made: list[Molecules]) -> None:
        self.made = made
        self.num_nodes, self.num_edges = made[0].z.numel(), made[0].index.size(1)
        self.wanted = [torch.randn(BATCH, 1) for _ in made]

    def check(self, net: Any) -> list[Tensor]:
        parameters = [p for p in net.parameters() if p.requires_grad]
        out = net(self.made[0])
        grads = gradients(F.mse_loss(out, self.wanted[0]), parameters)[1:]
        return [out.detach(), torch.cat([g.reshape(-1) for g in grads])]  # as a whole: some are zero but for rounding

    def call(self, net: Any) -> Callable[[], None]:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
        turns = itertools.cycle(zip(self.made, self.wanted, strict=True))

        def call() -> None:
            given, wanted = next(turns)
            optimizer.zero_grad()
            F.mse_loss(net(given.clone()), wanted).backward()
            optimizer.step()

        return call


class SchNetStep(nn.Module):
    """PyG's SchNet with edges that come with the batch."""

    def __init__(self, width: int, interactions: int = 3) -> None:
        super().__init__()
        self.index: Tensor | None = None
        self.net = pyg.SchNet(width, width, interactions, GAUSSIANS, CUTOFF, interaction_graph=self.graph)

    def graph(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        assert self.index is not None
        return self.index, (pos[self.index[0]] - pos[self.index[1]]).norm(dim=-1)

    def forward(self, given: Molecules) -> Tensor:
        self.index = given.index
        energy: Tensor = self.net(given.z, given.pos, given.batch)
        return energy


class CrystalStep(nn.Module):
    """A network of the CGCNN kind: CGConv with BatchNorm, mean over a molecule, two Linears."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.convs = nn.ModuleList(pyg.CGConv(width, GAUSSIANS, batch_norm=True) for _ in range(layers))
        self.out = nn.Sequential(nn.Linear(width, 2 * width), nn.Softplus(), nn.Linear(2 * width, 1))

    def forward(self, given: Molecules) -> Tensor:
        x = self.embed(given.z)
        for conv in self.convs:
            x = conv(x, given.index, given.attr)
        result: Tensor = self.out(pyg.global_mean_pool(x, given.batch))
        return result
