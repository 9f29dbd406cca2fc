"""The link between two processes of this machine: how long messages take, and how much of them passes unseen."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.machine.ranks import launch, swap
from stretto.machine.timing import by_wall

LIMIT = 60.0  # seconds
SWAPS, PAYLOAD, LONG = 60, 1 << 22, 8  # exchanges of eight bytes; bytes of long ones, and how many
ROWS, WIDTH, TURNS = 1 << 13, 64, 12  # work as a step's: rows gathered, added up, multiplied


def converse() -> dict[str, float]:
    """One side of a conversation as steps have it: work, then both send and receive at once, and wait."""
    rank, table = dist.get_rank(), torch.ones(ROWS, WIDTH)
    index, square = torch.randint(ROWS, (4 * ROWS,)), torch.ones(WIDTH, WIDTH)

    def work() -> None:
        rows = table.index_select(0, index)
        torch.zeros_like(table).index_add_(0, index, rows).relu_() @ square

    def exchange(mine: Tensor, other: Tensor) -> None:
        swap([(1 - rank, mine)], [(1 - rank, other)])

    taken = {}
    for name, values, turns in (("short", 2, SWAPS), ("long", PAYLOAD // 4, LONG)):
        rows = torch.zeros(values), torch.zeros(values)
        samples = []
        for _ in range(turns + 2):
            work()
            samples.append(by_wall(partial(exchange, *rows)))
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
                    times[name].append(by_wall(call))
    return taken | {name: statistics.median(samples) for name, samples in times.items()}


@cache
def link() -> dict[str, Any]:
    """Between two processes of this machine, as fields of a machine file; measured once."""
    sides = launch(converse, 2, limit=LIMIT)
    return fields_of({name: statistics.mean(side[name] for side in sides) for name in sides[0]})


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
