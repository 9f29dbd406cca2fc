"""Partition-parallel training on the whole graph: each rank runs the model on its part; together they make one step.

with PartitionParallel(model, data, owner, staleness=Staleness.halo(1)) as parts:  # in every rank
    for _ in range(epochs):
        parts.step(optimizer)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.dist.exchange import Exchange, Link
from stretto.dist.layers import check_call, layers_of, split_of
from stretto.dist.part import Part
from stretto.dist.pipeline import Pipeline
from stretto.dist.schedule import Schedule
from stretto.dist.slots import Slots
from stretto.dist.staleness import Reading, Staleness
from stretto.dist.timeline import Timeline
from stretto.dist.traffic import Traffic, ring_sum
from stretto.errors import expect
from stretto.machine.ranks import calm_gloo
from stretto.kernels import on_host

TIMEOUT = 60.0  # seconds that a rank waits for another


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """The sum over rows; rows labelled -1 count nothing."""
    return F.cross_entropy(out, y, ignore_index=-1, reduction="sum")


class PartitionParallel:
    """One rank's share of full-graph training. data: x [n, k], edge_index, y [n], train_mask [n] of the whole graph.

    owner [n]: the rank of every node. loss(out, y): a sum over rows; it is divided by the number of training rows of
    the whole graph. The model's layers of message passing run by the rules in dist/layers.py until close().
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        owner: Tensor,
        *,
        staleness: Staleness | None = None,
        schedule: Schedule | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        link: Link | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        expect(
            dist.is_initialized(), "PartitionParallel: torch.distributed has no process group; init_process_group first"
        )
        rank, size = dist.get_rank(), dist.get_world_size()
        expect(
            owner.dim() == 1 and owner.numel() == data.num_nodes,
            f"PartitionParallel: 'owner' is {list(owner.shape)}, but the graph has {data.num_nodes} nodes",
        )
        expect(on_host(data.x), f"PartitionParallel: 'x' is on {data.x.device}, wanted the CPU (gloo)")
        last = int(owner.max()) if owner.numel() else 0
        expect(last < size, f"PartitionParallel: 'owner' names rank {last}, but there are {size} ranks")
        self._layers = layers_of(model)
        self.model, self.loss, self.rank = model, loss, rank
        self.part = Part.of(data.edge_index, owner, rank)
        self.timeline = Timeline(rank)
        self.staleness, self.schedule = staleness or Staleness(), schedule or Schedule()
        # One group for rows, one for sums and barriers: the two threads must not meet in one.
        groups = [dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) for _ in range(2)]
        self._groups = groups
        calm_gloo()
        self._exchange = Exchange(groups[0], self.timeline, link=link, timeout=timeout)
        self._pipeline = Pipeline(self.part, self.schedule, self.timeline, groups[1])
        self.slots = Slots(self.part, self.staleness, self._exchange, self.timeline)
        self._reading = self.slots
        own = self.part.own
        valid = data.y >= 0
        train = valid & data.train_mask if getattr(data, "train_mask", None) is not None else valid
        self.x, self.y, self.train_rows, self.total = data.x[own], data.y[own], train[own], int(train.sum())
        for conv in self._layers:
            conv.forward = partial(self._layer, conv)

    def _layer(self, conv: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_call(conv, args, kwargs, self.part.edge_index)
        split = split_of(conv)
        assert split is not None
        return self._pipeline.run(conv, split, x, self._reading)

    # ---- one step ----

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> float:
        """Forward, backward, sum of the ranks' gradients, optimizer's step. Returns this rank's share of the loss."""
        self.slots.begin_step()
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        out = self.model(self.x, self.part.edge_index)
        share = self.loss(out[self.train_rows], self.y[self.train_rows]) / max(1, self.total)
        self.timeline.phase = "backward"
        (share + out.sum() * 0.0).backward()  # a part without training rows takes part in every exchange all the same
        self.timeline.finish_backward()
        self._sum_gradients()
        if optimizer is not None:
            optimizer.step()
        return float(share.detach())

    def _sum_gradients(self) -> None:
        weights = [p for p in self.model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
        flat = torch.cat([grad.reshape(-1) for grad in grads]) if grads else torch.zeros(0)
        with self.timeline.span(0, "sum", "all"):
            ring_sum(flat, self.traffic[-1], group=self._groups[1])
        for weight, summed in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
            weight.grad = summed.view_as(weight).clone()

    @torch.no_grad()
    def predict(self) -> Tensor:
        """The model's result for the own rows (part.own), from fresh rows and in evaluation mode. [n_p, out]."""
        training = self.model.training
        self._reading = Slots(self.part, Staleness(), self._exchange, Timeline(self.rank))
        self._reading.begin_step()
        self.timeline.recording = False  # the timeline is that of training
        self.model.eval()
        try:
            out: Tensor = self.model(self.x, self.part.edge_index)
            return out
        finally:
            self.model.train(training)
            self._reading, self.timeline.recording = self.slots, True

    # ---- what happened ----

    @property
    def traffic(self) -> list[Traffic]:
        """What this rank sent, step by step."""
        return self.slots.traffic

    @property
    def ages(self) -> list[Reading]:
        """How old everything was that layers read."""
        return list(self.slots.readings)

    def close(self) -> None:
        """Let exchanges under way land, and give the model its own layers back."""
        self._exchange.close()
        self.detach()
        for group in self._groups:
            dist.destroy_process_group(group)

    def detach(self) -> None:
        """Give the model its own layers back."""
        for conv in self._layers:
            conv.__dict__.pop("forward", None)

    def __enter__(self) -> PartitionParallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.detach()  # others may wait for exchanges that will never come: do not join them
