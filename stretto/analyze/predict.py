"""From counts to time: T = max(flops / rate, bytes / bandwidth, random bytes / gather bandwidth) + host, per op.

Every rate depends on where the operands are: an op finds them near if it or another has just used them, far if the step
has touched more since than the caches hold. The trace tells how much that is (`farness`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stretto import memory
from stretto.analyze.machine_file import Machine, Table, near, near_row
from stretto.analyze.specs import matrices, tensors
from stretto.analyze.trace import OpRecord, Trace

INDEX = 8  # bytes of an entry of torch's indices
WAITS = ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select")  # a host needs their results


def ceilings(op: OpRecord, machine: Machine, far: float = 0.0) -> dict[str, float]:
    """Seconds that each resource alone would need; the largest bounds the op. far: share of operands from memory."""
    cost = op.cost
    if cost.family == "view":
        return {"launch": 0.0}
    flops, stream, random = float(cost.flops), float(cost.stream), float(cost.random)
    row, span = float(cost.row), float(cost.span)
    found = {"launch": machine.launch}
    if cost.family == "gemm":
        own = op.name.startswith("stretto::") and machine.own_gemm
        found["compute"] = flops / near_row(own or machine.gemm, flops, row, far)
        found["bandwidth"] = stream / near(machine.stream, stream, far)
    elif cost.family == "scatter":
        moved = random / (2 if flops else 1)
        table = machine.scatter_max if _extremum(op) else machine.scatter
        beyond = _beyond(stream, moved, row, machine, far)
        spread = span if machine.device == "cuda" else moved  # probing.py: _added
        found["gather latency"] = moved / near_row(table, row, spread, far) + beyond + _mask(op, machine, far)
    elif cost.family in ("spmm", "sddmm") and random:
        found["gather latency"] = _read_again(machine.spmm, random, row, span, far)
        found["bandwidth"] = stream / near(machine.stream, stream, far)
    elif cost.family == "attention":
        curve = machine.attention_grad if op.name.endswith("_grad") else machine.attention
        edges = max(1.0, float(matrices(op.args)[0].num_edges))
        found["gather latency"] = _read_again(machine.spmm, random, row, span, far)
        found["compute"] = flops / near(curve, flops / edges, far)
    elif random:
        seconds = _read_again(machine.gather, random, row, span, far)
        again = max(0.0, random - span)  # of these the results alone are far away
        if again:
            seconds += again / near(machine.stream, again, far) - again / near(machine.stream, again)
        beyond = _beyond(stream, random, row, machine, far)
        found["gather latency"] = seconds + beyond + _mask(op, machine, far)
    elif cost.family == "reduce" and row:
        found["bandwidth"] = stream / near(machine.reduce_last, row, far)
    elif cost.family == "reduce":
        found["bandwidth"] = stream / near(machine.reduce, stream, far)
    elif cost.family == "softmax":
        first = tensors(op.args)[0]
        curve = (machine.softmax_grad if "backward" in op.name else ()) or machine.softmax
        found["compute"] = float(first.numel) / near(curve, float(first.shape[-1]), far)
    elif cost.family == "draw":
        found["compute"] = sum(float(spec.numel) for spec in op.outputs) / machine.draw
    elif cost.family == "sort":
        found["compute"] = flops / machine.sort
    else:
        found["bandwidth"] = stream / near(machine.stream, stream, far)
    return found


def _read_again(table: Table, random: float, row: float, span: float, far: float) -> float:
    """Seconds to read rows of so many bytes again and again: first where they are, then where that left them."""
    first = min(random, span)
    return first / near_row(table, row, span, far) + (random - first) / near_row(table, row, span)


def _extremum(op: OpRecord) -> bool:
    return "scatter_reduce" in op.name and not any(a in ("sum", "mean") for a in op.args if isinstance(a, str))


def _mask(op: OpRecord, machine: Machine, far: float) -> float:
    """Seconds to find the places of masks that stand where an index would."""
    found = [spec for spec in tensors(op.args)[1:] if spec.dtype == torch.bool]
    return sum(float(spec.numel) / near(machine.mask, float(spec.numel), far) for spec in found)


def _beyond(stream: float, moved: float, row: float, machine: Machine, far: float) -> float:
    """Seconds of the bytes in order that a rate of random rows does not have in it: it has the rows and their index."""
    more = stream - moved * (1 + INDEX / max(row, 1.0))
    return max(0.0, more) / near(machine.stream, more, far)


def touched_since(trace: Trace) -> list[list[float]]:
    """Op by op, for each input and then each output: bytes that the step touched since that memory was last used.

    It is counted from the middle of one op to the middle of the next: of an operand larger than the caches, the first
    bytes are gone when the last are used. What the step has not used yet was last used a whole step ago. A result takes
    the memory of the last one of its size that was freed, as allocators do.
    """
    sizes = [sum(float(spec.nbytes) for spec in (*op.inputs, *op.outputs)) for op in trace.ops]
    whole, position = sum(size for op, size in zip(trace.ops, sizes, strict=True) if op.cost.family != "view"), 0.0
    taken = {number: (spec.key if spec is not None else 0, float(size)) for _, number, spec, size in trace.takes}
    given: dict[int, list[int]] = {}
    for index, number in trace.gives:
        given.setdefault(index, []).append(number)
    last: dict[int, float] = {}
    free: dict[float, list[float]] = {}
    found: list[list[float]] = []
    for op, size in zip(trace.ops, sizes, strict=True):
        for number in given.get(op.index, ()):
            key, held = taken.get(number, (0, 0.0))
            if key in last:
                free.setdefault(held, []).append(last.pop(key))
        for spec in op.outputs:
            if spec.key not in last and free.get(float(spec.nbytes)):
                last[spec.key] = free[float(spec.nbytes)].pop()
        used = [*op.inputs, *op.outputs]
        through = 0.0 if op.cost.family == "view" else size
        middle = position + through / 2
        found.append([middle - last[spec.key] if spec.key in last else whole for spec in used])
        position += through
        if through:
            last.update((spec.key, middle) for spec in used)
    return found


def farness(trace: Trace, machine: Machine) -> list[float]:
    """Op by op, the share of its operands that must come from memory."""
    found: list[float] = []
    for op, touched in zip(trace.ops, touched_since(trace), strict=True):
        sizes = [float(spec.nbytes) for spec in (*op.inputs, *op.outputs)]
        weighed = sum(size * machine.far(since) for size, since in zip(sizes, touched, strict=True))
        found.append(weighed / sum(sizes) if sum(sizes) else 0.0)
    return found


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


def op_seconds(op: OpRecord, machine: Machine, far: float = 0.0, away: float = 0.0) -> float:
    """Predicted time of one op inside a model. far: of its operands; away: the same of its code, a step ago."""
    limits = ceilings(op, machine, far)
    work = max((s for kind, s in limits.items() if kind != "launch"), default=0.0)
    host = machine.host + (machine.host_far - machine.host) * away
    if op.name.startswith("stretto::"):
        host += machine.kernel + (machine.kernel_far - machine.kernel) * away
    return host + work


def times(trace: Trace, machine: Machine) -> list[float]:
    """Predicted seconds of every op of a step, its share of Python and autograd included."""
    away = machine.far(sum(float(s.nbytes) for op in trace for s in (*op.inputs, *op.outputs)))
    return [op_seconds(op, machine, far, away) for op, far in zip(trace.ops, farness(trace, machine), strict=True)]


def clearing(trace: Trace, machine: Machine, *, kept: bool | None = None) -> dict[int, float]:
    """Op -> seconds of clearing new memory for its results; none where the process keeps what is freed (None: this
    one, now)."""
    if machine.device == "cuda" or (memory.is_kept() if kept is None else kept):
        return {}
    return {op: size / machine.fresh for op, size in fresh_bytes(trace).items()}


def step_seconds(trace: Trace, machine: Machine) -> float:
    """Predicted time of a step, with the clearing of new memory unless this process keeps it."""
    if machine.device == "cuda":
        return _on_card(trace, machine)
    return sum(times(trace, machine)) + sum(clearing(trace, machine).values())


def shares(trace: Trace, machine: Machine, on_edges: Sequence[bool]) -> dict[str, Any]:
    """Seconds of a step, of its ops on edges without the host code around them, and of that code around all ops.

    on_edges: op by op.
    """
    new = clearing(trace, machine)
    each = [one + new.get(op.index, 0.0) for op, one in zip(trace.ops, times(trace, machine), strict=True)]
    return {
        "step": step_seconds(trace, machine),
        "on_edges": sum(one - machine.host for one, yes in zip(each, on_edges, strict=True) if yes),
        "around": machine.host * len(trace.ops),
    }


def _on_card(trace: Trace, machine: Machine) -> float:
    """The host enqueues one op after the other and the card works through them; a mask makes the host wait for it."""
    host = card = 0.0
    for op, far in zip(trace.ops, farness(trace, machine), strict=True):
        work = max((s for kind, s in ceilings(op, machine, far).items() if kind != "launch"), default=0.0)
        host += op_seconds(op, machine, far) - work
        if op.cost.family != "view":
            card = max(card, host) + work
        if op.name in WAITS or (any(spec.dtype == torch.bool for spec in op.inputs[1:]) and op.cost.random):
            host = max(host, card)
    return max(host, card)
