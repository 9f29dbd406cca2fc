"""Small awkward graphs in CSC form, and a reader of slots, for the tests of the sampler."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.loader.native_sampler import NativeSampler, NodeType, Relation, Sampling, Slice
from stretto.loader.slot import Slot


def csc(edge_index: Tensor, num_nodes: int, index: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
    """colptr, row and the number of each CSC entry in edge_index."""
    order = torch.argsort(edge_index[1], stable=True)
    counts = torch.bincount(edge_index[1], minlength=num_nodes)
    colptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return colptr, edge_index[0][order].to(index), order


def awkward(name: str) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(7)
    graphs = {
        "empty": (torch.empty(2, 0, dtype=torch.int64), 5),
        "one node": (torch.empty(2, 0, dtype=torch.int64), 1),
        "self-loops": (torch.tensor([[0, 1, 2, 0], [0, 1, 2, 1]]), 4),
        "duplicate edges": (torch.tensor([[1, 1, 1, 2, 2], [0, 0, 0, 0, 1]]), 3),
        "hub": (torch.stack([torch.arange(1, 500), torch.zeros(499, dtype=torch.int64)]), 500),
        "directed": (torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), 5),
        "random": (torch.randint(0, 200, (2, 3000), generator=generator), 200),
    }
    return graphs[name]


AWKWARD = ("empty", "one node", "self-loops", "duplicate edges", "hub", "directed", "random")


def sampler(
    edge_index: Tensor,
    num_nodes: int,
    fanout: Sequence[int],
    flags: Sampling = Sampling.EDGE_ID,
    *,
    index: torch.dtype = torch.int32,
    slices: Sequence[Slice] = (),
) -> NativeSampler:
    colptr, row, order = csc(edge_index, num_nodes, index)
    relation = Relation(colptr, row, fanout, edge_id=order)
    return NativeSampler([NodeType(num_nodes)], [relation], len(fanout), flags, slices)


def take(native: NativeSampler, seeds: Tensor, *, seed: int = 0, epoch: int = 0, batch: int = 0) -> Slot:
    return native.sample(seed, epoch, batch, [seeds], [None])


def same(a: Slot, b: Slot) -> bool:
    return a.table[1:] == b.table[1:] and torch.equal(contents(a), contents(b))


def contents(slot: Slot) -> Tensor:
    """Everything a slot delivers, one after the other, without the gaps between."""
    parts = [slot.n_id(), slot.edge_index().reshape(-1)]
    edge_id = slot.edge_id()
    parts += [] if edge_id is None else [edge_id]
    parts += [slot.slice(i).reshape(-1).double() for i in range(len(slot.sampler.slices))]
    return torch.cat([p.double() for p in parts])
