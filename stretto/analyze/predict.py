"""From counts to time: T = max(flops / rate, bytes / bandwidth, random bytes / gather bandwidth) + launch, per op.

And from the order of ops to depth: the longest chain of ops that wait for one another, in steps of an ideal parallel
machine (log terms) and in kernel launches (what a small graph really waits for).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy

from stretto import memory
from stretto.analyze.costs import DEGREE
from stretto.analyze.machine_file import MOVED, Machine, near, near_row
from stretto.analyze.trace import OpRecord, Trace


def ceilings(op: OpRecord, machine: Machine) -> dict[str, float]:
    """Seconds that each resource alone would need; the largest bounds the op."""
    cost = op.cost
    if cost.family == "view":
        return {"launch": 0.0}
    found = {"launch": machine.launch}
    stream = float(cost.stream)
    if cost.family == "gemm":
        flops = float(cost.flops)
        found["compute"] = flops / near(machine.gemm, flops)
        found["bandwidth"] = stream / near(machine.stream, stream)
        return found
    row, span = float(cost.row), float(cost.span)
    if cost.family == "scatter":
        moved = float(cost.random) / (2 if cost.flops else 1)
        found["gather latency"] = moved / near_row(machine.scatter, row, span) + _beyond(stream, span, machine)
    elif cost.family in ("spmm", "sddmm") and cost.random:
        found["gather latency"] = float(cost.random) / near_row(machine.spmm, row, span)
        found["bandwidth"] = stream / near(machine.stream, stream)
    elif cost.family == "attention":
        found["gather latency"] = float(cost.random) / near_row(machine.spmm, row, span)
        found["compute"] = float(cost.flops) / near(machine.gemm, float(cost.flops))
    elif cost.random:
        found["gather latency"] = float(cost.random) / near_row(machine.gather, row, span) + _beyond(
            stream, span, machine
        )
    elif cost.family == "reduce":
        found["bandwidth"] = stream / machine.reduce
    elif cost.family == "softmax":
        found["compute"] = float(cost.flops) / 5 / machine.exp
    elif cost.family == "sort":
        found["compute"] = float(cost.flops) / machine.sort
    else:
        found["bandwidth"] = stream / near(machine.stream, stream)
    return found


def _beyond(stream: float, span: float, machine: Machine) -> float:
    """Seconds of the bytes in order that the measured rate of random rows does not have in it."""
    return max(0.0, stream - max(span, MOVED)) / near(machine.stream, stream)


LEAST, LARGE = 128 << 10, 32 << 20  # below, the allocator keeps what it has; above, every result is new memory


def fresh_bytes(trace: Trace) -> dict[int, float]:
    """Op -> bytes of its results that the process did not have before: the system clears them page by page.

    What is freed within the step is used again. Between steps the allocator gives back what lies free on top, once
    it is more than twice the largest block it has seen (glibc's rule, which stops at 32 MiB).
    """
    sizes = [float(size) for _, _, _, size in trace.takes]
    kept = float(trace.peak_bytes) <= 2 * min(LARGE, max(sizes, default=0.0))
    events = [(op, 1, number, float(size)) for op, number, _, size in trace.takes]
    known = {number: float(size) for _, number, _, size in trace.takes}
    events += [(op, 0, number, known[number]) for op, number in trace.gives if number in known]
    found: dict[int, float] = {}
    live = high = 0.0
    for op, taken, _, size in sorted(events):
        if size > LARGE:
            if taken:
                found[op] = found.get(op, 0.0) + size
            continue
        live += size if taken else -size
        if taken and live > high:
            new, high = min(size, live - high), live
            if not kept and size >= LEAST:
                found[op] = found.get(op, 0.0) + new
    return {op: size for op, size in found.items() if not trace.ops[op].name.startswith("stretto::")}


def bound(op: OpRecord, machine: Machine) -> str:
    """What limits the op: launch, bandwidth, gather latency or compute."""
    limits = ceilings(op, machine)
    return max(limits, key=lambda kind: limits[kind])


def op_seconds(op: OpRecord, machine: Machine) -> float:
    """Predicted time of one op inside a model, its share of Python and autograd included."""
    limits = ceilings(op, machine)
    work = max((s for kind, s in limits.items() if kind != "launch"), default=0.0)
    return 0.0 if op.cost.family == "view" else machine.host + work


def step_seconds(ops: Iterable[OpRecord], machine: Machine) -> float:
    """Predicted time of a step; of a whole trace with the clearing of new memory, unless this process keeps it."""
    clears = isinstance(ops, Trace) and not memory.is_kept()
    new = sum(fresh_bytes(ops).values()) / machine.fresh if clears else 0.0  # type: ignore[arg-type]
    return sum(op_seconds(op, machine) for op in ops) + new


@dataclass(frozen=True)
class Depth:
    """The longest chain of dependent ops."""

    steps: float  # of an ideal parallel machine
    launches: int  # kernels that wait for one another
    symbolic: str  # the chain's log terms, for one that counts widths as numbers


def depth(trace: Trace, max_degree: int) -> Depth:
    """Critical path over the data dependencies of the trace (numeric sizes)."""
    degree: Any = {DEGREE: max(max_degree, 2)}
    kept: dict[int, float] = {}
    steps: list[float] = []
    launches: list[int] = []
    before: list[int | None] = []
    for op in trace.ops:
        value = op.cost.depth
        if isinstance(value, sympy.Expr):
            known = kept.get(id(value))
            if known is None:
                known = kept[id(value)] = float(value.subs(degree))
            value = known
        last = max(op.deps, key=lambda i: steps[i], default=None)
        steps.append(float(value) + (steps[last] if last is not None else 0.0))
        launches.append(int(op.cost.family != "view") + max((launches[i] for i in op.deps), default=0))
        before.append(last)
    if not steps:
        return Depth(0.0, 0, "0")
    at: int | None = max(range(len(steps)), key=lambda i: steps[i])
    trees = plain = 0.0
    while at is not None:
        value = trace.ops[at].cost.depth
        if isinstance(value, sympy.Expr):
            trees += 1
            plain += 1
        else:
            plain += float(value)
        at = before[at]
    return Depth(max(steps), max(launches), f"{trees:.0f} log d + {plain:.0f}")
