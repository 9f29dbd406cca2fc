"""Ceilings: the most this machine has been seen to do of each kind. No op may do more; how close it comes is its share.

The rates of probing.py tell how long such calls usually take; an op that is done better, or by another way,
beats them. Here the fastest sample of the fastest way counts: products by type; random values; bytes in order (read,
written, copied, changed in place) by how many there are; rows at random places by their length and by how much memory
they lie in. Between two sizes the higher ceiling holds.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from stretto import kernels
from stretto.kernels import cpu, native, tall
from stretto.machine import half_products as half
from stretto.machine.file import Machine
from stretto.machine.rates import sparse
from stretto.machine.timing import by_wall, call_clock, work_clock
from stretto.memory import pages

logger = logging.getLogger("stretto")

TYPES = (torch.float32, torch.float64)  # on a processor; of 16 bits: half_products.py
PATIENCE = 60.0  # seconds for the process that tries them
SPANS = (1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # bytes the rows lie in


@dataclass(frozen=True)
class Sizes:
    """How much is moved to find a device's ceilings."""

    products: tuple[tuple[int, int, int], ...]  # square ones, and tall ones as GNNs have them, which stay in a cache
    streams: tuple[int, ...]  # bytes that a call reads and writes
    spans: tuple[int, ...]
    rows: tuple[int, ...]  # bytes of one: a processor reads whole lines, a card puts together what its threads ask for
    read: int  # at most so many bytes of rows in one call
    entries: int  # and so many rows


PROCESSOR = Sizes(
    products=((256, 256, 256), (1024, 1024, 1024), (4096, 64, 64), (4096, 64, 256), (4096, 256, 256)),
    streams=(1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 26),
    spans=SPANS,
    rows=(64, 256, 1024),
    read=1 << 22,
    entries=1 << 16,
)
CARD = Sizes(
    products=((1024, 1024, 1024), (8192, 8192, 8192), (1 << 17, 256, 256)),
    streams=(1 << 16, 1 << 19, 1 << 22, 1 << 24, 1 << 25, 1 << 26, 1 << 30),
    spans=(*SPANS, 1 << 28, 1 << 30),
    rows=(4, 16, 64, 256, 1024),
    read=1 << 28,
    entries=1 << 20,
)
DRAWN = 1 << 14  # random values of one call: they stay in a cache
AHEAD = (0, 8)  # rows fetched before their turn; the faster way counts
LEAST, SECONDS = 5, 0.01  # samples, and the time for more of them


Clock = Callable[[Callable[[], Any]], float]


def best(call: Callable[[], Any], *, seconds: float = SECONDS, clock: Clock = by_wall) -> float:
    """Seconds of the fastest of some calls."""
    call()
    result, count, end = float("inf"), 0, time.perf_counter() + seconds
    while count < LEAST or time.perf_counter() < end:
        result = min(result, clock(call))
        count += 1
    return result


def measure(machine: Machine) -> None:
    """Put the ceilings into a machine."""
    device, card = torch.device(machine.device), machine.device == "cuda"
    sizes, clock = (CARD if card else PROCESSOR), work_clock(device)
    tiny = torch.ones(4, device=device)
    nothing = (lambda: tiny + tiny, lambda: tiny.zero_(), lambda: tiny.neg_())
    machine.peak_launch = min(best(call, clock=call_clock(device)) for call in nothing)
    types = (*TYPES, torch.bfloat16, torch.float16) if card else TYPES
    machine.peak_gemm = {str(dtype).removeprefix("torch."): _gemm(dtype, device, sizes, clock) for dtype in types}
    machine.peak_gemm |= {} if card else half_products(torch.get_num_threads())
    machine.peak_stream = [(float(size), _stream(size, device, clock)) for size in sizes.streams]
    drawn = torch.empty(sizes.entries if card else DRAWN, device=device)
    ways = (lambda: drawn.bernoulli_(0.5), lambda: drawn.uniform_(), lambda: drawn.normal_(), lambda: drawn.random_())
    machine.peak_draw = drawn.numel() / min(best(way, clock=clock) for way in ways)
    machine.peak_gather = [
        (float(row), float(span), _gather(row, span, device, sizes, clock))
        for span in sizes.spans
        for row in sizes.rows
    ]


def _gemm(dtype: torch.dtype, device: torch.device, sizes: Sizes, clock: Clock) -> float:
    rates = []
    for n, k, c in sizes.products:
        a, b = torch.ones(n, k, dtype=dtype, device=device), torch.ones(k, c, dtype=dtype, device=device)
        out = torch.empty(n, c, dtype=dtype, device=device)
        ways: list[Callable[[], Any]] = [lambda a=a, b=b, out=out: torch.mm(a, b, out=out)]  # type: ignore[misc]
        if device.type == "cpu" and native.library() is not None and tall.shape_of(a, b, None, None) == "tall":
            ways.append(lambda a=a, b=b: tall.tall_product(a, b))  # type: ignore[misc]
        rates.append(2.0 * n * k * c / min(best(way, clock=clock) for way in ways))
    return max(rates)


@functools.cache
def half_products(threads: int) -> dict[str, float]:
    """Flop/s of products of 16-bit types, of those that this machine can run."""
    command = [sys.executable, half.__file__, str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.info("stretto: products of 16-bit types were not timed: %s", error)
        return {}
    rows = [line.split() for line in done.stdout.splitlines()]
    if done.returncode:
        logger.info("stretto: products of 16-bit types beyond %s end the process (%s)", rows, done.returncode)
    return {name: float(rate) for name, rate in rows}


def _stream(size: int, device: torch.device, clock: Clock) -> float:
    """Bytes a second of calls that touch `size` bytes in all."""
    whole, half = torch.ones(size // 4, device=device), torch.ones(size // 8, device=device)
    third = [torch.ones(size // 12, device=device) for _ in range(3)]
    other = torch.ones(size // 8, device=device)
    calls = (
        lambda: whole.sum(),
        lambda: whole.fill_(1.0),
        lambda: other.copy_(half),
        lambda: half.mul_(1.0),  # read and written
        lambda: torch.add(third[0], third[1], out=third[2]),
    )
    return max(size / best(call, clock=clock) for call in calls)


def _gather(row: int, span: int, device: torch.device, sizes: Sizes, clock: Clock) -> float:
    """Bytes a second of rows at random places, read and no more."""
    table = torch.ones(max(1, span // row), row // 4, device=device)
    index = torch.randint(table.size(0), (min(sizes.read // row, sizes.entries),), dtype=torch.int32, device=device)
    out = torch.empty(index.numel(), row // 4, device=device)
    calls: list[Callable[[], Any]] = [lambda: torch.index_select(table, 0, index, out=out)]
    if device.type == "cuda":
        # torch's way writes what it reads; ours adds up eight rows and writes one.
        targets = torch.arange(index.numel(), device=device) // 8
        csr = sparse(targets, index.long(), index.numel() // 8 + 1, table.size(0))
        calls.append(lambda: kernels.backend(device).spmm(csr, table))
    elif native.library() is not None:
        pages.enlarge(table.data_ptr(), table.nbytes)
        calls += [lambda ahead=ahead: cpu.gather_ceiling(table, index, ahead) for ahead in AHEAD]  # type: ignore[misc]
    return index.numel() * row / max(min(best(call, clock=clock) for call in calls), 1e-9)


def _above(points: Iterable[tuple[float, float]], size: float) -> float:
    """The highest rate of the points from the last one at most `size` on: between two points the higher one holds."""
    ordered = sorted(points)
    start = max((i for i, (at, _) in enumerate(ordered) if at <= size), default=0)
    return max(rate for _, rate in ordered[start:])


def stream_rate(machine: Machine, size: float) -> float:
    """Byte/s that calls which touch `size` bytes in order can reach."""
    return _above([(p[0], p[1]) for p in machine.peak_stream or machine.stream], size)


def gather_rate(machine: Machine, row: float, span: float) -> float:
    """Byte/s of rows of so many bytes at random places within `span` bytes. A row shorter than any measured (a cache
    line, on a processor) takes as long as the shortest."""
    table = machine.peak_gather or [(p[0], p[1], p[2]) for p in machine.gather]
    longer = sorted({point[0] for point in table})
    upper = next((r for r in longer if r >= row), longer[-1])
    rates = {r: _above([(p[1], p[2]) for p in table if p[0] == r], span) for r in longer if r <= upper}
    return max(rates.values()) * (min(1.0, row / upper) if upper == longer[0] else 1.0)


def flop_rate(machine: Machine, dtype: str = "float32") -> float:
    """Flop/s of the fastest product of this type; of any type where this one was not measured."""
    known = machine.peak_gemm or {"float32": max(point[2] for point in machine.gemm)}
    return known.get(dtype, max(known.values()))
