"""Hot gathers and scatters over every axis: candidates agree with fp64 first, then take turns on the clock."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.analyze.trace import Recorder
from stretto.bench import machine, stock
from stretto.bench.memory import card_peak_bytes
from stretto.bench.run import LIMITS, relative_error, threads
from stretto.errors import expect
from stretto.ops import gather_rows, scatter_rows
from stretto.profile.axes import DTYPES, Point, place, points, values
from stretto.profile.replay import capture, is_index
from stretto.tune.timing import Timing, in_a_row, measure, ratio

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile
    from stretto.profile.sweep_dense import DenseSite, SparseSite

REPEATS = 20
TIE = 1.05  # a winner leads by more than this, at the lower end of its interval
DENSE = 1 << 22  # entries of a one-hot matrix that a dense product may have
FLUSH = 1 << 25  # values read between two samples with a cold cache

Candidates = dict[str, Callable[..., Tensor]]
NATIVE = {"gather": "index_select", "scatter": "index_add_"}


def interval(timing: Timing, *, level: float = 0.95, draws: int = 400) -> tuple[float, float]:
    """Bootstrap interval of the median, in seconds."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.tensor(timing.samples, dtype=torch.float64)
    picks = torch.randint(len(samples), (draws, len(samples)), generator=generator)
    medians = samples[picks].median(1).values.sort().values
    edge = int(draws * (1 - level) / 2)
    return float(medians[edge]), float(medians[-1 - edge])


def gather_candidates(index: Tensor, num_rows: int) -> Candidates:
    """x[index]: torch's ways, and ours."""
    found: Candidates = {c.name: c.forward for c in stock.gather_rows(index.long())[0]}
    found["index_select"] = lambda x: x.index_select(0, index)
    found["embedding"] = lambda x: torch.nn.functional.embedding(index, x)
    found["gather, index expanded"] = lambda x: x.gather(0, index.long()[:, None].expand(-1, x.size(1)))
    if index.numel() * num_rows <= DENSE:
        found["dense GEMM"] = _dense(torch.nn.functional.one_hot(index.long(), num_rows))
    found["stretto"] = lambda x: gather_rows(x, index)
    return found


def scatter_candidates(index: Tensor, num_rows: int) -> Candidates:
    """Sum by index: torch's ways, PyG's, torch_scatter's where it is there, and ours."""
    long = index.long()
    found: Candidates = {c.name: c.forward for c in stock.scatter_rows(long, num_rows)[0]}
    offers, _ = stock.segment_reduce(torch.empty(index.numel(), 1, device=index.device), long, num_rows, "sum")
    found.update({c.name: c.forward for c in offers})
    found["index_add_"] = lambda s: s.new_zeros(num_rows, s.size(1)).index_add_(0, index, s)
    found["scatter_add_"] = lambda s: s.new_zeros(num_rows, s.size(1)).scatter_add_(0, long[:, None].expand_as(s), s)
    order = long.argsort()
    lengths = torch.bincount(long, minlength=num_rows)
    found["sorted, segment_reduce"] = lambda s: torch.segment_reduce(s[order], "sum", lengths=lengths, unsafe=True)
    found["sparse CSR product"] = _selection(long, num_rows)
    if index.numel() * num_rows <= DENSE:
        found["dense GEMM"] = _dense(torch.nn.functional.one_hot(long, num_rows).T.contiguous())
    found["stretto"] = lambda s: scatter_rows(s, index, num_rows)
    return found


def _dense(selection: Tensor) -> Callable[[Tensor], Tensor]:
    kept: dict[torch.dtype, Tensor] = {}

    def product(x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64) and not x.is_cuda:
            # Half products go through oneDNN, which ends the process with an illegal instruction on some virtual CPUs.
            raise NotImplementedError("dense GEMM is not tried in half precision")
        if x.dtype not in kept:
            kept[x.dtype] = selection.to(x.dtype)
        return kept[x.dtype] @ x

    return product


def _selection(index: Tensor, num_rows: int) -> Callable[[Tensor], Tensor]:
    entries = torch.arange(index.numel(), device=index.device)
    kept: dict[torch.dtype, Tensor] = {}

    def product(s: Tensor) -> Tensor:
        if s.dtype not in kept:
            ones = torch.ones(index.numel(), dtype=s.dtype, device=s.device)
            kept[s.dtype] = _csr(index, entries, ones, num_rows)
        return kept[s.dtype] @ s

    return product


def _csr(rows: Tensor, columns: Tensor, ones: Tensor, num_rows: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")
        size = (num_rows, rows.numel())
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), ones, size, check_invariants=False).to_sparse_csr()


FAMILIES: dict[str, Callable[[Tensor, int], Candidates]] = {"gather": gather_candidates, "scatter": scatter_candidates}


def site(args: tuple[Any, ...], family: str) -> tuple[Tensor, int, int] | None:
    """(index [E], rows, width) of a captured gather or scatter by rows; None for one that is not by rows."""
    flat = [v for a in args for v in (a if isinstance(a, (list, tuple)) else (a,))]
    found = [v for v in flat if isinstance(v, Tensor)]
    index = next((v for v in found if is_index(v)), None)
    if index is None or not found[0].is_floating_point() or found[0].dim() < 1:
        return None
    if index.dim() > 1:
        if any(index.stride(d) for d in range(1, index.dim())):
            return None
        index = index.reshape(index.size(0), -1)[:, 0]
    table = found[0]  # what is gathered from, or scattered into
    return index.contiguous(), table.size(0), table.numel() // max(1, table.size(0))


def run_point(
    family: str, index: Tensor, num_rows: int, point: Point, *, repeats: int = REPEATS
) -> list[dict[str, Any]]:
    """Every candidate at one point: checked against fp64, then timed in turns. One row each."""
    index, num_rows = place(index, num_rows, point)
    source = values(num_rows if family == "gather" else index.numel(), point)
    where = index.long()

    def reference(x: Tensor) -> Tensor:
        if family == "gather":
            return x[where]
        return x.new_zeros(num_rows, point.width).index_add(0, where, x)

    with threads(point.threads):
        return contest(family, FAMILIES[family](index, num_rows), reference, source, point, NATIVE[family], repeats)


def contest(
    family: str,
    table: Candidates,
    reference: Callable[[Tensor], Tensor],
    source: Tensor,
    point: Point,
    native: str,
    repeats: int,
) -> list[dict[str, Any]]:
    """Check the candidates against the reference in fp64, then time those that agree in turns. One row each."""
    if point.compiled:
        table = {native: table[native], "torch.compile": torch.compile(table[native])}
    right, rows = _agree(family, table, reference, source, point)
    if not right:
        return rows
    cold = point.cache == "cold"
    timings = measure(
        right,
        repeats=repeats,
        warmup=1,
        device=point.device,
        sample_seconds=0.0 if cold else in_a_row(point.device),
        after=(lambda name: _flush(point.device)) if cold else None,
    )
    first = timings.get(native)
    for name, timing in timings.items():
        low, high = interval(timing)
        row: dict[str, Any] = {**rows_of(rows, name), **timing.to_dict(), "ci_ms": (low * 1e3, high * 1e3)}
        row["peak_bytes"] = _peak(right[name], point.device)
        if first is not None:
            row["speedup"] = ratio(first, timing)
        rows[[r["candidate"] for r in rows].index(name)] = row
    return rows


def _flush(device: str) -> None:
    """Read more than any cache holds, so that the next call finds its inputs in memory."""
    torch.ones(FLUSH, device=device).sum()


def rows_of(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The row of a candidate."""
    return next(row for row in rows if row["candidate"] == name)


def _agree(
    family: str, table: Candidates, reference: Callable[[Tensor], Tensor], source: Tensor, point: Point
) -> tuple[dict[str, Callable[[], object]], list[dict[str, Any]]]:
    both = point.direction == "both"
    wide = source.double().requires_grad_(both)
    expected = reference(wide)
    wanted = [expected.detach()]
    if both:
        wanted.append(torch.autograd.grad(expected, wide, torch.ones_like(expected))[0])
    right: dict[str, Callable[[], object]] = {}
    rows: list[dict[str, Any]] = []
    for name, function in table.items():
        call = _both(function, source) if both else _once(function, source)
        row: dict[str, Any] = {"family": family, "candidate": name, **asdict(point), "error": None, "reason": ""}
        rows.append(row)
        try:
            got = call()
        except (RuntimeError, NotImplementedError, IndexError) as error:
            row["reason"] = f"raises: {str(error).splitlines()[0]}"
            continue
        row["error"] = max(relative_error(g, w) for g, w in zip(got, wanted, strict=True))
        if row["error"] <= LIMITS[point.dtype]:
            right[name] = call
        else:
            row["reason"] = f"wrong: relative error {row['error']:.1e}, allowed {LIMITS[point.dtype]:.0e}"
    return right, rows


def _once(function: Callable[..., Tensor], source: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (function(source),)


def _both(function: Callable[..., Tensor], source: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    leaf = source.detach().clone().requires_grad_()

    def call() -> tuple[Tensor, ...]:
        out = function(leaf)
        return (out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0])

    return call


def _peak(call: Callable[[], object], device: str) -> int:
    """Bytes that one call allocates at its highest, its result included."""
    if device == "cuda":
        return card_peak_bytes(call)
    recorder = Recorder()
    with recorder.recording():
        call()
    return recorder.trace.peak_bytes


def sites(profile: Profile, share: float) -> list[tuple[Group, Tensor, int, int]]:
    """Hot gathers and scatters by rows, with their real indices."""
    groups = [g for g in profile.hot(share) if g.family in FAMILIES]
    captured = capture(profile, groups) if groups else {}
    found = []
    for group in groups:
        for op in group.ops:
            if op in captured and (known := site(captured[op][1], group.family)) is not None:
                found.append((group, *known))
                break
    return found


def sweep(
    profile: Profile,
    *,
    budget: float = 60.0,
    share: float = 0.9,
    repeats: int = REPEATS,
    progress: Callable[[str, float], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of every point and candidate of the hot sites, until the budget (seconds) is spent.

    progress(what, seconds left) is called before each point. Sites take turns, so that each has its base measured.
    """
    from stretto.profile.sweep_dense import dense_sites, sparse_sites

    expect(budget > 0, f"sweep: 'budget' is {budget}, wanted more than 0 seconds")
    end = time.perf_counter() + budget
    cores, device = machine.cores(), profile.workload.device.type
    start = Point(width=1, threads=torch.get_num_threads(), device=device)
    queues: list[tuple[Group, Point, list[Point], Callable[[Point], list[dict[str, Any]]]]] = []
    for group, index, num_rows, width in sites(profile, share):
        base = replace(start, width=width, dtype=_word(group))
        run = _runner(group.family, index.cpu(), num_rows, repeats)
        queues.append((group, base, list(points(base, cores)), run))
    others: list[DenseSite | SparseSite] = [*sparse_sites(profile, share), *dense_sites(profile, share)]
    for found in others:
        base = replace(start, width=found.width, dtype=_word(found.group))
        cells = [p for p in points(base, cores) if p.moved(base) in found.axes]
        queues.append((found.group, base, cells, lambda point, found=found: found.run(point, repeats)))  # type: ignore[misc]
    order = [g.name + g.phase + g.shapes for g in profile.groups]  # the slowest first
    queues.sort(key=lambda q: order.index(q[0].name + q[0].phase + q[0].shapes))
    rows: list[dict[str, Any]] = []
    for turn in range(max((len(q[2]) for q in queues), default=0)):
        for group, base, cells, run in queues:
            left = end - time.perf_counter()
            if turn >= len(cells) or left <= 0:
                continue
            if progress is not None:
                progress(f"{group.name}, {cells[turn].moved(base)}", left)
            label = {"op": group.name, "phase": group.phase, "shapes": group.shapes, "axis": cells[turn].moved(base)}
            rows += [{**label, **row} for row in run(cells[turn])]
    return rows


def _runner(family: str, index: Tensor, num_rows: int, repeats: int) -> Callable[[Point], list[dict[str, Any]]]:
    return lambda point: run_point(family, index, num_rows, point, repeats=repeats)


def _word(group: Group) -> str:
    words = {str(dtype).removeprefix("torch."): word for word, dtype in DTYPES.items()}
    return next((words[d] for d in group.dtypes.split(", ") if d in words), "f32")
