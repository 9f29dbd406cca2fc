"""What the loader's benchmarks share: the setting, a line of the table, the graph with random columns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.suites import results
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


AMOUNTS = {"bytes held": "MB", "nodes": "nodes"}  # measured as the work of a row, not its time -> unit of the result
CEILINGS = ("reading alone", "writing alone")  # what nobody can do without: no rivals


def to_row(lines: list[Row], setting: Setting, command: str) -> results.Row:
    """The lines of one measure, as they are written down. Stock: the fastest of PyG's own ways to do it."""
    timed = {line.candidate: line for line in lines if line.timing is not None and not line.published}
    unit = AMOUNTS.get(lines[0].unit, "ms")
    measured = {name: _figure(line, unit) for name, line in timed.items()}
    ours = OURS if OURS in measured else next((name for name in measured if name.startswith("labor")), OURS)
    beside = [name for name in measured if name.startswith(OURS) or name in CEILINGS]
    more: dict[str, object] = {f"{name} {unit}": measured[name][0] for name in beside if name != ours}
    if ours in timed and unit == "ms":
        more |= {"work": timed[ours].work, "work_unit": timed[ours].unit}
    return results.row(
        "loader", {"measure": lines[0].measure, "graph": setting.graph, "batch": setting.batch}, measured,
        command=command, threads=setting.threads, unit=unit, ours=ours,
        stock=min(filter(_is_stock, measured), key=lambda name: measured[name][0], default=""),
        rivals=[name for name in measured if not name.startswith((OURS, "labor")) and name not in CEILINGS],
        note="; ".join(f"{line.candidate}: {line.reason}" for line in lines if line.reason),
        more=more,
    )  # fmt: skip


def _is_stock(candidate: str) -> bool:
    """Whether it is PyG's own way; its loader over our sampler, and layers cut by hand, are not."""
    its_own = not candidate.endswith("trim_to_layer") and "our sampler" not in candidate
    return candidate == "uniform" or (candidate.startswith(("PyG", "stock")) and its_own)


def _figure(line: Row, unit: str) -> results.Figure:
    assert line.timing is not None
    if unit == "ms":
        return results.figure(line.timing)
    amount = line.work / (1e6 if unit == "MB" else 1.0)
    return amount, amount, amount


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
