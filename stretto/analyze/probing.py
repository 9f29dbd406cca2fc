"""Measure this machine: every ceiling of the machine file, near and far, in the way a model meets it.

Each rate is the median of several calls, since that is what a step is made of; the fastest call would be a ceiling that
only a lucky moment reaches. "Near" repeats a call at once. "Far" touches more memory than a process may count on in any
cache before each call, so that operands, code and objects come from memory, as they do inside a large step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto import memory
from stretto.analyze import peaks
from stretto.analyze.machine_file import Machine
from stretto.bench import machine as facts
from stretto.errors import expect
from stretto.graph import Graph
from stretto.kernels import tall
from stretto.ops import attention, spmm, tall_product
from stretto.tune import machine as tuned

ROWS = (4, 32, 256, 1024)  # bytes of a gathered row
SPANS = (1 << 17, 1 << 22, 1 << 26)  # bytes the rows are spread over
STREAMS = (1 << 16, 1 << 20, 1 << 22, 1 << 24)  # bytes of each operand of an elementwise op
TOUCHED = (1 << 20, 1 << 22, 1 << 24, 1 << 25, 1 << 26, 1 << 27)  # bytes of other work between two calls
GEMMS = (  # rows, inner, columns
    (512, 64, 8), (16384, 64, 8), (16384, 256, 8), (64, 64, 64), (4096, 64, 64), (16384, 256, 64), (2048, 1024, 64),
    (1024, 256, 256), (4096, 512, 256),
)  # fmt: skip
WIDTHS = (4, 8, 16, 64)  # of a softmax
SUMS = (16, 64, 256, 1024)  # bytes of one sum along the last dimension
MOVED, ENTRIES = 1 << 22, 1 << 17  # at most so many bytes of rows in one call, and so many rows
FRESH = 1 << 26  # bytes; above 32 MiB an allocation is new memory every time
EDGES, HEADS, DEGREE = 1 << 15, 4, 8
TINY = ("gcn", "sage", "gat")  # models whose steps on eight nodes are host code alone
LEAST, SECONDS = 7, 0.025  # samples of a rate, and the time for more of them


def typical(call: Callable[[], Any], *, before: Callable[[], Any] | None = None, seconds: float = SECONDS) -> float:
    """Median seconds of one call. before: what runs between two calls, off the clock."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < LEAST or (time.perf_counter() < end and len(samples) < 200):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def probe(threads: int | None = None) -> Machine:
    """Measure this machine with `threads` threads (None: as many as torch uses now), in about ten seconds."""
    before, kept = torch.get_num_threads(), memory.is_kept()
    if threads is not None:
        expect(threads >= 1, f"analyze: 'threads' is {threads}, wanted at least 1")
        torch.set_num_threads(threads)
    memory.switch(False)  # new memory is part of what is measured
    try:
        with torch.no_grad():
            return _Probe().machine()
    finally:
        memory.switch(kept)
        torch.set_num_threads(before)


class _Probe:
    def __init__(self) -> None:
        self.other = torch.ones(TOUCHED[-1] // 4)

    def touch(self, size: int | None = None) -> None:
        """Read and write so many bytes; None: more than stays in any cache."""
        (self.other if size is None else self.other[: size // 4]).add_(1)

    def rates(self, amount: float, call: Callable[[], Any]) -> tuple[float, float]:
        """Amount per second, near and far. Nothing is faster from afar: where it seems so, the clock was unsteady."""
        near = amount / typical(call)
        return near, min(near, amount / typical(call, before=self.touch, seconds=0.0))

    def machine(self) -> Machine:
        tiny = torch.ones(4)
        found = Machine(
            name=tuned.cpu_model(),
            threads=torch.get_num_threads(),
            memory=float(facts.memory_bytes() or 8e9),
            launch=typical(lambda: tiny + tiny),
            workers=facts.cores(),
            busy=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        found.cache = self._cache()
        found.stream = [(3.0 * size, *self._stream(size)) for size in STREAMS]
        self._products(found)
        self._rows(found)
        self._attention(found)
        self._within_rows(found)
        found.fresh = FRESH / typical(lambda: torch.ones(FRESH // 4))
        keys = torch.randint(1 << 20, (1 << 16,))
        found.sort = keys.numel() / typical(lambda: keys.sort())
        found.draw = keys.numel() / typical(lambda: torch.empty(keys.numel()).bernoulli_(0.5))
        peaks.measure(found)
        found.host, found.host_far, found.kernel, found.kernel_far = self._host()  # last: it keeps freed memory
        return found

    def _cache(self) -> list[tuple[float, ...]]:
        """How far a small operand has gone after so much other work: 0 as near as can be, 1 all the way."""
        a, out, threads = torch.ones(1 << 16), torch.ones(1 << 16), torch.get_num_threads()
        torch.set_num_threads(1)  # waking a second thread costs as much as the memory here
        try:
            near = typical(lambda: torch.add(a, a, out=out))
            taken = [
                typical(lambda: torch.add(a, a, out=out), before=lambda size=size: self.touch(size))  # type: ignore[misc]
                for size in TOUCHED
            ]
        finally:
            torch.set_num_threads(threads)
        near, most = min(near, *taken), max(taken)
        shares = [(seconds - near) / max(most - near, 1e-9) for seconds in taken]
        return [(float(size), max(shares[: i + 1])) for i, size in enumerate(TOUCHED)]

    def _stream(self, size: int) -> tuple[float, float]:
        a, b, out = torch.ones(3, size // 4)
        return self.rates(3.0 * size, lambda: torch.add(a, b, out=out))

    def _products(self, found: Machine) -> None:
        """Tall times small, and the small results of its gradient, half of each; by torch, and by whom accelerated
        layers call."""
        torchs: list[tuple[float, ...]] = []
        own: list[tuple[float, ...]] = []
        for n, k, c in GEMMS:
            a, b, grad = torch.ones(n, k), torch.ones(k, c), torch.ones(n, c)
            by_torch = self._both_ways(torch.mm, a, b, grad)
            ours = n * k * c >= tall_product.LEAST_WORK and n >= tall.TALL
            point = 2.0 * n * k * c, float(min(n, k, c))
            torchs.append((*point, *by_torch))
            own.append((*point, *(self._both_ways(_chosen, a, b, grad) if ours else by_torch)))
        found.gemm, found.own_gemm = torchs, own

    def _both_ways(self, multiply: Callable[[Tensor, Tensor], Any], a: Tensor, b: Tensor, grad: Tensor) -> list[float]:
        """Flop/s, near and far."""
        flops = 2.0 * a.numel() * b.size(1)
        forward = self.rates(flops, lambda: multiply(a, b))
        weight = self.rates(flops, lambda: multiply(a.t(), grad))
        return [2 / (1 / x + 1 / y) for x, y in zip(forward, weight, strict=True)]

    def _rows(self, found: Machine) -> None:
        """Rows at random places: read, added up, reduced by max, and read by a sparse product."""
        tables: dict[str, list[tuple[float, ...]]] = {"gather": [], "scatter": [], "scatter_max": [], "spmm": []}
        for span in SPANS:
            for row in ROWS:
                count = max(1, span // row)
                table = torch.ones(count, row // 4)
                index = torch.randint(count, (min(MOVED // row, ENTRIES),))
                moved = float(index.numel() * row)
                source = torch.ones(index.numel(), table.shape[1])
                where = index[:, None].expand_as(source)
                calls: dict[str, Callable[[], Any]] = {
                    "gather": lambda table=table, index=index: table.index_select(0, index),  # type: ignore[misc]
                    "scatter": lambda table=table, where=where, source=source: table.scatter_add_(0, where, source),  # type: ignore[misc]
                    "spmm": _product(table, index),
                }
                if span == SPANS[1]:
                    calls["scatter_max"] = lambda table=table, where=where, source=source: table.scatter_reduce_(  # type: ignore[misc]
                        0, where, source, "amax"
                    )
                for name, call in calls.items():
                    tables[name].append((float(row), float(span), *self.rates(moved, call)))
        for name, points in tables.items():
            setattr(found, name, points)

    def _attention(self, found: Machine) -> None:
        """The fused kernel, forward and both ways, for narrow and wide heads."""
        n = EDGES // DEGREE
        graph = Graph.of(torch.randint(n, (2, EDGES)), n)
        left, right = torch.randn(n, HEADS), torch.randn(n, HEADS)
        ahead_points: list[tuple[float, ...]] = []
        back_points: list[tuple[float, ...]] = []
        for width in (8, 64):
            value = torch.randn(n, HEADS, width, requires_grad=True)
            per_edge = _attention_flops(graph, value, left, right) / EDGES

            def forward(value: Tensor = value) -> Any:
                return attention(graph, value, left, right)

            def both(value: Tensor = value) -> Any:
                with torch.enable_grad():
                    out = attention(graph, value, left, right)
                    return torch.autograd.grad(out, value, out.detach())  # type: ignore[union-attr]

            ahead, whole = self.rates(1.0, forward), self.rates(1.0, both)
            back = [1 / max(1 / w - 1 / a, 1e-9) for w, a in zip(whole, ahead, strict=True)]
            ahead_points.append((per_edge, *(per_edge * EDGES * rate for rate in ahead)))
            back_points.append((2 * per_edge, *(2 * per_edge * EDGES * rate for rate in back)))
        found.attention, found.attention_grad = ahead_points, back_points

    def _within_rows(self, found: Machine) -> None:
        """Sums, softmax, masks: what depends on how long a row is."""
        tall = [torch.ones(rows, 64) for rows in (1 << 10, 1 << 14)]
        found.reduce = [(4.0 * t.numel(), *self.rates(4.0 * t.numel(), lambda t=t: t.sum(0))) for t in tall]  # type: ignore[misc]
        flat = torch.ones(1 << 20)
        found.reduce_last = [
            (float(size), *self.rates(4.0 * flat.numel(), lambda size=size: flat.view(-1, size // 4).sum(-1)))  # type: ignore[misc]
            for size in SUMS
        ]
        found.softmax = [
            (float(width), *self.rates(1 << 16, lambda width=width: F.log_softmax(flat[: 1 << 16].view(-1, width), 1)))  # type: ignore[misc]
            for width in WIDTHS
        ]
        masks = [torch.rand(size) < 0.6 for size in (1 << 12, 1 << 17)]
        found.mask = [(float(m.numel()), *self.rates(m.numel(), lambda m=m: m.nonzero())) for m in masks]  # type: ignore[misc]

    def _host(self) -> tuple[float, float, float, float]:
        """Seconds around an op of tiny GNNs, near and far; and around one of our kernels, beyond an op's."""
        from stretto import accelerate
        from stretto.analyze.models import make

        stock, fast = (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
        with torch.enable_grad():
            for name in TINY:
                model = make(name, 4, 4, 4)
                stock = _sum(stock, self._tiny(model))
                fast = _sum(fast, self._tiny(accelerate(model)))
        ops, _, near, far = stock
        fast_ops, kernels, fast_near, fast_far = fast
        host, host_far = near / ops, max(near, far) / ops
        if not kernels:
            return host, host_far, 0.0, 0.0
        beyond = max(0.0, fast_near - fast_ops * host) / kernels
        return host, host_far, beyond, max(beyond, (fast_far - fast_ops * host_far) / kernels)

    def _tiny(self, model: nn.Module) -> tuple[float, float, float, float]:
        """Ops and kernels of a step on a graph of eight nodes, and its seconds, near and far."""
        from stretto.analyze.workload import Workload

        class Data:
            x = torch.randn(8, 4)
            edge_index = torch.arange(8).repeat(2, 1)
            num_nodes = 8

        work = Workload(model, Data())
        for _ in range(LEAST):
            work.run()
        trace = work.trace(pooled=True)
        kernels = sum(op.name.startswith("stretto::") for op in trace)
        far = typical(work.run, before=self.touch, seconds=0.0)
        return len(trace.ops), kernels, typical(work.run, seconds=0.05), far


def _sum(first: tuple[float, ...], second: tuple[float, ...]) -> tuple[float, float, float, float]:
    a, b, c, d = (x + y for x, y in zip(first, second, strict=True))
    return a, b, c, d


def _chosen(x: Tensor, w: Tensor) -> Tensor:
    """The product by whichever is faster here, torch or our kernel."""
    return tall_product.tall_product(x, w, None, None, 1.0)


def _product(table: Tensor, index: Tensor) -> Callable[[], Any]:
    """Our spmm, which reads one row of the table per entry; entries are spread over rows at random, 8 each on average.

    Rows of equal length would be kinder than any graph: the processor learns where they end.
    """
    rows = max(1, index.numel() // DEGREE)
    graph = Graph.of(torch.stack([index, torch.randint(rows, index.shape)]), (table.shape[0], rows))
    return lambda: spmm(graph, table)


def _attention_flops(graph: Graph, value: Tensor, left: Tensor, right: Tensor) -> float:
    from stretto.ops import OPS

    return float(OPS["attention"].flops(graph, value, left, right, None, form="gat"))
