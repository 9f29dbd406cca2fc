"""train(): partition-parallel training in processes of this machine, and what all ranks did, put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stretto.dist.exchange import Link
from stretto.dist.schedule import Schedule
from stretto.dist.staleness import Reading, Staleness
from stretto.dist.timeline import Event
from stretto.dist.traffic import Traffic
from stretto.dist.training import TIMEOUT, PartitionParallel
from stretto.machine.ranks import LIMIT, launch


@dataclass
class Run:
    """What a training run did."""

    losses: list[float]  # of the whole graph, step by step
    gradients: list[Tensor]  # of all weights, step by step, where kept
    weights: dict[str, Tensor]  # the state_dict at the end
    predictions: Tensor  # [n, out] of the trained model
    ages: list[Reading]  # of all ranks
    traffic: list[list[Traffic]]  # by step and rank
    seconds: list[float]  # of the slowest rank, step by step
    events: list[Event] = field(repr=False, default_factory=list)

    def oldest(self) -> dict[str, tuple[int, int]]:
        """The largest age seen in every slot, steps and layers apart."""
        result: dict[str, tuple[int, int]] = {}
        for slot in dict.fromkeys(reading.slot for reading in self.ages):
            seen = [reading.age for reading in self.ages if reading.slot == slot]
            result[slot] = (max(age.steps for age in seen), max(age.layers for age in seen))
        return result

    def sent(self, step: int = -1) -> dict[str, int]:
        """Bytes and messages of all ranks in a step, and the most synchronisations of one."""
        ranks = self.traffic[step]
        return {
            "bytes": sum(t.bytes for t in ranks),
            "messages": sum(t.messages for t in ranks),
            "syncs": max(t.syncs for t in ranks),
        }


def train(
    model: nn.Module,
    data: Any,
    owner: Tensor,
    *,
    steps: int,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    staleness: Staleness | None = None,
    schedule: Schedule | None = None,
    link: Link | None = None,
    keep_gradients: bool = False,
    seed: int = 0,
    ranks: int | None = None,
    limit: float = LIMIT,
    timeout: float = TIMEOUT,
) -> Run:
    """Train `steps` steps in one process per part. optimizer(parameters) makes the optimizer; None: weights stay.

    owner [n]: the part of every node, see partition(). The model is not changed; Run.weights are the trained
    ones. Dropout draws from seed + rank.
    """
    count = ranks or (int(owner.max()) + 1 if owner.numel() else 1)
    options = {"staleness": staleness, "schedule": schedule, "link": link, "timeout": timeout}
    inputs = (model, data, owner, steps, optimizer, options, keep_gradients, seed)
    return gathered(launch(rank_of_run, count, *inputs, limit=limit, timeout=timeout), data.num_nodes)


def rank_of_run(
    model: nn.Module,
    data: Any,
    owner: Tensor,
    steps: int,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    options: dict[str, Any],
    keep_gradients: bool,
    seed: int,
) -> dict[str, Any]:
    """One rank's part in train(); also for a process group of one's own."""
    with PartitionParallel(model, data, owner, **options) as parts:
        torch.manual_seed(seed + parts.rank)
        stepper = None if optimizer is None else optimizer(model.parameters())
        losses, gradients, seconds = [], [], []
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(parts.step(stepper))
            seconds.append(time.perf_counter() - start)
            if keep_gradients:
                grads = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
                gradients.append(torch.cat(grads))
        out = parts.predict()
    return {  # once closed: everything sent has landed
        "losses": losses,
        "gradients": gradients,
        "weights": model.state_dict(),
        "own": parts.part.own,
        "out": out,
        "ages": parts.ages,
        "traffic": parts.traffic,
        "seconds": seconds,
        "events": list(parts.timeline.events),
    }


def gathered(results: list[dict[str, Any]], num_nodes: int) -> Run:
    """The results of rank_of_run over all ranks, as one."""
    out = results[0]["out"].new_zeros(num_nodes, *results[0]["out"].shape[1:])
    for rank in results:
        out[rank["own"]] = rank["out"]
    return Run(
        losses=[sum(shares) for shares in zip(*(rank["losses"] for rank in results), strict=True)],
        gradients=results[0]["gradients"],
        weights=results[0]["weights"],
        predictions=out,
        ages=[reading for rank in results for reading in rank["ages"]],
        traffic=[list(step) for step in zip(*(rank["traffic"] for rank in results), strict=True)],
        seconds=[max(of_ranks) for of_ranks in zip(*(rank["seconds"] for rank in results), strict=True)],
        events=sorted((event for rank in results for event in rank["events"]), key=lambda event: event.begin),
    )
