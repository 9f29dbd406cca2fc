"""A partitioned training step in real processes (torch.distributed, gloo), every byte, message and wait counted.

Two ways. By hooks, for any layer of one hop: each worker owns a part of the nodes and the edges into them, pulls the
rows of its remote sources before a layer and keeps its own rows after it; gradients travel the other way. By the engine
of stretto.dist, for layers that have a rule there, with rows as old as a Staleness allows. Either result is compared
with one process before any number counts. A tally of torch.distributed's own calls stands beside what is counted.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto import memory
from stretto.analyze.graph_stats import Partitioner
from stretto.analyze.workload import IGNORED, Workload, arguments, has_labels, keywords, scalar, train_mask
from stretto.dist import Part, PartitionParallel, Schedule, Staleness, Traffic, launch
from stretto.dist.traffic import ring_sum, swap
from stretto.errors import StrettoError, fail

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


# ---- any layer of one hop, by hooks ----


class _Pull(torch.autograd.Function):
    """x [own, k] -> [own + halo, k]; backward sends the halo's gradients home and adds them there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, traffic: Traffic) -> Tensor:
        ctx.part, ctx.traffic, ctx.own = part, traffic, x.size(0)
        rows = x.new_empty(part.halo.numel(), *x.shape[1:])
        _exchange(
            traffic,
            [(peer, x[places].contiguous()) for peer, places in part.sends],
            [(peer, rows[first:last]) for peer, first, last in part.receives],
        )
        return torch.cat([x, rows])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        own, rows = grad[: ctx.own].clone(), grad[ctx.own :]
        back = [(peer, grad.new_empty(places.numel(), *grad.shape[1:])) for peer, places in ctx.part.sends]
        _exchange(ctx.traffic, [(peer, rows[a:b].contiguous()) for peer, a, b in ctx.part.receives], back)
        for (_, taken), (_, places) in zip(back, ctx.part.sends, strict=True):
            own.index_add_(0, places, taken)
        return own, None, None


def _exchange(traffic: Traffic, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
    traffic.count(sends)
    traffic.syncs += 1
    swap(sends, receives)


def _hook(layers: list[nn.Module], part: Part, traffic: Traffic) -> None:
    for layer in layers:

        def before(module: nn.Module, args: Any) -> Any:
            return (_Pull.apply(args[0], part, traffic), *args[1:])

        def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out[: part.own.numel()]

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def _share_of(data: Any, part: Part, *, degrees: bool) -> Any:
    """The data of a part. degrees: halo rows get as many incoming edges as they have in the whole graph, for layers
    that count them; loops stay loops, which such a layer counts once or adds."""
    share, own, edges = data.clone(), part.own, part.edge_index
    for key, value in data.to_dict().items():
        if isinstance(value, Tensor) and key != "edge_index" and value.dim() and value.size(0) == data.num_nodes:
            share[key] = value[own]
    if degrees and own.numel():
        halo = torch.arange(own.numel(), own.numel() + part.halo.numel())
        row, col = data.edge_index
        loops = col[row == col].bincount(minlength=data.num_nodes)[part.halo]
        others = halo.repeat_interleave(part.degree[own.numel() :] - loops)
        loop = halo.repeat_interleave(loops)
        ends = torch.stack([torch.cat([torch.zeros_like(others), loop]), torch.cat([others, loop])])
        edges = torch.cat([edges, ends], dim=1)
    share.edge_index, share.num_nodes = edges, own.numel()
    return share


def _with_loss(data: Any) -> Tensor:
    """The rows that a mean over labels is taken of."""
    mask = train_mask(data)
    rows = torch.ones(data.num_nodes, dtype=torch.bool) if mask is None else mask
    return rows & (data.y != IGNORED)


def _loss_share(out: Tensor, data: Any, whole: Any) -> Tensor:
    """This worker's share of the loss that one process would compute: of a mean by its rows, of a sum as it is."""
    if not has_labels(out, data):
        return scalar(out, data)
    mine = _with_loss(data)
    if not bool(mine.any()):
        return out.sum() * 0.0
    return scalar(out, data) * (int(mine.sum()) / int(_with_loss(whole).sum()))


def by_hooks(
    model: nn.Module, data: Any, owner: Tensor, layers: list[str], degrees: bool, repeats: int
) -> dict[str, Any]:
    """One worker: a step to warm up and count, then timed ones."""
    part = Part.of(data.edge_index, owner, dist.get_rank())
    share, modules = _share_of(data, part, degrees=degrees), dict(model.named_modules())
    traffic = Traffic()
    _hook([modules[path] for path in layers], part, traffic)
    model.train()
    flat = torch.zeros(0)

    def step() -> None:
        nonlocal flat
        model.zero_grad(set_to_none=True)
        out = model(*arguments(model, share), **keywords(model, share))
        _loss_share(out, share, data).backward()
        flat = _flat(model)
        ring_sum(flat, traffic)

    with tallied() as tally:
        seconds = _timed(step, WARMUP, repeats)
    steps = WARMUP + repeats
    return {
        "traffic": Traffic(traffic.bytes // steps, traffic.messages // steps, traffic.syncs // steps),
        "tally": Tally(tally.bytes // steps, tally.messages // steps),
        "gradient": flat,
        "seconds": seconds,
    }


# ---- layers with a rule, by the engine ----


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
    memory.switch(True)  # no worker should pay for new memory in every step: the prediction does not either
    samples = []
    for _ in range(warmup + repeats):
        dist.barrier()
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[warmup:] or samples)


# ---- the link ----

LINK_LIMIT = 60.0  # seconds
SWAPS, PAYLOAD, LONG = 60, 1 << 22, 8  # exchanges of eight bytes; bytes of long ones, and how many
ROWS, WIDTH, TURNS = 1 << 13, 64, 12  # work as a step's: rows gathered, added up, multiplied


def converse() -> dict[str, float]:
    """One side of a conversation as steps have it: work, then both send and receive at once, and wait."""
    memory.switch(True)
    rank, table = dist.get_rank(), torch.ones(ROWS, WIDTH)
    index, square = torch.randint(ROWS, (4 * ROWS,)), torch.ones(WIDTH, WIDTH)

    def work() -> None:
        rows = table.index_select(0, index)
        torch.zeros_like(table).index_add_(0, index, rows).relu_() @ square

    def exchange(mine: Tensor, other: Tensor) -> None:
        swap([(1 - rank, mine)], [(1 - rank, other)])

    def seconds(call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    taken = {}
    for name, values, turns in (("short", 2, SWAPS), ("long", PAYLOAD // 4, LONG)):
        rows = torch.zeros(values), torch.zeros(values)
        samples = []
        for _ in range(turns + 2):
            work()
            samples.append(seconds(partial(exchange, *rows)))
        # a mean, since a step is the sum of some; the worst are not its
        taken[name] = statistics.mean(sorted(samples[2:])[: ceil(0.9 * turns)])

    def meanwhile() -> None:
        flight = pool.submit(exchange, *rows)
        work()
        flight.result()

    parts = (((0,), "alone", work), ((1,), "alone", work), ((0, 1), "both", work), ((0, 1), "meanwhile", meanwhile))
    times: dict[str, list[float]] = {name: [] for _, name, _ in parts}
    with ThreadPoolExecutor(1) as pool:
        for _ in range(TURNS):
            for who, name, call in parts:
                dist.barrier()
                if rank in who:
                    times[name].append(seconds(call))
    return taken | {name: statistics.median(found) for name, found in times.items()}


@cache
def link() -> dict[str, Any]:
    """Between two processes of this machine, as fields of a machine file; measured once."""
    found = launch(converse, 2, limit=LINK_LIMIT)
    taken = {name: statistics.mean(one[name] for one in found) for name in found[0]}
    return fields_of(taken)


def fields_of(taken: dict[str, float]) -> dict[str, Any]:
    """Fields of a machine file from seconds: of a short and a long exchange after work, of work alone, beside the
    other's, and beside the other's and a long exchange. The shorter of work and exchange is what can be hidden."""
    unseen = taken["both"] + taken["long"] - taken["meanwhile"]
    return {
        "link_latency": taken["short"],
        "link_bandwidth": PAYLOAD / max(taken["long"] - taken["short"], 1e-9),
        "beside": max(1.0, taken["both"] / taken["alone"]),
        "hidden": min(1.0, max(0.0, unseen / min(taken["both"], taken["long"]))),
    }


# ---- runs ----


def run_pull(
    workload: Workload, layers: list[str], splitter: Partitioner, parts: int, method: str, *, repeats: int = 3
) -> dict[str, Any]:
    """Run the step on `parts` processes: bytes, messages and synchronisations counted, seconds of the slowest worker.

    degrees: whether a layer counts them, so that halo rows must have all their edges. Fails where the workers'
    gradients are not those of one process.
    """
    error, fine = float("inf"), False
    owner = torch.from_numpy(np.ascontiguousarray(splitter.assign(parts, method)))
    for degrees in (False, True):

        def run(work: Workload, repeats: int, degrees: bool = degrees) -> list[dict[str, Any]]:
            given = (work.model, work.data, owner, layers, degrees, repeats)
            return launch(by_hooks, parts, *given, limit=LIMIT)

        found = run(workload, repeats)
        error, fine = _judged(workload, found, run)
        if fine:
            return {**_together(found), "error": error, "degrees": degrees}
    _differs(parts, error)


def run_engine(
    workload: Workload,
    owner: Tensor,
    *,
    staleness: Staleness,
    schedule: Schedule | None = None,
    repeats: int = 3,
) -> dict[str, Any]:
    """The same by the engine of stretto.dist, remote rows and gradients as old as `staleness` allows.

    The first step is synchronous and the weights stay, so that older rows are no other rows: gradients can be compared.
    """
    parts, warmup, order = int(owner.max()) + 1, WARMUP + staleness.memory_steps, schedule or Schedule()

    def run(work: Workload, repeats: int) -> list[dict[str, Any]]:
        return launch(by_engine, parts, work.model, work.data, owner, staleness, order, warmup, repeats, limit=LIMIT)

    found = run(workload, repeats)
    error, fine = _judged(workload, found, run)
    if not fine:
        _differs(parts, error)
    ages = [reading for worker in found for reading in worker["ages"]]
    return {**_together(found), "error": error, "ages": ages}


def _one_process(workload: Workload) -> Tensor:
    workload.run()
    wanted = _flat(workload.model)
    workload.model.zero_grad(set_to_none=True)
    return wanted


def _judged(
    workload: Workload, found: list[dict[str, Any]], again: Callable[[Workload, int], list[dict[str, Any]]]
) -> tuple[float, bool]:
    """How far the workers' gradients are from one process's, and whether that may be; again(workload, repeats) runs
    them once more."""
    error = _error(found, _one_process(workload))
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


def _error(found: list[dict[str, Any]], wanted: Tensor) -> float:
    return float((found[0]["gradient"] - wanted).norm() / wanted.norm().clamp_min(1e-12))


def _differs(parts: int, error: float) -> NoReturn:
    fail(f"validate: on {parts} workers the gradients differ by {error:.1e} from one process's")


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "bytes": sum(f["traffic"].bytes for f in found),
        "messages": sum(f["traffic"].messages for f in found),
        "syncs": max(f["traffic"].syncs for f in found),
        "tallied bytes": sum(f["tally"].bytes for f in found),
        "tallied messages": sum(f["tally"].messages for f in found),
        "seconds": max(f["seconds"] for f in found),
    }
