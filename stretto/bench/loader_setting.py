"""What the loader's benchmarks share: the setting, a line of the table, the graph with random columns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from stretto.datasets import load_graph
from stretto.machine.timing import Timing

OURS = "stretto"
# What PyG with pyg-lib 0.9.0 took on another machine (2 cores at 2.8 GHz, AVX-512, 48 MiB L3), milliseconds and edges a
# batch: graph rmat:19:7000000, batch 1024. Shown, never compared, where pyg-lib does not load.
PUBLISHED = {
    "sampling [15, 10, 5], batch 1024": (37.2, 128e3),
    "sampling [20, 20, 20]": (114.8, 665e3),
    "whole loader, 2 threads": (38.3, 128e3),
}


@dataclass
class Setting:
    """What is measured: the graph, the fan-out, and how many batches of how many seeds make one sample."""

    data: Any  # a torch_geometric.data.Data
    fanout: list[int]
    batch: int
    batches: int
    threads: int
    repeats: int
    graph: str = ""  # its name, for a process of its own

    @property
    def seeds(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        n = int(self.data.num_nodes or 0)
        return [torch.randint(0, n, (self.batch,), generator=generator) for _ in range(self.batches)]


@dataclass
class Row:
    """One line: seconds per batch, and the work of a batch in `unit`."""

    measure: str
    candidate: str
    timing: Timing | None
    work: float = 0.0
    unit: str = ""
    reason: str = ""
    published: bool = False  # measured elsewhere, by others: no ratio is made of it

    def to_dict(self) -> dict[str, object]:
        times = self.timing.to_dict() if self.timing is not None else {}
        rate = self.work / self.timing.median if self.timing is not None and self.work else None
        return {
            "measure": self.measure,
            "candidate": self.candidate,
            **times,
            "rate": rate,
            "work": self.work or None,
            "unit": self.unit,
            "reason": self.reason,
            "published": self.published,
        }


def make_data(graph: str, features: int) -> Data:
    """The graph with random features, labels, weights and times."""
    found = load_graph(graph)
    generator = torch.Generator().manual_seed(0)
    n, m = found.num_nodes, found.num_edges
    return Data(
        x=torch.randn(n, features, generator=generator),
        y=torch.randint(0, 16, (n,), generator=generator),
        edge_index=found.edge_index,
        num_nodes=n,
        weight=torch.rand(m, generator=generator),
        time=torch.randint(0, 1000, (n,), generator=generator),
    )


def per_batch(timing: Timing, count: int) -> Timing:
    """Seconds of one of `count` batches."""
    return Timing(tuple(s / count for s in timing.samples))


def published(measure: str, setting: Setting) -> list[Row]:
    """What is known from elsewhere of PyG with pyg-lib in this very setting, as a row that is not compared."""
    if measure not in PUBLISHED or setting.graph != "rmat:19:7000000":
        return []
    milliseconds, edges = PUBLISHED[measure]
    who = "PyG + pyg-lib: published, not run here"
    return [Row(measure, who, Timing((milliseconds / 1e3,)), edges, "edges", published=True)]
