"""The machine profile: a few measured rates from which the cost model prices a plan. Under two seconds, then cached.

All rates are of the threads torch uses, or of the GPU, in fp32: GEMM in flop/s, a streaming copy in bytes/s, random-row
gather in bytes/s by row size, and the cost of one call. On a GPU calls are asynchronous: the host's part of one hides
behind the device's work on others, and is the larger of the two only for small work.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from stretto import kernels, settings
from stretto.kernels import Csr, build
from stretto.machine import facts as machine
from stretto.machine import store, timing

ROW_BYTES = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Profile:
    """gemm: flop/s; stream: bytes/s read plus written; gather: bytes/s by ROW_BYTES; call: seconds a kernel.

    spmm_call: seconds a call of ours takes at least (0: as `call`); overlapped: whether calls hide behind work.
    """

    gemm: float
    stream: float
    gather: tuple[float, ...]
    call: float
    spmm_call: float = 0.0
    overlapped: bool = False

    def seconds(self, work: float, kind: str) -> float:
        """Time of a call of a kind ("spmm", "gemm", "add") with so many seconds of work."""
        call = self.spmm_call if kind == "spmm" and self.spmm_call else self.call
        return max(work, call) if self.overlapped else work + call

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
# cores of a server CPU, and one H200 with the host it was measured on. Only ratios matter to a choice.
TYPICAL = Profile(gemm=1.5e11, stream=2.0e10, gather=(1.2e10, 1.6e10, 2.0e10, 2.4e10, 2.6e10, 2.8e10), call=2e-5)
TYPICAL_GPU = Profile(
    gemm=4.5e13,
    stream=4.2e12,
    gather=(0.8e12, 2.0e12, 3.3e12, 3.9e12, 4.5e12, 4.5e12),
    call=1.0e-5,
    spmm_call=1.5e-5,
    overlapped=True,
)


@functools.cache
def _measured(device: str, threads: int, torch_kernels: bool) -> Profile:
    saved = known(torch.device(device))
    if saved is not None:
        return saved
    result = calibrate(torch.device(device))
    store.add("profile", _facts(device), {"profile": asdict(result)})
    return result


def _facts(device: str) -> dict[str, object]:
    """What the rates belong to. Those of torch's own kernels are kept beside those of ours."""
    backend = {"kernels": "torch"} if settings.torch_kernels() else {}
    return {**machine.describe(), "device": device, **backend}


def known(device: torch.device) -> Profile | None:
    """The rates measured on this machine earlier, if they were."""
    saved = store.read("profile", _facts(device.type)).get("profile")
    if isinstance(saved, dict) and len(saved.get("gather", ())) == len(ROW_BYTES) and "overlapped" in saved:
        return Profile(**{**saved, "gather": tuple(saved["gather"])})
    return None


def profile(device: torch.device, *, measure: bool) -> Profile:
    """This machine's rates: measured once and cached, or the typical ones where measuring is not wanted."""
    if device.type == "cuda" and measure and torch.cuda.is_current_stream_capturing():
        measure = False  # nothing may be tried inside a captured graph
    if measure:
        return _measured(device.type, torch.get_num_threads(), settings.torch_kernels())
    return TYPICAL if device.type == "cpu" else TYPICAL_GPU


def forget() -> None:
    """Measure again next time (the file in the cache folder is kept)."""
    _measured.cache_clear()


def calibrate(device: torch.device) -> Profile:
    """Measure the rates. The user's random numbers are left as they were: this may happen inside a training step."""
    if device.type == "cuda":
        return _calibrate_gpu(device)
    devices: list[torch.device] = []
    with torch.random.fork_rng(devices=devices), torch.inference_mode():
        n = 1024
        a = torch.randn(4 * n, n, device=device)
        b = torch.randn(n, n // 4, device=device)
        gemm = 2 * a.numel() * b.size(1) / _seconds(lambda: a @ b)
        source = torch.randn(1 << 23, device=device)
        target = torch.empty_like(source)
        stream = 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source))
        gather = tuple(_gather(rows, device) for rows in ROW_BYTES)
        tiny = torch.randn(8, 8, device=device)
        call = _seconds(lambda: tiny @ tiny, repeats=200)
    return Profile(gemm, stream, gather, call)


def sparse(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int) -> Csr:
    """The matrix with an entry for each pair, as kernels take it. rows, cols [E]."""
    rowptr, col, _ = build.compress(rows, cols, num_rows, torch.int32)
    csr = Csr(rowptr, col, None, num_rows, num_cols, rows.numel())
    csr.tasks, csr.hubs, csr.num_slots = build.schedule(rowptr, num_rows, rows.numel())
    return csr


def _gather(row_bytes: int, device: torch.device) -> float:
    """Bytes per second of an aggregation over 8 random neighbours a row, on rows past the caches of one core."""
    width = row_bytes // 4
    num_rows = min(1 << 16, (1 << 26) // row_bytes)
    num_edges = min(8 * num_rows, (1 << 27) // row_bytes)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(num_rows, (num_edges,), generator=generator).sort().values.to(device)
    cols = torch.randint(num_rows, (num_edges,), generator=generator).to(device)
    csr = sparse(rows, cols, num_rows, num_rows)
    x = torch.randn(num_rows, width, device=device)
    kernel = kernels.backend(device).spmm
    return num_edges * row_bytes / _seconds(lambda: kernel(csr, x))


# Rows of these bytes are gathered in earnest on a GPU, the rates between them follow: every width is a compilation.
MEASURED_BYTES = (64, 256, 1024)


def _calibrate_gpu(device: torch.device) -> Profile:
    """Measure the rates of a GPU: sizes past its caches, calls in a row as a training step makes them."""
    backend = kernels.backend(device)
    with torch.random.fork_rng(devices=[device]), torch.inference_mode():
        source = torch.randn(1 << 26, device=device)
        few = _neighbours(8, source.device)
        # Where nothing has been compiled yet that is most of the time: every width in a thread of its own.
        with ThreadPoolExecutor(len(MEASURED_BYTES)) as pool:
            compiled = [pool.submit(_once, backend.spmm, few, _of_width(source, 8, b)) for b in MEASURED_BYTES]
            a, b = source[: 1 << 24].view(1 << 16, 256), torch.randn(256, 256, device=device)
            torch.mm(a, b)  # torch's own library starts meanwhile
            for done in compiled:
                done.result()
        gemm = 2 * a.numel() * b.size(1) / _seconds_in_a_row(lambda: a @ b, device)
        target = torch.empty_like(source)
        stream = 2 * source.numel() * 4 / _seconds_in_a_row(lambda: target.copy_(source), device)
        num_rows = 1 << 18
        many = _neighbours(num_rows, source.device)
        rates = {}
        for row_bytes in MEASURED_BYTES:
            call = functools.partial(backend.spmm, many, _of_width(source, num_rows, row_bytes))
            rates[row_bytes] = many.num_edges * row_bytes / _seconds_in_a_row(call, device)
        tiny = torch.randn(8, 8, device=device)
        one_call = _seconds_in_a_row(lambda: tiny @ tiny, device)
        x = _of_width(source, 8, MEASURED_BYTES[1])
        spmm_call = _seconds_in_a_row(lambda: backend.spmm(few, x), device)
    middle = (rates[64] + rates[256]) / 2, (rates[256] + rates[1024]) / 2
    gather = (rates[64], middle[0], rates[256], middle[1], rates[1024], rates[1024])
    return Profile(gemm, stream, gather, one_call, spmm_call, overlapped=True)


DEGREE = 8


def _neighbours(num_rows: int, device: torch.device) -> Csr:
    """DEGREE random neighbours a row: nothing to sort, and no row is long, which spares the kernels for long ones."""
    num_edges = DEGREE * num_rows
    rowptr = torch.arange(0, num_edges + 1, DEGREE, device=device)
    col = torch.randint(num_rows, (num_edges,), device=device, dtype=torch.int32)
    csr = Csr(rowptr, col, None, num_rows, num_rows, num_edges)
    short_rows = kernels.backend(device).short_rows
    if short_rows is not None:
        short_rows(csr)
    return csr


def _of_width(source: Tensor, num_rows: int, row_bytes: int) -> Tensor:
    """A matrix of fp32 rows of this many bytes. source: as many numbers at least."""
    width = row_bytes // 4
    return source[: num_rows * width].view(num_rows, width)


def _once(kernel: Callable[..., object], csr: Csr, x: Tensor) -> None:
    with torch.inference_mode():  # a thread has its own
        kernel(csr, x)


def _seconds_in_a_row(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of several asynchronous calls in a row; the best of three rows."""
    rows = timing.measure({"call": call}, repeats=3, warmup=2, device=device, sample_seconds=0.003)
    return rows["call"].best


def _seconds(call: Callable[[], object], repeats: int = 5) -> float:
    return timing.measure({"call": call}, repeats=repeats)["call"].median
