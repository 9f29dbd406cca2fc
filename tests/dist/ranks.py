"""What the ranks of these tests run: functions that other processes can import."""

import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from stretto.observe.models import make
from stretto.dist import PartitionParallel, Schedule
from stretto.dist import layers
from stretto.dist.run import rank_of_run


def cores() -> set[int]:
    """Where this rank may run."""
    return os.sched_getaffinity(0)


def policies() -> list[tuple[list[int], list[int]]]:
    """How gloo's threads are scheduled, and how all others: before there is an engine, and while there is one."""

    def of_threads() -> tuple[list[int], list[int]]:
        found: tuple[list[int], list[int]] = ([], [])
        for comm in Path("/proc/self/task").glob("*/comm"):
            found[not comm.read_text().startswith("gloo")].append(os.sched_getscheduler(int(comm.parent.name)))
        return found

    before = of_threads()
    data = sample(torch.tensor([[0, 1, 2], [1, 2, 3]]), 4, 5, 3)
    with PartitionParallel(make("gcn", 5, 4, 3).double(), data, torch.tensor([0, 0, 1, 1])):
        return [before, of_threads()]


def raises_sigterm_in_the_parent(parent: int) -> None:
    """Send SIGTERM to the process that launched this rank."""
    os.kill(parent, signal.SIGTERM)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def sample(edge_index, num_nodes, width, classes, dtype=torch.float64, masked=True) -> Data:
    """Features and labels for a graph."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_nodes, width, generator=generator, dtype=torch.float64).to(dtype)
    data = Data(x=x, edge_index=edge_index, y=torch.randint(classes, (num_nodes,), generator=generator))
    data.num_nodes = num_nodes
    if masked:
        data.train_mask = torch.rand(num_nodes, generator=generator) < 0.6
    return data


@dataclass
class Case:
    """One run of the engine."""

    model: nn.Module
    data: Any
    owner: torch.Tensor
    steps: int = 5
    options: dict[str, Any] = field(default_factory=dict)


def run_cases(cases):
    """Every case, one after the other, in one set of ranks."""
    found = [rank_of_run(c.model, c.data, c.owner, c.steps, sgd, c.options, True, 0) for c in cases]
    for case in cases:
        assert not any("forward" in module.__dict__ for module in case.model.modules()), "the model was not given back"
    return found


def sent_through_torch(model, data, owner, staleness):
    """(bytes, messages) of three steps, as the engine counts them and as torch.distributed was given them."""
    sent, plain = [], dist.isend

    def isend(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *args, **kwargs)

    dist.isend = isend
    with PartitionParallel(model, data, owner, staleness=staleness) as parts:
        for _ in range(3):
            parts.step()
    dist.isend = plain
    return (sum(t.bytes for t in parts.traffic), sum(t.messages for t in parts.traffic)), (sum(sent), len(sent))


# ---- what goes wrong ----


def fails_in_one_rank():
    """Rank 1 fails while rank 0 waits for its rows."""
    if dist.get_rank() == 1:
        raise ValueError("no such column: 'price'")
    dist.recv(torch.zeros(1), 1)


def dies_in_one_rank():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(1), 1)


def never_ends():
    time.sleep(600)


def one_rank_stops_training(data, owner):
    """Rank 1 stops after one step; the others wait for its rows and must be told, not hang."""
    with PartitionParallel(make("sage", data.x.size(1), 4, 3), data, owner, timeout=4.0) as parts:
        parts.step()
        if dist.get_rank() == 1:
            time.sleep(600)
        parts.step()


# ---- who waits for whom ----


class Gate:
    """Holds rank 1 inside an op until rank 0 has reached another one; tells whether it did."""

    def __init__(self, hold, until, name, patience):
        self.hold, self.until, self.name, self.patience = hold, until, name, patience
        self.layer = {"graph op": 0, "neural op": 0}
        self.came: bool | None = None
        self.store = dist.distributed_c10d._get_default_store()
        self.plain = layers.graph_op, layers.neural_op

    def __enter__(self):
        layers.graph_op = self._op("graph op", self.plain[0])
        layers.neural_op = self._op("neural op", self.plain[1])
        return self

    def __exit__(self, *error):
        layers.graph_op, layers.neural_op = self.plain

    def _op(self, kind, function):
        def run(conv, split, part, rows, *tensors):
            if rows != "boundary":  # a layer's first rows
                self.layer[kind] += 1
            here = (kind, self.layer[kind])
            if part.rank == 0 and here == self.until and rows != "boundary":
                self.store.set(self.name, "1")
            if part.rank == 1 and here == self.hold and self.came is None:
                self._hold()
            return function(conv, split, part, rows, *tensors)

        return run

    def _hold(self):
        try:
            self.store.wait([self.name], timedelta(seconds=self.patience))
            self.came = True
        except RuntimeError:
            self.came = False


def gates(data, owner, cases):
    """Whether rank 0 came to `until` while rank 1 was held in `hold`.

    Each case: schedule, staleness, steps before, hold, until, expected.
    """
    found = []
    for number, (schedule, staleness, before, hold, until, expected) in enumerate(cases):
        model = make("sage", data.x.size(1), 8, 3, 3)
        with PartitionParallel(model, data, owner, schedule=schedule, staleness=staleness, timeout=30.0) as parts:
            for _ in range(before):
                parts.step()
            with Gate(hold, until, f"gate{number}", 20.0 if expected else 0.5) as gate:
                parts.step()
        found.append(gate.came)
    return found


def timelines(data, owner, link, staleness):
    """The events of two steps under each schedule."""
    found = {}
    for micro in ("sync", "async"):
        for macro in ("sync", "async"):
            schedule = Schedule(micro, macro)
            model = make("sage", data.x.size(1), 8, 3, 3)
            with PartitionParallel(model, data, owner, schedule=schedule, link=link, staleness=staleness) as parts:
                losses = [parts.step() for _ in range(2)]
            found[micro, macro] = (losses, list(parts.timeline.events), parts.traffic)  # closed: all has landed
    return found
