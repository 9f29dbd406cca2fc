"""What ranks send each other, counted where it is sent; and the sum over all ranks, around a ring."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.machine.ranks import Rows, swap


@dataclass
class Traffic:
    """Of one rank: bytes and messages sent; syncs: waits for what another rank does in the same step."""

    bytes: int = 0
    messages: int = 0
    syncs: int = 0

    def count(self, sends: Rows) -> None:
        """Note messages about to be sent."""
        self.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        self.messages += len(sends)

    def to_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)


def ring_sum(values: Tensor, traffic: Traffic, *, group: dist.ProcessGroup | None = None) -> None:
    """Sum values [W] over all ranks in place, to the same bits on each: one synchronisation.

    P - 1 turns add up the chunks, P - 1 hand them round: 2 (P - 1) / P of the bytes per rank, the least there is.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(values.tensor_split(size))
    before, after = (rank - 1) % size, (rank + 1) % size
    for turn in range(2 * (size - 1)):
        adding = turn < size - 1
        out = (rank - turn) % size if adding else (rank + 1 - (turn - size + 1)) % size
        into = (out - 1) % size
        taken = torch.empty_like(chunks[into])
        sends = [(after, chunks[out].contiguous())]
        traffic.count(sends)
        swap(sends, [(before, taken)], group=group)
        chunks[into].copy_(chunks[into] + taken if adding else taken)
    traffic.syncs += 1
