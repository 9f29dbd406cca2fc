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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto import memory
from stretto.analyze import peaks
from stretto.analyze.clock import by_wall, call_clock, work_clock
from stretto.analyze.machine_file import Machine
from stretto.bench import machine as facts
from stretto.errors import expect
from stretto.graph import Graph
from stretto.kernels import tall
from stretto.ops import attention, spmm, tall_product
from stretto.tune import machine as tuned

softmax_grad = torch.ops.aten._log_softmax_backward_data
ROWS = (4, 32, 256, 1024)  # bytes of a gathered row
WIDTHS = (4, 8, 16, 64)  # of a softmax
SUMS = (16, 64, 256, 1024)  # bytes of one sum along the last dimension
HEADS, DEGREE = 4, 8
SUMMED = 4  # times as many rows as are read are added up, so that those of 32 bytes are beyond a cache, too


@dataclass(frozen=True)
class Sizes:
    """How much is moved to measure a device: some of it in its caches, some of it beyond."""

    spans: tuple[int, ...]  # bytes the rows are spread over (_added: of a processor's sums, those added)
    streams: tuple[int, ...]  # bytes of each operand of an elementwise op
    touched: tuple[int, ...]  # bytes of other work between two calls
    gemms: tuple[tuple[int, int, int], ...]  # rows, inner, columns
    moved: int  # at most so many bytes of rows in one call
    entries: int  # and so many rows
    operand: int  # values of what the caches are measured with
    fresh: int  # bytes; above 32 MiB an allocation is new memory every time
    edges: int
    tall: tuple[int, int]  # rows of what is summed over rows
    values: int  # of sums, softmax and masks


NARROW = ((512, 64, 7), (16384, 64, 7), (16384, 256, 7), (64, 64, 64), (4096, 64, 64), (16384, 256, 64),
          (2048, 1024, 64), (1024, 256, 256), (4096, 512, 256))  # fmt: skip
PROCESSOR = Sizes(
    spans=(1 << 17, 1 << 22, 1 << 24, 1 << 26),
    streams=(1 << 16, 1 << 20, 1 << 22, 1 << 24),
    touched=(1 << 20, 1 << 22, 1 << 24, 1 << 25, 1 << 26, 1 << 27),
    gemms=NARROW,
    moved=1 << 22,
    entries=1 << 17,
    operand=1 << 16,
    fresh=1 << 26,
    edges=1 << 15,
    tall=(1 << 10, 1 << 14),
    values=1 << 20,
)
CARD = Sizes(
    spans=(1 << 20, 1 << 24, 1 << 29),
    streams=(1 << 16, 1 << 20, 1 << 24, 1 << 27, 1 << 29),
    touched=(1 << 20, 1 << 23, 1 << 25, 1 << 26, 1 << 27, 1 << 28),
    gemms=(*NARROW, (1 << 17, 256, 64), (1 << 17, 256, 256), (1 << 20, 128, 128), (8192, 1024, 1024)),
    moved=1 << 28,
    entries=1 << 20,
    operand=1 << 21,
    fresh=1 << 28,
    edges=1 << 20,
    tall=(1 << 12, 1 << 20),
    values=1 << 24,
)
TINY = ("gcn", "sage", "gat")  # models whose steps on eight nodes are host code alone
LEAST, SECONDS = 7, 0.025  # samples of a rate, and the time for more of them


def typical(
    call: Callable[[], Any],
    *,
    before: Callable[[], Any] | None = None,
    seconds: float = SECONDS,
    clock: Callable[[Callable[[], Any]], float] = by_wall,
) -> float:
    """Median seconds of one call. before: what runs between two calls, off the clock."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < LEAST or (time.perf_counter() < end and len(samples) < 200):
        if before is not None:
            before()
        samples.append(clock(call))
    return statistics.median(samples)


def probe(threads: int | None = None, device: torch.device | str = "cpu") -> Machine:
    """Measure this machine with `threads` threads (None: as many as torch uses now), or its card; about ten seconds."""
    before, kept = torch.get_num_threads(), memory.is_kept()
    if threads is not None:
        expect(threads >= 1, f"analyze: 'threads' is {threads}, wanted at least 1")
        torch.set_num_threads(threads)
    memory.switch(False)  # new memory is part of what is measured
    try:
        with torch.no_grad():
            return _Probe(torch.device(device)).machine()
    finally:
        memory.switch(kept)
        torch.set_num_threads(before)


class _Probe:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.card = device.type == "cuda"
        self.sizes = CARD if self.card else PROCESSOR
        self.clock = work_clock(device)
        self.other = self.ones(self.sizes.touched[-1] // 4)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)

    def places(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, device=self.device)

    def touch(self, size: int | None = None) -> None:
        """Read and write so many bytes; None: more than stays in any cache."""
        (self.other if size is None else self.other[: size // 4]).add_(1)

    def seconds(self, call: Callable[[], Any], **options: Any) -> float:
        return typical(call, clock=self.clock, **options)

    def rates(self, amount: float, call: Callable[[], Any]) -> tuple[float, float]:
        """Amount per second, near and far. Nothing is faster from afar: where it seems so, the clock was unsteady."""
        near = amount / self.seconds(call)
        return near, min(near, amount / self.seconds(call, before=self.touch, seconds=0.0))

    def machine(self) -> Machine:
        tiny, sizes = self.ones(4), self.sizes
        found = Machine(
            name=torch.cuda.get_device_name(self.device) if self.card else tuned.cpu_model(),
            device=self.device.type,
            threads=torch.get_num_threads(),
            memory=self._memory(),
            launch=typical(lambda: tiny + tiny, clock=call_clock(self.device)),
            workers=torch.cuda.device_count() if self.card else max(1, facts.cores() // torch.get_num_threads()),
            busy=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        found.cache = self._cache()
        found.stream = [(3.0 * size, *self._stream(size)) for size in sizes.streams]
        self._products(found)
        self._rows(found)
        self._attention(found)
        self._within_rows(found)
        found.fresh = sizes.fresh / self.seconds(lambda: self.ones(sizes.fresh // 4))
        keys = self.places(1 << 20, 1 << 16)
        found.sort = keys.numel() / self.seconds(lambda: keys.sort())
        drawn = torch.empty(keys.numel(), device=self.device)
        found.draw = keys.numel() / self.seconds(lambda: drawn.bernoulli_(0.5))
        peaks.measure(found)
        found.host, found.host_far, found.kernel, found.kernel_far = self._host()  # last: it keeps freed memory
        return found

    def _memory(self) -> float:
        if self.card:
            return float(torch.cuda.get_device_properties(self.device).total_memory)
        return float(facts.memory_bytes() or 8e9)

    def _cache(self) -> list[tuple[float, ...]]:
        """How far a small operand has gone after so much other work: 0 as near as can be, 1 all the way."""
        a, out, threads = self.ones(self.sizes.operand), self.ones(self.sizes.operand), torch.get_num_threads()
        torch.set_num_threads(1)  # waking a second thread costs as much as the memory here
        try:
            near = self.seconds(lambda: torch.add(a, a, out=out))
            taken = [
                self.seconds(lambda: torch.add(a, a, out=out), before=lambda size=size: self.touch(size))
                for size in self.sizes.touched
            ]
        finally:
            torch.set_num_threads(threads)
        near, most = min(near, *taken), max(taken)
        shares = [(seconds - near) / max(most - near, 1e-9) for seconds in taken]
        return [(float(size), max(shares[: i + 1])) for i, size in enumerate(self.sizes.touched)]

    def _stream(self, size: int) -> tuple[float, float]:
        a, b, out = self.ones(3, size // 4)
        return self.rates(3.0 * size, lambda: torch.add(a, b, out=out))

    def _products(self, found: Machine) -> None:
        """A linear layer, x W', and the gradient of its weight, half of each; by torch, and by whom accelerated layers
        call. Few columns are seven, as of classes: no vector is full of them."""
        torchs: list[tuple[float, ...]] = []
        own: list[tuple[float, ...]] = []
        for n, k, c in self.sizes.gemms:
            x, weight, grad = self.ones(n, k), self.ones(c, k), self.ones(n, c)
            by_torch = self._linear(torch.mm, x, weight, grad)
            point = 2.0 * n * k * c, float(min(n, k, c))
            torchs.append((*point, *by_torch))
            if self.card or n * k * c < tall_product.LEAST_WORK:
                own.append((*point, *by_torch))
            elif n >= tall.TALL:  # what is not is no example of it
                own.append((*point, *self._linear(_chosen, x, weight, grad)))
        found.gemm, found.own_gemm = torchs, own

    def _linear(
        self, multiply: Callable[[Tensor, Tensor], Any], x: Tensor, weight: Tensor, grad: Tensor
    ) -> list[float]:
        """Flop/s, near and far."""
        calls = (lambda: multiply(x, weight.t()), lambda: multiply(grad.t(), x))
        rates = [self.rates(2.0 * x.numel() * weight.size(0), call) for call in calls]
        return [statistics.harmonic_mean(way) for way in zip(*rates, strict=True)]

    def _rows(self, found: Machine) -> None:
        """Rows at random places: read, added up, reduced by max, and read by a sparse product."""
        tables: dict[str, list[tuple[float, ...]]] = {"gather": [], "scatter": [], "scatter_max": [], "spmm": []}
        sizes = self.sizes
        for span in sizes.spans:
            for row in ROWS:
                count = max(1, span // row)
                table = self.ones(count, row // 4)
                index = self.places(count, min(sizes.moved // row, sizes.entries))
                total, where, source = self._added(count, row // 4, index)
                calls: dict[str, tuple[Tensor, Callable[[], Any]]] = {
                    "gather": (index, partial(table.index_select, 0, index)),
                    "scatter": (source, partial(total.scatter_add_, 0, where, source)),
                    "spmm": (index, _product(table, index)),
                }
                if span == sizes.spans[1]:
                    calls["scatter_max"] = source, partial(total.scatter_reduce_, 0, where, source, "amax")
                for name, (rows, call) in calls.items():
                    tables[name].append((float(row), float(span), *self.rates(float(rows.size(0) * row), call)))
        for name, points in tables.items():
            setattr(found, name, points)

    def _added(self, count: int, width: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums, where the rows of a source go, and the source. A card adds rows up in order, wherever in the table that
        is; a processor sorts them by their sums first, so that the source is what it reads at random places."""
        if not self.card:
            rows = min(count, SUMMED * self.sizes.entries)
            count = max(1, rows // DEGREE)
            index = self.places(count, rows)
        source = self.ones(index.numel(), width)
        return self.ones(count, width), index[:, None].expand_as(source), source

    def _attention(self, found: Machine) -> None:
        """The fused kernel, forward and both ways, for narrow and wide heads."""
        edges, device = self.sizes.edges, self.device
        n = edges // DEGREE
        graph = Graph.of(self.places(n, 2, edges), n)
        left, right = torch.randn(n, HEADS, device=device), torch.randn(n, HEADS, device=device)
        ahead_points: list[tuple[float, ...]] = []
        back_points: list[tuple[float, ...]] = []
        for width in (8, 64):
            value = torch.randn(n, HEADS, width, requires_grad=True, device=device)
            per_edge = _attention_flops(graph, value, left, right) / edges

            def forward(value: Tensor = value) -> Any:
                return attention(graph, value, left, right)

            def both(value: Tensor = value) -> Any:
                with torch.enable_grad():
                    out = attention(graph, value, left, right)
                    return torch.autograd.grad(out, value, out.detach())  # type: ignore[union-attr]

            ahead, whole = self.rates(1.0, forward), self.rates(1.0, both)
            back = [1 / max(1 / w - 1 / a, 1e-9) for w, a in zip(whole, ahead, strict=True)]
            ahead_points.append((per_edge, *(per_edge * edges * rate for rate in ahead)))
            back_points.append((2 * per_edge, *(2 * per_edge * edges * rate for rate in back)))
        found.attention, found.attention_grad = ahead_points, back_points

    def _within_rows(self, found: Machine) -> None:
        """Sums, softmax, masks: what depends on how long a row is."""
        tall = [self.ones(rows, 64) for rows in self.sizes.tall]
        found.reduce = [(4.0 * t.numel(), *self.rates(4.0 * t.numel(), lambda t=t: t.sum(0))) for t in tall]  # type: ignore[misc]
        flat = self.ones(self.sizes.values)
        part = flat[: self.sizes.values >> 4]
        found.reduce_last = [
            (float(size), *self.rates(4.0 * flat.numel(), lambda size=size: flat.view(-1, size // 4).sum(-1)))  # type: ignore[misc]
            for size in SUMS
        ]
        found.softmax, found.softmax_grad = [], []
        for width in WIDTHS:
            rows = part.view(-1, width)
            done = F.log_softmax(rows, 1)
            calls = (partial(F.log_softmax, rows, 1), partial(softmax_grad, rows, done, 1, rows.dtype))
            forward, back = (self.rates(part.numel(), call) for call in calls)
            found.softmax.append((float(width), *forward))
            found.softmax_grad.append((float(width), *back))
        masks = [torch.rand(size, device=self.device) < 0.6 for size in (1 << 12, 1 << 17)]
        found.mask = [(float(m.numel()), *self.rates(m.numel(), lambda m=m: m.nonzero())) for m in masks]  # type: ignore[misc]

    def _host(self) -> tuple[float, float, float, float]:
        """Seconds around an op of tiny GNNs, near and far; and around one of our kernels, beyond an op's."""
        from stretto import accelerate
        from stretto.analyze.models import make

        stock, fast = (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
        with torch.enable_grad():
            for name in TINY:
                model = make(name, 4, 4, 4).to(self.device)
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
            x = torch.randn(8, 4, device=self.device)
            edge_index = torch.arange(8, device=self.device).repeat(2, 1)
            num_nodes = 8

        work = Workload(model, Data())
        for _ in range(LEAST):
            work.run()
        trace = work.trace(pooled=True)
        kernels = sum(op.name.startswith("stretto::") for op in trace)
        clock = call_clock(self.device)  # here it is the host that counts
        far = typical(work.run, before=self.touch, seconds=0.0, clock=clock)
        return len(trace.ops), kernels, typical(work.run, seconds=0.05, clock=clock), far


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
    ends = torch.randint(rows, index.shape, device=index.device)
    graph = Graph.of(torch.stack([index, ends]), (table.shape[0], rows))
    return lambda: spmm(graph, table)


def _attention_flops(graph: Graph, value: Tensor, left: Tensor, right: Tensor) -> float:
    from stretto.ops import OPS

    return float(OPS["attention"].flops(graph, value, left, right, None, form="gat"))
