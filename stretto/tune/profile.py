"""The machine profile: a few measured rates from which the cost model prices a plan. Under two seconds, then cached.

All rates are of the threads torch uses, in fp32: GEMM in flop/s, a streaming copy in bytes/s, random-row gather in
bytes/s by row size, and the cost of one call.
"""

from __future__ import annotations

import bisect
import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from stretto import kernels
from stretto.kernels import Csr, build
from stretto.tune import machine, store

ROW_BYTES = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Profile:
    """gemm: flop/s; stream: bytes/s read plus written; gather: bytes/s by ROW_BYTES; call: seconds a kernel."""

    gemm: float
    stream: float
    gather: tuple[float, ...]
    call: float

    def gather_rate(self, row_bytes: float) -> float:
        """Bytes per second when rows of this size are gathered at random; linear between measured sizes."""
        if row_bytes <= ROW_BYTES[0]:
            return self.gather[0] * max(row_bytes, 4) / ROW_BYTES[0]  # a smaller row still costs a cache line
        place = bisect.bisect_left(ROW_BYTES, row_bytes)
        if place >= len(ROW_BYTES):
            return self.gather[-1]
        low, high = ROW_BYTES[place - 1], ROW_BYTES[place]
        share = (row_bytes - low) / (high - low)
        return self.gather[place - 1] * (1 - share) + self.gather[place] * share


# Used where measuring is not wanted (STRETTO_TUNE=off or analytic without a cached profile, deterministic mode): two
# cores of a server CPU. Only ratios matter to a choice.
TYPICAL = Profile(gemm=1.5e11, stream=2.0e10, gather=(1.2e10, 1.6e10, 2.0e10, 2.4e10, 2.6e10, 2.8e10), call=2e-5)


@functools.cache
def _measured(device: str, threads: int) -> Profile:
    facts = {**machine.describe(), "device": device}
    kept = store.read("profile", facts).get("profile")
    if isinstance(kept, dict) and len(kept.get("gather", ())) == len(ROW_BYTES):
        return Profile(kept["gemm"], kept["stream"], tuple(kept["gather"]), kept["call"])
    found = calibrate(torch.device(device))
    store.add("profile", facts, {"profile": asdict(found)})
    return found


def profile(device: torch.device, *, measure: bool) -> Profile:
    """This machine's rates: measured once and cached, or the typical ones where measuring is not wanted."""
    return _measured(device.type, torch.get_num_threads()) if measure else TYPICAL


def forget() -> None:
    """Measure again next time (the file in the cache folder is kept)."""
    _measured.cache_clear()


def calibrate(device: torch.device) -> Profile:
    """Measure the rates. The user's random numbers are left as they were: this may happen inside a training step."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        n = 1024
        a = torch.randn(4 * n, n, device=device)
        b = torch.randn(n, n // 4, device=device)
        gemm = 2 * a.numel() * b.size(1) / _seconds(lambda: a @ b, device)
        source = torch.randn(1 << 23, device=device)
        target = torch.empty_like(source)
        stream = 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), device)
        gather = tuple(_gather(rows, device) for rows in ROW_BYTES)
        tiny = torch.randn(8, 8, device=device)
        call = _seconds(lambda: tiny @ tiny, device, repeats=200)
    return Profile(gemm, stream, gather, call)


def _gather(row_bytes: int, device: torch.device) -> float:
    """Bytes per second of an aggregation over 8 random neighbours a row, on rows past the caches of one core."""
    width = row_bytes // 4
    num_rows = min(1 << 16, (1 << 26) // row_bytes)
    num_edges = min(8 * num_rows, (1 << 27) // row_bytes)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(num_rows, (num_edges,), generator=generator).sort().values.to(device)
    cols = torch.randint(num_rows, (num_edges,), generator=generator).to(device)
    rowptr, col, _ = build.compress(rows, cols, num_rows, torch.int32)
    csr = Csr(rowptr, col, None, num_rows, num_rows, num_edges)
    csr.tasks, csr.hubs, csr.num_slots = build.schedule(rowptr, num_rows, num_edges)
    x = torch.randn(num_rows, width, device=device)
    kernel = kernels.backend(device).spmm
    return num_edges * row_bytes / _seconds(lambda: kernel(csr, x), device)


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    call()
    samples = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 2]
