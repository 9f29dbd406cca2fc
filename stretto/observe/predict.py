"""From counts to time: T = max(flops / rate, bytes / bandwidth, random bytes / gather bandwidth) + host, per op.

Every rate depends on where the operands are: an op finds them near if it or another has just used them, far if the step
has touched more since than the caches hold. The trace tells how much that is (`farness`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stretto.machine import ceilings
from stretto.machine.file import Machine, Table, near, near_row
from stretto.memory import allocator
from stretto.observe.specs import matrices, tensors
from stretto.observe.trace import OpRecord, Trace

INDEX = 8  # bytes of an entry of torch's indices
WAITS = ("aten::nonzero", "aten::_local_scalar_dense", "aten::masked_select")  # a host needs their results


Needs = dict[str, float]  # resource -> seconds


def needs(op: OpRecord, machine: Machine, far: float = 0.0) -> Needs:
    """Seconds that each resource alone would need; the largest bounds the op. far: share of operands from memory."""
    family = op.cost.family
    if family == "view":
        return {"launch": 0.0}
    plain = _at_random if op.cost.random else _in_order
    priced = plain if family in ("spmm", "sddmm") and not op.cost.random else FAMILIES.get(family, plain)
    return {"launch": machine.launch, **priced(op, machine, far)}


def _in_order(op: OpRecord, machine: Machine, far: float) -> Needs:
    stream = float(op.cost.stream)
    return {"bandwidth": stream / near(machine.stream, stream, far)}


def _product(op: OpRecord, machine: Machine, far: float) -> Needs:
    flops, narrow = float(op.cost.flops), float(op.cost.row)
    own = op.ours and machine.own_gemm
    return {"compute": flops / near_row(own or machine.gemm, flops, narrow, far), **_in_order(op, machine, far)}


def _scatter(op: OpRecord, machine: Machine, far: float) -> Needs:
    stream, row = float(op.cost.stream), float(op.cost.row)
    moved = float(op.cost.random) / (2 if op.cost.flops else 1)
    table = machine.scatter_max if _extremum(op) else machine.scatter
    spread = float(op.cost.span) if machine.device == "cuda" else moved  # machine/probing.py: _added
    beyond = _beyond(stream, moved, row, machine, far)
    return {"gather latency": moved / near_row(table, row, spread, far) + beyond + _mask(op, machine, far)}


def _sparse(op: OpRecord, machine: Machine, far: float) -> Needs:
    random, row, span = float(op.cost.random), float(op.cost.row), float(op.cost.span)
    return {"gather latency": _read_again(machine.spmm, random, row, span, far), **_in_order(op, machine, far)}


def _attention(op: OpRecord, machine: Machine, far: float) -> Needs:
    curve = machine.attention_grad if op.name.endswith("_grad") else machine.attention
    edges, flops = max(1.0, float(matrices(op.args)[0].num_edges)), float(op.cost.flops)
    random, row, span = float(op.cost.random), float(op.cost.row), float(op.cost.span)
    return {
        "gather latency": _read_again(machine.spmm, random, row, span, far),
        "compute": flops / near(curve, flops / edges, far),
    }


def _at_random(op: OpRecord, machine: Machine, far: float) -> Needs:
    """Rows read at places that an index decides."""
    random, row, span = float(op.cost.random), float(op.cost.row), float(op.cost.span)
    seconds = _read_again(machine.gather, random, row, span, far)
    again = max(0.0, random - span)  # of these the results alone are far away
    if again:
        seconds += again / near(machine.stream, again, far) - again / near(machine.stream, again)
    seconds += _beyond(float(op.cost.stream), random, row, machine, far)
    return {"gather latency": seconds + _mask(op, machine, far)}


def _reduction(op: OpRecord, machine: Machine, far: float) -> Needs:
    stream, row = float(op.cost.stream), float(op.cost.row)
    rate = near(machine.reduce_last, row, far) if row else near(machine.reduce, stream, far)
    return {"bandwidth": stream / rate}


def _softmax(op: OpRecord, machine: Machine, far: float) -> Needs:
    first = tensors(op.args)[0]
    curve = (machine.softmax_grad if "backward" in op.name else ()) or machine.softmax
    return {"compute": float(first.numel) / near(curve, float(first.shape[-1]), far)}


def _draw(op: OpRecord, machine: Machine, far: float) -> Needs:
    return {"compute": sum(float(spec.numel) for spec in op.outputs) / machine.draw}


def _sort(op: OpRecord, machine: Machine, far: float) -> Needs:
    return {"compute": float(op.cost.flops) / machine.sort}


# Families of costs.py that are priced in a way of their own; the others by their bytes.
FAMILIES: dict[str, Callable[[OpRecord, Machine, float], Needs]] = {
    "gemm": _product,
    "scatter": _scatter,
    "spmm": _sparse,
    "sddmm": _sparse,
    "attention": _attention,
    "reduce": _reduction,
    "softmax": _softmax,
    "draw": _draw,
    "sort": _sort,
}


def _read_again(table: Table, random: float, row: float, span: float, far: float) -> float:
    """Seconds to read rows of so many bytes again and again: first where they are, then where that left them."""
    first = min(random, span)
    return first / near_row(table, row, span, far) + (random - first) / near_row(table, row, span)


def _extremum(op: OpRecord) -> bool:
    return "scatter_reduce" in op.name and not any(a in ("sum", "mean") for a in op.args if isinstance(a, str))


def _mask(op: OpRecord, machine: Machine, far: float) -> float:
    """Seconds to find the places of masks that stand where an index would."""
    result = [spec for spec in tensors(op.args)[1:] if spec.dtype == torch.bool]
    return sum(float(spec.numel) / near(machine.mask, float(spec.numel), far) for spec in result)


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
    inputs: dict[int, list[int]] = {}
    for index, number in trace.gives:
        inputs.setdefault(index, []).append(number)
    last: dict[int, float] = {}
    free: dict[float, list[float]] = {}
    result: list[list[float]] = []
    for op, size in zip(trace.ops, sizes, strict=True):
        for number in inputs.get(op.index, ()):
            key, saved = taken.get(number, (0, 0.0))
            if key in last:
                free.setdefault(saved, []).append(last.pop(key))
        for spec in op.outputs:
            if spec.key not in last and free.get(float(spec.nbytes)):
                last[spec.key] = free[float(spec.nbytes)].pop()
        used = [*op.inputs, *op.outputs]
        through = 0.0 if op.cost.family == "view" else size
        middle = position + through / 2
        result.append([middle - last[spec.key] if spec.key in last else whole for spec in used])
        position += through
        if through:
            last.update((spec.key, middle) for spec in used)
    return result


def farness(trace: Trace, machine: Machine) -> list[float]:
    """Op by op, the share of its operands that must come from memory."""
    result: list[float] = []
    for op, touched in zip(trace.ops, touched_since(trace), strict=True):
        sizes = [float(spec.nbytes) for spec in (*op.inputs, *op.outputs)]
        weighed = sum(size * machine.far(since) for size, since in zip(sizes, touched, strict=True))
        result.append(weighed / sum(sizes) if sum(sizes) else 0.0)
    return result


LEAST, LARGE = 128 << 10, 32 << 20  # below, the allocator keeps what it has; above, every result is new memory


def fresh_bytes(trace: Trace) -> dict[int, float]:
    """Op -> bytes of its results that the process did not have before: the system clears them page by page.

    What is freed within the step is used again. Between steps the allocator gives back what lies free on top, once
    it is more than twice the largest block it has seen (glibc's rule, which stops at 32 MiB).
    """
    sizes = [float(size) for _, _, _, size in trace.takes]
    saved = float(trace.peak_bytes) <= 2 * min(LARGE, max(sizes, default=0.0))
    events = [(op, 1, number, float(size)) for op, number, _, size in trace.takes]
    known = {number: float(size) for _, number, _, size in trace.takes}
    events += [(op, 0, number, known[number]) for op, number in trace.gives if number in known]
    result: dict[int, float] = {}
    live = high = 0.0
    for op, taken, _, size in sorted(events):
        if size > LARGE:
            if taken:
                result[op] = result.get(op, 0.0) + size
            continue
        live += size if taken else -size
        if taken and live > high:
            new, high = min(size, live - high), live
            if not saved and size >= LEAST:
                result[op] = result.get(op, 0.0) + new
    return {op: size for op, size in result.items() if not trace.ops[op].ours}


def bound(op: OpRecord, machine: Machine) -> str:
    """What limits the op: launch, bandwidth, gather latency or compute."""
    limits = needs(op, machine)
    return max(limits, key=lambda kind: limits[kind])


def op_seconds(op: OpRecord, machine: Machine, far: float = 0.0, away: float = 0.0) -> float:
    """Predicted time of one op inside a model. far: of its operands; away: the same of its code, a step ago."""
    limits = needs(op, machine, far)
    work = max((s for kind, s in limits.items() if kind != "launch"), default=0.0)
    host = machine.host + (machine.host_far - machine.host) * away
    if op.ours:
        host += machine.kernel + (machine.kernel_far - machine.kernel) * away
    return host + work


def times(trace: Trace, machine: Machine) -> list[float]:
    """Predicted seconds of every op of a step, its share of Python and autograd included."""
    away = machine.far(sum(float(s.nbytes) for op in trace for s in (*op.inputs, *op.outputs)))
    return [op_seconds(op, machine, far, away) for op, far in zip(trace.ops, farness(trace, machine), strict=True)]


def clearing(trace: Trace, machine: Machine, *, kept: bool | None = None) -> dict[int, float]:
    """Op -> seconds of clearing new memory for its results; none where the process keeps what is freed (None: this
    one, now)."""
    if machine.device == "cuda" or (allocator.is_kept() if kept is None else kept):
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
        work = max((s for kind, s in needs(op, machine, far).items() if kind != "launch"), default=0.0)
        host += op_seconds(op, machine, far) - work
        if op.cost.family != "view":
            card = max(card, host) + work
        if op.name in WAITS or (any(spec.dtype == torch.bool for spec in op.inputs[1:]) and op.cost.random):
            host = max(host, card)
    return max(host, card)


CLOSE = 1 << 14  # bytes that stay in the nearest cache


def least_seconds(op: OpRecord, machine: Machine) -> float:
    """The least time the ceilings allow for an op: as long as the one resource that needs most, all else free."""
    cost = op.cost
    if cost.family == "view":
        return 0.0
    flops, stream, random = float(cost.flops), float(cost.stream), float(cost.random)
    least = [machine.peak_launch or machine.launch]
    if stream:
        least.append(stream / ceilings.stream_rate(machine, stream))
    if random:
        row, span = float(cost.row), float(cost.span)
        close = ceilings.gather_rate(machine, row, min(span, CLOSE))
        least.append(random * (op.close / close + (1 - op.close) / ceilings.gather_rate(machine, row, span)))
    if cost.family == "draw" and machine.peak_draw:
        least.append(sum(float(spec.numel) for spec in op.outputs) / machine.peak_draw)
    if cost.family in ("gemm", "spmm", "sddmm", "attention"):
        inputs = [spec for spec in op.inputs if spec.floating]
        dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else "float32"
        least.append(flops / ceilings.flop_rate(machine, dtype))
    return max(least)
