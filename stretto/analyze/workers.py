"""A partitioned training step in real processes, by the engine of stretto.dist: bytes, messages, waits and seconds.

Its gradients are compared with those of one process before any number counts. What torch.distributed's own calls were
given to send is counted beside what the engine says that it sent.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.dist import PartitionParallel, Schedule, Staleness, launch
from stretto.errors import StrettoError, fail
from stretto.memory import allocator
from stretto.observe.workload import Workload

logger = logging.getLogger("stretto")

LIMIT = 240.0  # seconds until workers that do not answer are ended
WARMUP = 3  # steps until the process has the memory it needs
ALLOWED = 1e-4  # relative error of the loss and of the gradients
ROUNDING, EXACT = 1e-2, 1e-8  # up to the first it may be a ReLU that rounding turned: then it is judged in float64


@dataclass
class Tally:
    """What passed through torch.distributed."""

    bytes: int = 0
    messages: int = 0


@contextmanager
def tallied() -> Iterator[Tally]:
    """Count what torch.distributed is given to send."""
    tally, plain = Tally(), dist.isend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        tally.bytes += tensor.numel() * tensor.element_size()
        tally.messages += 1
        return plain(tensor, *args, **kwargs)

    dist.isend = isend
    try:
        yield tally
    finally:
        dist.isend = plain


def by_engine(
    model: nn.Module, data: Any, owner: Tensor, staleness: Staleness, schedule: Schedule, warmup: int, repeats: int
) -> dict[str, Any]:
    """One worker of the engine: steps to warm up, then timed ones, none of which changes the weights."""
    with tallied() as tally, PartitionParallel(model, data, owner, staleness=staleness, schedule=schedule) as parts:
        seconds = _timed(parts.step, warmup, repeats)
    steps = warmup + repeats
    return {
        "traffic": parts.traffic[-1],
        "tally": Tally(tally.bytes // steps, tally.messages // steps),
        "gradient": _flat(model),
        "seconds": seconds,
        "ages": parts.ages,
    }


def _flat(model: nn.Module) -> Tensor:
    """All gradients in one row."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in weights])


def _timed(step: Callable[[], Any], warmup: int, repeats: int) -> float:
    """Median seconds of a step that all workers begin together."""
    allocator.switch(True)  # no worker should pay for new memory in every step: the prediction does not either
    samples = []
    for _ in range(warmup + repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[warmup:] or samples)


def run_engine(
    workload: Workload,
    owner: Tensor,
    *,
    staleness: Staleness,
    schedule: Schedule | None = None,
    repeats: int = 3,
) -> dict[str, Any]:
    """Run the step on one process for each owner of nodes; rows and gradients are as old as `staleness` allows.

    The first step is synchronous and the weights stay, so that older rows are no other rows: gradients can be compared.
    """
    parts, warmup, order = int(owner.max()) + 1, WARMUP + staleness.memory_steps, schedule or Schedule()

    def run(work: Workload, repeats: int) -> list[dict[str, Any]]:
        return launch(by_engine, parts, work.model, work.data, owner, staleness, order, warmup, repeats, limit=LIMIT)

    result = run(workload, repeats)
    error, fine = _judged(workload, result, run)
    if not fine:
        _differs(parts, error)
    ages = [reading for worker in result for reading in worker["ages"]]
    return {**_together(result), "error": error, "ages": ages}


def _one_process(workload: Workload) -> Tensor:
    workload.run()
    wanted = _flat(workload.model)
    workload.model.zero_grad(set_to_none=True)
    return wanted


def _judged(
    workload: Workload, workers: list[dict[str, Any]], again: Callable[[Workload, int], list[dict[str, Any]]]
) -> tuple[float, bool]:
    """How far the workers' gradients are from one process's, and whether that may be; again(workload, repeats) runs
    them once more."""
    error = _error(workers, _one_process(workload))
    if not ALLOWED < error <= ROUNDING:
        return error, error <= ALLOWED
    data = workload.data.clone().apply(lambda t: t.double() if t.is_floating_point() else t)
    exact = replace(workload, model=copy.deepcopy(workload.model).double(), data=data)
    try:
        wanted = _one_process(exact)
        judged = _error(again(exact, 0), wanted)
    except (StrettoError, RuntimeError, TypeError) as why:  # a forward may make tensors of a type of its own
        logger.debug("stretto: the step does not run in float64: %s", why)
        return error, False
    return judged, judged <= EXACT


def _error(workers: list[dict[str, Any]], wanted: Tensor) -> float:
    return float((workers[0]["gradient"] - wanted).norm() / wanted.norm().clamp_min(1e-12))


def _differs(parts: int, error: float) -> NoReturn:
    fail(f"validate: on {parts} workers the gradients differ by {error:.1e} from one process's")


def _together(workers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "bytes": sum(f["traffic"].bytes for f in workers),
        "messages": sum(f["traffic"].messages for f in workers),
        "syncs": max(f["traffic"].syncs for f in workers),
        "tallied bytes": sum(f["tally"].bytes for f in workers),
        "tallied messages": sum(f["tally"].messages for f in workers),
        "seconds": max(f["seconds"] for f in workers),
    }
