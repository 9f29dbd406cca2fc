"""Ceilings: the most this machine has been seen to do of each kind. No op may do more; how close it comes is its share.

A machine's rates tell how long such calls usually take; here the fastest sample of the fastest way counts: products by
type; random values; bytes in order by how many there are; rows at random places by their length and by how much memory
they lie in. Between two sizes the higher ceiling holds. probing.py notes them while it measures the rates.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
from collections.abc import Iterable

from stretto.machine import half_products as half
from stretto.machine.file import Machine

logger = logging.getLogger("stretto")

PATIENCE = 60.0  # seconds for the process that tries products of 16-bit types


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
