"""Check, then time: one Spec in, one Row per candidate out."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.suites import results
from benchmarks.suites.case import OURS, Case, Spec
from benchmarks.suites.cases import build
from benchmarks.suites.ceilings import KINDS, Ceiling, ceilings
from benchmarks.suites.stock import Candidate
from stretto.machine import facts as machine
from stretto.machine.timing import Timing, measure, ratio, settle, threads
from stretto.observe.agreement import LIMITS, relative_error

SHORT = 0.06  # seconds: shorter calls are timed several in a row, for caches take about five to settle after another
STOCK = ("torch csr", "PyG scatter", "PyG softmax")  # what PyG runs for an op, where it is among the candidates
REFERENCE_ELEMENTS = 1 << 26  # messages of the fp64 reference held at once


@dataclass
class Row:
    """What was found out about one candidate."""

    candidate: str
    error: float | None = None
    timing: Timing | None = None
    reason: str = ""  # why it was not timed


@dataclass
class Result:
    """A Spec and what was measured for it."""

    spec: Spec
    repeats: int
    num_nodes: int
    num_edges: int
    flops: float
    bytes: float
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[str, tuple[str, float]] = field(default_factory=dict)  # kind -> (unit, amount per second)
    gathered_bytes: float = 0.0

    def timing(self, candidate: str) -> Timing | None:
        """The timing of a candidate; None if it was not timed."""
        return next((r.timing for r in self.rows if r.candidate == candidate), None)

    @property
    def ours(self) -> Timing | None:
        """Our timing; None if ours failed the check."""
        return self.timing(OURS)

    @property
    def best_other(self) -> Row | None:
        """The fastest of the others."""
        others = [r for r in self.rows if r.timing is not None and r.candidate != OURS]
        return min(others, key=lambda r: r.timing.median if r.timing else 0.0, default=None)

    def speedup(self, candidate: str | None = None) -> tuple[float, float, float] | None:
        """Times faster than `candidate` (None: the best other), with its interval."""
        other = self.best_other if candidate is None else next((r for r in self.rows if r.candidate == candidate), None)
        if self.ours is None or other is None or other.timing is None:
            return None
        return ratio(other.timing, self.ours)

    def shares(self) -> dict[str, float]:
        """Ours, as a share of each ceiling."""
        if self.ours is None:
            return {}
        # The gather ceilings count the rows alone, the copy ceiling every byte the op declares.
        done = {
            "copy": self.bytes,
            "gather": self.gathered_bytes,
            "random gather": self.gathered_bytes,
            "gemm": self.flops,
        }
        return {kind: done[kind] / self.ours.median / rate for kind, (_, rate) in self.ceilings.items()}

    def attainable(self, candidate: str) -> float | None:
        """Times faster than `candidate` we would be if reading the gathered rows were all there is to do."""
        other = self.timing(candidate)
        if other is None or "gather" not in self.ceilings:
            return None
        return other.median * self.ceilings["gather"][1] / self.gathered_bytes

    @property
    def failed(self) -> str:
        """Why ours was not timed; empty where it was."""
        return next((r.reason for r in self.rows if r.candidate == OURS), "")

    def figures(self) -> dict[str, results.Figure]:
        """What every candidate took that was timed."""
        return results.figures({r.candidate: r.timing for r in self.rows if r.timing is not None})

    def to_row(self) -> results.Row:
        """As `stretto bench ops` writes it down."""
        case = {name: value for name, value in vars(self.spec).items() if name != "threads"}
        figures, shares = self.figures(), {f"share of {kind}": share for kind, share in self.shares().items()}
        errors = {row.candidate: row.error for row in self.rows}
        return results.row(
            "ops", case, figures, command=self.spec.command(self.repeats), threads=self.spec.threads,
            stock=next((name for name in STOCK if name in figures), ""),
            note="; ".join(f"{row.candidate}: {row.reason}" for row in self.rows if row.reason),
            more={"nodes": self.num_nodes, "edges": self.num_edges, "error": errors.get(OURS), **shares},
        )  # fmt: skip


def run(
    spec: Spec,
    *,
    repeats: int = 9,
    with_ceilings: Collection[str] = KINDS,
    without: Collection[str] = (),
    after: Callable[[str], None] | None = None,
) -> Result:
    """Check every candidate of `spec`, but those in `without`, against fp64; then time those that pass, in turns."""
    with threads(spec.threads):
        case = build(spec)
        result = Result(spec, repeats, case.num_nodes, case.num_edges, case.flops, case.bytes)
        result.rows = [Row(name, reason=reason) for name, reason in case.skipped.items()]
        case.candidates = [c for c in case.candidates if c.name not in without]
        calls = _check(spec, case, result, after)
        if not calls:
            return result
        if OURS in calls:
            settle(calls[OURS])
        counted = with_ceilings if spec.direction == "fwd" else ()
        limits = {name: limit for name, limit in ceilings(case).items() if limit.kind in counted}
        table = {**calls, **{f"ceiling: {name}": limit.call for name, limit in limits.items()}}
        timings = measure(table, repeats=repeats, warmup=2, sample_seconds=SHORT, lead_in=True, after=after)
    for row in result.rows:
        row.timing = timings.get(row.candidate)
    _record_ceilings(result, limits, timings)
    return result


def _check(
    spec: Spec, case: Case, result: Result, after: Callable[[str], None] | None
) -> dict[str, Callable[[], object]]:
    """Run each candidate once beside the reference; the calls of those that are right, ready to be timed."""
    wanted, grad = expected(case, both=spec.direction == "both")
    calls: dict[str, Callable[[], object]] = {}
    for candidate in case.candidates:
        row = Row(candidate.name)
        result.rows.append(row)
        need = candidate.scratch * (1 if grad is None else 3)
        if need > machine.memory_bytes("MemAvailable") // 2 > 0:
            row.reason = f"needs {need / 2**30:.1f} GiB of intermediate tensors"
            continue
        call = _call(candidate, case, grad)
        try:
            got = call()
        except (RuntimeError, NotImplementedError) as error:
            row.reason = f"raises: {str(error).splitlines()[0]}"
            continue
        row.error = max(relative_error(g, w) for g, w in zip(got, wanted, strict=True))
        if row.error <= LIMITS[spec.dtype]:
            calls[candidate.name] = call
        else:
            row.reason = f"wrong: relative error {row.error:.1e}, allowed {LIMITS[spec.dtype]:.0e}"
        if after is not None:
            after(candidate.name)
    return calls


def _call(candidate: Candidate, case: Case, grad: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """The candidate as a function of nothing: output, and gradients where `grad` is given.

    Each has inputs of its own: ours are moved into large pages (memory/pages.py), which stock's would not be.
    """
    inputs = [t.to(candidate.dtype or t.dtype, copy=True) for t in case.inputs]
    if grad is None:
        return lambda: (candidate.forward(*inputs),)
    leaves = [t.detach().requires_grad_() for t in inputs]
    upstream = grad.to(candidate.dtype or grad.dtype)

    def both() -> tuple[Tensor, ...]:
        out = candidate.forward(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype)))

    return both


def expected(case: Case, *, both: bool) -> tuple[list[Tensor], Tensor | None]:
    """Output of the reference in fp64, a few columns at a time. both: also gradients, and what they are gradients of.

    -> ([output, *gradients], upstream gradient or None)
    """
    width = case.inputs[0].shape[-1]
    step = max(1, REFERENCE_ELEMENTS // max(1, case.num_edges))
    cuts = [slice(None)] if case.columns == "whole" else [slice(k, k + step) for k in range(0, width, step)]
    outs: list[Tensor] = []
    upstreams: list[Tensor] = []
    grads: list[tuple[Tensor, ...]] = []
    for cut in cuts:
        leaves = [t[..., cut].double().requires_grad_(both) for t in case.inputs]
        out = case.reference(*leaves)
        outs.append(out.detach())
        if both:
            if case.columns != "sum" or not upstreams:
                upstreams.append(torch.randn(out.shape).to(case.inputs[0].dtype))
            grads.append(torch.autograd.grad(out, leaves, upstreams[-1].double()))
    out = torch.stack(outs).sum(0) if case.columns == "sum" else torch.cat(outs, -1)
    upstream = torch.cat(upstreams, -1) if both else None
    return [out, *(torch.cat(parts, -1) for parts in zip(*grads, strict=True))], upstream


def _record_ceilings(result: Result, limits: dict[str, Ceiling], timings: dict[str, Timing]) -> None:
    for name, limit in limits.items():
        rate = limit.amount / timings[f"ceiling: {name}"].median
        known = result.ceilings.get(limit.kind, (limit.unit, 0.0))
        result.ceilings[limit.kind] = (limit.unit, max(rate, known[1]))
        if limit.kind == "gather":
            result.gathered_bytes = limit.amount
