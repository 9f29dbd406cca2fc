"""Measure this machine: every rate of the machine file, near and far, in the way a model meets it.

Each rate is the median of several calls, since that is what a step is made of; the fastest of them, which only a lucky
moment reaches, is noted as a ceiling (ceilings.py). "Near" repeats a call at once. "Far" touches more memory than a
process may count on in any cache before each call, so that operands, code and objects come from memory, as they do
inside a large step.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto import kernels
from stretto.errors import expect
from stretto.kernels import cpu, native, tall
from stretto.machine import ceilings, facts
from stretto.machine.file import Machine
from stretto.machine.rates import sparse
from stretto.machine.timing import call_clock, repeated, work_clock
from stretto.memory import allocator

softmax_grad = torch.ops.aten._log_softmax_backward_data
ROWS = (4, 32, 256, 1024)  # bytes of a gathered row
WIDTHS = (4, 8, 16, 64)  # of a softmax
SUMS = (16, 64, 256, 1024)  # bytes of one sum along the last dimension
DEGREE = 8
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
Rows = list[tuple[float, ...]]
LEAST, SECONDS = 7, 0.025  # samples of a rate, and the time for more of them
LINE = 64  # bytes of a cache line
AHEAD = (0, 8)  # rows fetched before their turn, where they are read and no more; the faster way counts
SIDES = {"cpu": 512, "cuda": 8192}  # of the square products of other types than fp32


class Rates(NamedTuple):
    """Amounts per second: again and again, after other work, and of the fastest call."""

    near: float
    far: float
    best: float


@contextmanager
def probing(threads: int | None = None, device: torch.device | str = "cpu") -> Iterator[Probe]:
    """A block that measures with `threads` threads (None: as many as torch uses now), or on a card."""
    before, saved = torch.get_num_threads(), allocator.is_kept()
    if threads is not None:
        expect(threads >= 1, f"analyze: 'threads' is {threads}, wanted at least 1")
        torch.set_num_threads(threads)
    allocator.switch(False)  # new memory is part of what is measured
    try:
        with torch.no_grad():
            yield Probe(torch.device(device))
    finally:
        allocator.switch(saved)
        torch.set_num_threads(before)


class Probe:
    """The rates of a device, measured one after the other. Every method leaves the device as it was."""

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
        """Median seconds of a call."""
        return repeated(call, least=LEAST, clock=self.clock, **{"seconds": SECONDS, **options}).median

    def rates(self, amount: float, call: Callable[[], Any]) -> Rates:
        """Amount per second. Nothing is faster from afar: where it seems so, the clock was unsteady."""
        again = repeated(call, least=LEAST, seconds=SECONDS, clock=self.clock)
        near = amount / again.median
        far = amount / self.seconds(call, before=self.touch, seconds=0.0)
        return Rates(near, min(near, far), amount / max(again.best, 1e-9))

    def machine(self) -> Machine:
        """All that this device shows by calls of its kernels."""
        tiny, sizes = self.ones(4), self.sizes
        launch = repeated(lambda: tiny + tiny, least=LEAST, seconds=SECONDS, clock=call_clock(self.device))
        result = Machine(
            name=torch.cuda.get_device_name(self.device) if self.card else facts.cpu_model(),
            device=self.device.type,
            threads=torch.get_num_threads(),
            memory=self._memory(),
            launch=launch.median,
            peak_launch=launch.best,
            workers=torch.cuda.device_count() if self.card else max(1, facts.cores() // torch.get_num_threads()),
            busy=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        )
        result.cache = self._cache()
        streams = [(3.0 * size, self._stream(size)) for size in sizes.streams]
        result.stream = [(size, *rates[:2]) for size, rates in streams]
        result.peak_stream = [(size, rates.best) for size, rates in streams]
        self._products(result)
        self._rows(result)
        self._within_rows(result)
        result.fresh = sizes.fresh / self.seconds(lambda: self.ones(sizes.fresh // 4))
        keys = self.places(1 << 20, 1 << 16)
        result.sort = keys.numel() / self.seconds(lambda: keys.sort())
        drawn = torch.empty(keys.numel(), device=self.device)
        draws = [self.rates(keys.numel(), draw) for draw in (lambda: drawn.bernoulli_(0.5), lambda: drawn.uniform_())]
        result.draw, result.peak_draw = draws[0].near, max(rates.best for rates in draws)
        return result

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
        near, maximum = min(near, *taken), max(taken)
        shares = [(seconds - near) / max(maximum - near, 1e-9) for seconds in taken]
        return [(float(size), max(shares[: i + 1])) for i, size in enumerate(self.sizes.touched)]

    def _stream(self, size: int) -> Rates:
        a, b, out = self.ones(3, size // 4)
        return self.rates(3.0 * size, lambda: torch.add(a, b, out=out))

    def _products(self, machine: Machine) -> None:
        """A linear layer, x W', and the gradient of its weight, half of each, by torch and by our own kernel where it
        takes them: (flops, smallest dimension, near, far). Few columns are seven, as of classes: no vector is full of
        them."""
        gemm: Rows = []
        own: Rows = []
        best: list[float] = []
        for n, k, c in self.sizes.gemms:
            x, weight, grad = self.ones(n, k), self.ones(c, k), self.ones(n, c)
            ways = [self._linear(torch.mm, x, weight, grad)]
            if not self.card and native.library() is not None and tall.shape_of(x, weight.t(), None, None) == "tall":
                ways.append(self._linear(tall.tall_product, x, weight, grad))
            size = (2.0 * n * k * c, float(min(n, k, c)))
            gemm.append((*size, *ways[0][:2]))
            own.append((*size, *max(ways)[:2]))
            best += [way.best for way in ways]
        machine.gemm, machine.own_gemm = gemm, own
        machine.peak_gemm = {"float32": max(best), **self._other_types()}

    def _linear(self, multiply: Callable[[Tensor, Tensor], Any], x: Tensor, weight: Tensor, grad: Tensor) -> Rates:
        """Flop/s."""
        calls = (lambda: multiply(x, weight.t()), lambda: multiply(grad.t(), x))
        near, far, best = zip(*(self.rates(2.0 * x.numel() * weight.size(0), call) for call in calls), strict=True)
        return Rates(statistics.harmonic_mean(near), statistics.harmonic_mean(far), max(best))

    def _other_types(self) -> dict[str, float]:
        """Flop/s of the fastest product of types that are not fp32."""
        side = SIDES[self.device.type]
        result = {} if self.card else ceilings.half_products(torch.get_num_threads())
        for dtype in (torch.float64, torch.bfloat16, torch.float16) if self.card else (torch.float64,):
            a = self.ones(side, side).to(dtype)
            result[str(dtype).removeprefix("torch.")] = self.rates(2.0 * side**3, partial(torch.mm, a, a)).best
        return result

    def _rows(self, machine: Machine) -> None:
        """Rows at random places: read, added up, reduced by max, and read by a sparse product."""
        names = ("gather", "scatter", "scatter_max", "spmm", "peak_gather")
        tables: dict[str, Rows] = {name: [] for name in names}
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
                read = 0.0
                for name, (rows, call) in calls.items():
                    rates = self.rates(float(rows.size(0) * row), call)
                    tables[name].append((float(row), float(span), *rates[:2]))
                    read = max(read, rates.best) if name in ("gather", "spmm") else read
                tables["peak_gather"].append((float(row), float(span), max(read, *self._read(table, index))))
        for name, points in tables.items():
            setattr(machine, name, points)

    def _read(self, table: Tensor, index: Tensor) -> list[float]:
        """Bytes a second of rows of whole cache lines that are read and no more."""
        row = table.size(1) * 4
        if self.card or native.library() is None or row % LINE:
            return [0.0]
        size, places = float(index.numel() * row), index.int()
        return [self.rates(size, partial(cpu.gather_ceiling, table, places, ahead)).best for ahead in AHEAD]

    def _added(self, count: int, width: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums, where the rows of a source go, and the source. A card adds rows up in order, wherever in the table that
        is; a processor sorts them by their sums first, so that the source is what it reads at random places."""
        if not self.card:
            rows = min(count, SUMMED * self.sizes.entries)
            count = max(1, rows // DEGREE)
            index = self.places(count, rows)
        source = self.ones(index.numel(), width)
        return self.ones(count, width), index[:, None].expand_as(source), source

    def _within_rows(self, machine: Machine) -> None:
        """Sums, softmax, masks: what depends on how long a row is."""
        sums = [self.ones(rows, 64) for rows in self.sizes.tall]
        machine.reduce = [(4.0 * t.numel(), *self.rates(4.0 * t.numel(), partial(t.sum, 0))[:2]) for t in sums]
        flat = self.ones(self.sizes.values)
        part = flat[: self.sizes.values >> 4]
        machine.reduce_last = [
            (float(size), *self.rates(4.0 * flat.numel(), partial(flat.view(-1, size // 4).sum, -1))[:2])
            for size in SUMS
        ]
        machine.softmax, machine.softmax_grad = [], []
        for width in WIDTHS:
            rows = part.view(-1, width)
            done = F.log_softmax(rows, 1)
            calls = (partial(F.log_softmax, rows, 1), partial(softmax_grad, rows, done, 1, rows.dtype))
            forward, back = (self.rates(part.numel(), call) for call in calls)
            machine.softmax.append((float(width), *forward[:2]))
            machine.softmax_grad.append((float(width), *back[:2]))
        masks = [torch.rand(size, device=self.device) < 0.6 for size in (1 << 12, 1 << 17)]
        machine.mask = [(float(m.numel()), *self.rates(m.numel(), m.nonzero)[:2]) for m in masks]


def _product(table: Tensor, index: Tensor) -> Callable[[], Any]:
    """Our spmm, which reads one row of the table per entry; entries are spread over rows at random, 8 each on average.

    Rows of equal length would be kinder than any graph: the processor learns where they end.
    """
    rows = max(1, index.numel() // DEGREE)
    ends = torch.randint(rows, index.shape, device=index.device)
    csr = sparse(ends, index, rows, table.shape[0])
    return lambda: kernels.backend(table.device).spmm(csr, table)
