"""What a machine can do, measured or given: the numbers that turn counted work into time.

`probe()` measures this machine in a few seconds, once per CPU, thread count and version, and keeps the result beside
the tuner's. A file with the same fields describes a machine one does not have.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.bench import machine as facts
from stretto.errors import expect
from stretto.tune import machine as tuned
from stretto.tune import store

logger = logging.getLogger("stretto")

KIND = "analysis-2"
BUSY = 0.75  # share of the cores that others may take before a measurement is doubted
ROWS = (4, 64, 256, 1024)  # bytes of a gathered row
SPANS = (1 << 17, 1 << 22, 1 << 26)  # bytes the rows are spread over
STREAMS = (1 << 16, 1 << 20, 1 << 24, 1 << 27)  # bytes moved by an elementwise op


@dataclass
class Machine:
    """Rates are per second. Curves are lists of (size, rate), looked up by the nearest size on a log scale."""

    name: str = "this machine"
    device: str = "cpu"
    threads: int = 1
    memory: float = 8e9
    launch: float = 2e-6  # seconds of one op that does nothing
    host: float = 1e-5  # seconds of Python and autograd around an op of a model
    gemm: list[tuple[float, float]] = field(default_factory=lambda: [(1e6, 2e10), (1e9, 5e10)])  # (flops, flop/s)
    stream: list[tuple[float, float]] = field(default_factory=lambda: [(1e5, 2e10), (1e8, 1e10)])  # (bytes, byte/s)
    gather: list[tuple[float, float, float]] = field(default_factory=lambda: [(256, 1e7, 5e9)])  # (row, span, byte/s)
    scatter: list[tuple[float, float, float]] = field(default_factory=lambda: [(256, 1e7, 1e9)])
    fresh: float = 4e9  # byte/s of writing memory the process did not have before: the system clears it page by page
    reduce: float = 5e9  # byte/s of a reduction
    sort: float = 2e7  # elements/s
    exp: float = 1e9  # elements/s of softmax and its like
    spmm: list[tuple[float, float, float]] = field(default_factory=lambda: [(256, 1e7, 8e9)])  # (row, span, byte/s)
    link_latency: float = 2e-5  # seconds of one message between workers
    link_bandwidth: float = 1e9  # byte/s between two workers
    workers: int = 1  # workers that can run at once here
    busy: float = 0.0  # load of the system while it was measured; a busy machine looks slower than it is

    def to_dict(self) -> dict[str, Any]:
        """As it is written to a file."""
        return asdict(self)

    @staticmethod
    def load(path: str | Path) -> Machine:
        """A machine from its JSON file."""
        file = Path(path)
        expect(file.is_file(), f"analyze: no machine file {str(file)!r}")
        content = json.loads(file.read_text())
        known = {f.name for f in fields(Machine)}
        for name in content:
            expect(
                name in known, f"analyze: machine file {file.name!r} has {name!r}, wanted of {', '.join(sorted(known))}"
            )
        return Machine(**content)

    def save(self, path: str | Path) -> None:
        """Write the machine file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def near(curve: Any, size: float) -> float:
    """The rate at the nearest size of [(size, rate)], on a log scale, linear in between."""
    points = sorted((math.log(max(s, 1.0)), r) for s, r in curve)
    at = math.log(max(size, 1.0))
    if at <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if at <= high:
            return first + (second - first) * (at - low) / (high - low)
    return points[-1][1]


def near_row(curve: Any, row: float, span: float) -> float:
    """The rate of [(row, span, rate)] at the nearest span, between rows as in `near`."""
    spans = sorted({s for _, s, _ in curve})
    closest = min(spans, key=lambda s: abs(math.log(max(s, 1.0)) - math.log(max(span, 1.0))))
    return near([(r, rate) for r, s, rate in curve if s == closest], row)


def get(machine: Machine | str | Path = "auto", *, again: bool = False) -> Machine:
    """A Machine: given, from a file, or this one ("auto": measured once and kept; again: measured now)."""
    if isinstance(machine, Machine):
        return machine
    if str(machine) != "auto":
        return Machine.load(machine)
    about = {**tuned.describe(), "analysis": KIND}
    kept = {} if again else store.read(KIND, about)
    found = Machine(**kept["machine"]) if "machine" in kept else probe()
    if "machine" not in kept:
        store.add(KIND, about, {"machine": found.to_dict()})
    if found.busy > BUSY * facts.cores():
        logger.warning("stretto: this machine was busy when it was measured (load %.1f): measure again", found.busy)
    return found


def _best(call: Callable[[], Any], seconds: float = 0.03) -> float:
    """Seconds of one call: the fastest of as many as fit in the time, at least eight. Whatever else runs only slows."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 8 or (time.perf_counter() < end and len(samples) < 200):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return min(samples)


def probe(threads: int | None = None) -> Machine:
    """Measure this machine with `threads` threads (None: as many as torch uses now)."""
    before = torch.get_num_threads()
    if threads is not None:
        expect(threads >= 1, f"analyze: 'threads' is {threads}, wanted at least 1")
        torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            return _probe()
    finally:
        torch.set_num_threads(before)


def _probe() -> Machine:
    tiny = torch.ones(4)
    machine = Machine(
        name=tuned.cpu_model(),
        threads=torch.get_num_threads(),
        memory=float(facts.memory_bytes() or 8e9),
        launch=_best(lambda: tiny + tiny),
        workers=facts.cores(),
        busy=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
    )
    machine.host = _host()
    machine.gemm = [(2.0 * n * k * c, 2.0 * n * k * c / _gemm(n, k, c)) for n, k, c in GEMMS]
    machine.stream = [(float(3 * size), 3 * size / _stream(size)) for size in STREAMS]
    machine.gather, machine.scatter, machine.spmm = [], [], []
    for span in SPANS:
        for row in ROWS:
            table, index, out = _rows(row, span)
            moved = float(index.numel() * row)
            machine.gather.append((row, span, moved / _gather(table, index)))
            machine.scatter.append((row, span, moved / _scatter(table, index, out)))
            machine.spmm.append((row, span, moved / _spmm(table, index)))
    machine.fresh = FRESH / _best(lambda: torch.ones(FRESH // 4))
    wide = torch.ones(1 << 20)
    machine.reduce = 4 * wide.numel() / _best(lambda: wide.view(1024, 1024).sum(0))
    machine.exp = wide.numel() / _best(lambda: F.log_softmax(wide.view(-1, 16), 1))
    keys = torch.randint(1 << 20, (1 << 16,))
    machine.sort = keys.numel() / _best(lambda: keys.sort())
    return machine


COLD = 1 << 26  # bytes that operands are spread over
FRESH = 1 << 26  # bytes; above 32 MiB an allocation is new memory every time
GEMMS = ((64, 16, 16), (1024, 64, 16), (4096, 64, 64), (16384, 256, 64), (2048, 1024, 256))


def _gemm(n: int, k: int, c: int) -> float:
    a, b = torch.ones(n, k), torch.ones(k, c)
    return _best(lambda: a @ b)


def _stream(size: int) -> float:
    """Seconds of a sum of `size` bytes. Buffers take turns: in a model an op rarely finds its operands in the cache."""
    turns = itertools.cycle([torch.ones(3, size // 4) for _ in range(max(1, min(32, COLD // (3 * size))))])

    def add() -> None:
        a, b, out = next(turns)
        torch.add(a, b, out=out)

    return _best(add)


MOVED = 1 << 22  # bytes of rows in one call: enough that the call itself does not count


def _rows(row: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """A table of `span` bytes in rows, random places in it, an accumulator."""
    count = max(1, span // row)
    table = torch.ones(count, max(1, row // 4))
    return table, torch.randint(count, (MOVED // row,)), torch.zeros_like(table)


def _gather(table: Tensor, index: Tensor) -> float:
    return _best(lambda: table.index_select(0, index))


def _scatter(table: Tensor, index: Tensor, out: Tensor) -> float:
    where, source = index[:, None].expand(-1, table.shape[1]), torch.ones(index.numel(), table.shape[1])
    return _best(lambda: out.scatter_add_(0, where, source))


def _spmm(table: Tensor, index: Tensor) -> float:
    """Seconds of our spmm reading one row of the table per entry, 8 entries a row."""
    from stretto.graph import Graph
    from stretto.ops import spmm

    entries = index.numel() // 8 * 8
    if not entries:
        return _best(lambda: table.index_select(0, index))
    rows = torch.arange(entries // 8).repeat_interleave(8)
    graph = Graph.of(torch.stack([index[:entries], rows]), (table.shape[0], entries // 8))
    return _best(lambda: spmm(graph, table)) * index.numel() / entries


def _host() -> float:
    """Seconds around one op of a model: a step of a tiny GNN, less what its ops take, over its ops."""
    from stretto.analyze.models import make
    from stretto.analyze.workload import Workload

    class Data:
        x = torch.randn(8, 4)
        edge_index = torch.arange(8).repeat(2, 1)
        num_nodes = 8

    work = Workload(make("gcn", 4, 4, 4), Data())
    with torch.enable_grad():
        launches = work.trace().launches
        return _best(work.run, 0.1) / launches
