"""profile(model, data): every op of a step with its time, what it could reach, and what is worth changing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from stretto.errors import expect, told_by
from stretto.machine.file import Machine
from stretto.observe import this_machine
from stretto.observe.inputs import first_batch, is_loader, refuse_a_list
from stretto.observe.predict import least_seconds, needs
from stretto.observe.put_back import no_optimizer, put_back
from stretto.observe.specs import matrices
from stretto.observe.trace import OpRecord, Trace
from stretto.observe.workload import MODES, Workload
from stretto.page.document import Document
from stretto.page.text import duration
from stretto.profile.surroundings import anomaly_remarks

HOT = 0.9


@dataclass
class Group:
    """Calls of one op with one set of types, layouts and shapes in one phase."""

    name: str
    family: str
    phase: str
    shapes: str
    dtypes: str
    layout: str
    strides: str = ""  # of the first call
    paths: list[str] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    share: float = 0.0  # of the time of all groups: inside ops, without views
    bound: str = ""
    reached: float = 0.0  # least time by the ceilings over its time: above 1 a ceiling was measured too low

    @property
    def attainable(self) -> float:
        """Share of what the machine's ceilings allow. Where it would be above 1, the ceiling was measured too low."""
        return min(1.0, self.reached)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ops are positions in the trace."""
        calls = len(self.ops)
        per_second = 1e-9 / self.seconds if self.seconds else 0.0
        return {
            "op": self.name, "family": self.family, "phase": self.phase, "shapes": self.shapes, "dtypes": self.dtypes,
            "layout": self.layout, "strides": self.strides, "modules": self.paths, "calls": calls,
            "ms": self.seconds * 1e3, "share": self.share, "flops": self.flops, "bytes": self.bytes,
            "bound": self.bound, "attainable": self.attainable,
            "gflop_per_s": self.flops * per_second, "gb_per_s": self.bytes * per_second,
        }  # fmt: skip


@dataclass(repr=False)
class Profile(Document):
    """A timed trace, grouped. The stages follow one another: hot, roofline, replay, recommend, apply."""

    workload: Workload
    trace: Trace
    machine: Machine
    groups: list[Group]  # the slowest first
    model: str = ""
    replays: list[dict[str, Any]] = field(default_factory=list)
    advice: list[dict[str, Any]] = field(default_factory=list)
    applied: dict[str, Any] = field(default_factory=dict)
    share: float = HOT  # of the time inside ops, views aside, that the hot groups take
    new_graphs: bool = False  # each step has another graph, which an accelerated layer must sort first
    remarks: list[str] = field(default_factory=list)  # what one must know before believing the numbers
    failure: BaseException | None = None  # that ended a script before enough was seen

    def hot(self, share: float | None = None) -> list[Group]:
        """The smallest set of groups that covers `share` of the time inside ops, views aside. None: the profile's."""
        share = self.share if share is None else share
        number = isinstance(share, (int, float)) and 0 < share <= 1
        expect(number, f"hot: 'share' is {share!r}, wanted a number, 0 < share <= 1")
        total, result = 0.0, []
        whole = sum(group.seconds for group in self.groups)
        for group in self.groups:
            if total >= share * whole:
                break
            result.append(group)
            total += group.seconds
        return result

    def roofline(self) -> list[dict[str, Any]]:
        """One point per group: intensity, rate, what bounds it and its share of that."""
        return [
            {
                "op": g.name, "phase": g.phase, "shapes": g.shapes, "intensity": g.flops / g.bytes if g.bytes else 0.0,
                "flop_per_s": g.flops / g.seconds, "byte_per_s": g.bytes / g.seconds, "bound": g.bound,
                "attainable": g.attainable, "reached": g.reached, "share": g.share,
            }
            for g in self.groups
            if g.seconds > 0 and g.family != "view"
        ]  # fmt: skip

    def replay(self, **options: Any) -> list[dict[str, Any]]:
        """Hot ops again, alone, with the indices they had in the model and with shuffled ones."""
        from stretto.profile.replay import replay

        with put_back(self.workload.model):
            self.replays = replay(self, **options)
        return self.replays

    def recommend(self, **options: Any) -> list[dict[str, Any]]:
        """What to change, by call site, with the predicted gain; "nothing to gain" is an answer."""
        from stretto.profile.recommend import recommend

        with put_back(self.workload.model):
            self.advice = recommend(self, **options)
        return self.advice

    def apply(self, **options: Any) -> dict[str, Any]:
        """Apply what was recommended, check the outputs, and measure the step against the sum predicted."""
        from stretto.profile.recommend import apply

        with put_back(self.workload.model):
            self.applied = apply(self, **options)
        return self.applied

    def table(self, share: float | None = None) -> list[dict[str, Any]]:
        """The hot groups as rows."""
        return [group.to_dict() for group in self.hot(share)]

    def layers(self) -> dict[str, float]:
        """Seconds of a plain step by module, host code included, the slowest first. They add up to the step."""
        trace = self.trace
        # Between ops a tracer is busy itself: what is left of a plain step is shared out as the traced one was.
        inside = min(1.0, trace.step_seconds / trace.op_seconds) if trace.op_seconds else 0.0
        between = self.host_seconds / trace.host_seconds if trace.host_seconds else 0.0
        result: dict[str, float] = {}
        for op in trace:
            result[op.path] = result.get(op.path, 0.0) + op.seconds * inside
        for (path, _), seconds in trace.host.items():
            result[path] = result.get(path, 0.0) + seconds * between
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    @property
    def host_seconds(self) -> float:
        """What a plain step spends outside ops: Python, autograd, the dispatcher."""
        return max(0.0, self.trace.step_seconds - self.trace.op_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values."""
        t = self.trace
        return {
            "model": self.model,
            "mode": self.workload.mode,
            "step_ms": t.step_seconds * 1e3,
            "ops": len(t.ops),
            "launches": t.launches,
            "attributed": t.attributed,
            "in_ops": t.in_ops,
            "host_ms": self.host_seconds * 1e3,
            "overhead": t.traced_seconds / t.step_seconds if t.step_seconds else 0.0,
            "flops": float(t.flops),
            "bytes": float(t.bytes),
            "peak_bytes": t.peak_bytes,
            "unknown_ops": t.unknown,
            "hot": len(self.hot()),
            "hot_share": self.share,
            "groups": [group.to_dict() for group in self.groups],
            "layers_ms": {path: seconds * 1e3 for path, seconds in self.layers().items()},
            "roofline": self.roofline(),
            "replays": self.replays,
            "advice": self.advice,
            "applied": self.applied,
            "remarks": self.remarks,
            "machine": self.machine.to_dict(),
        }

    def page(self) -> str:
        """The page of the profile."""
        from stretto.profile.page import profile_page

        return profile_page(self)

    def __str__(self) -> str:
        lines = [
            f"{self.model}, {self.workload.mode}: {duration(self.trace.step_seconds)} a step, "
            f"{self.trace.launches} kernels, {self.trace.attributed:.1%} attributed",
            *self.remarks,
        ]
        for g in self.hot():
            where = ", ".join(p or "model" for p in g.paths[:3])
            lines.append(
                f"{g.share:6.1%} {g.seconds * 1e3:9.3f} ms  {g.name} [{g.shapes}] {g.phase} in {where}: {g.bound}"
            )
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows


@told_by("profile", "analyze")
def profile(
    model: nn.Module,
    data: Any,
    *,
    mode: str = "train",
    step: Callable[[nn.Module, Any], Any] | None = None,
    repeats: int = 5,
    machine: Machine | str | Path = "auto",
) -> Profile:
    """Time every op of one step of `model` on `data`; plain and traced steps take turns.

    data: a PyG Data or HeteroData, a loader (its first batch), or what forward takes, as a tuple or as a dict by name.
    step(model, data) -> loss replaces the default; it steps no optimizer, for the model is left as it is.
    """
    expect(isinstance(model, nn.Module), f"profile: 'model' is {type(model).__name__}, wanted a Module")
    expect(mode in MODES, f"profile: 'mode' is {mode!r}, wanted one of {', '.join(MODES)}")
    expect(step is None or callable(step), f"profile: 'step' is {step!r}, wanted a function")
    expect(type(repeats) is int and repeats >= 1, f"profile: 'repeats' is {repeats!r}, wanted at least 1")
    refuse_a_list(data, "profile")
    remarks: tuple[str, ...] = ()
    # Our own loader's batches come with their graph.
    new_graphs = is_loader(data) and not type(data).__module__.startswith("stretto.")
    if is_loader(data):
        data, remarks = first_batch(data, "profile")
    workload = Workload(model, data, mode, step)
    with put_back(model), no_optimizer():
        trace = workload.timed(repeats=repeats)
    result = make(workload, trace, this_machine.get(machine, device=workload.device), type(model).__name__)
    result.remarks, result.new_graphs = [*remarks, *anomaly_remarks(trace)], new_graphs
    return result


def make(workload: Workload, trace: Trace, machine: Machine, name: str) -> Profile:
    """A Profile from a timed trace."""
    return Profile(workload, trace, machine, groups(trace, machine), name)


def _layout(op: OpRecord) -> str:
    def contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
        expected = 1
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    words = ["c" if contiguous(s.shape, s.stride) else "e" if 0 in s.stride else "s" for s in op.inputs]
    return "".join(words)  # contiguous, expanded or strided, one letter per tensor


def _strides(op: OpRecord) -> str:
    if not op.inputs:
        return _of_matrices(op)
    return ", ".join("x".join(map(str, spec.stride)) or "scalar" for spec in op.inputs)


def _of_matrices(op: OpRecord) -> str:
    """The word "sparse" for each matrix of an op without dense inputs: a matrix has neither a type nor strides here."""
    return ", ".join("sparse" for _ in matrices((op.args, op.kwargs)))


def groups(trace: Trace, machine: Machine) -> list[Group]:
    """Ops merged by name, types, layout, shapes and phase; views belong to no group."""
    table: dict[Any, Group] = {}
    limits: dict[Any, dict[str, float]] = {}
    least: dict[Any, float] = {}
    for op in trace:
        if op.cost.family == "view":
            continue
        dtypes = ", ".join(str(spec.dtype).removeprefix("torch.") for spec in op.inputs) or _of_matrices(op)
        key = (op.name, dtypes, _layout(op), op.shapes, op.phase)
        group = table.setdefault(key, Group(op.name, op.cost.family, op.phase, op.shapes, dtypes, key[2], _strides(op)))
        group.ops.append(op.index)
        if op.path not in group.paths:
            group.paths.append(op.path)
        group.seconds += op.seconds
        group.flops += float(op.cost.flops)
        group.bytes += float(op.cost.bytes)
        least[key] = least.get(key, 0.0) + least_seconds(op, machine)
        total = limits.setdefault(key, {})
        for kind, seconds in needs(op, machine).items():
            total[kind] = total.get(kind, 0.0) + seconds
    whole = sum(group.seconds for group in table.values()) or 1.0
    for key, group in table.items():
        group.share = group.seconds / whole
        group.bound = max(limits[key], key=lambda kind: limits[key][kind])
        group.reached = least[key] / group.seconds if group.seconds else 0.0
    return sorted(table.values(), key=lambda g: -g.seconds)
