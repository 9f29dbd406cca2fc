"""A step to look at: a model, its data, train or infer. Knows how to run itself plain, traced and timed."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.errors import StrettoError, expect, fail
from stretto.machine.timing import waiter
from stretto.observe.nested import leaves
from stretto.observe.peak_memory import unpooled
from stretto.observe.put_back import put_back
from stretto.observe.trace import Recorder, Trace, device_of

MODES = ("train", "infer")
IGNORED = -1  # a label that says that there is none
ATTEMPTS = 4  # at a trace that the timed steps repeat
# What a forward argument may be called in the data.
ALIASES = {
    "edge_weight": ("edge_weight",),
    "edge_attr": ("edge_attr", "edge_weight"),
    "h": ("x",),
    "adj": ("edge_index",),
}


class LabelError(StrettoError):
    """A label that the output has no column for."""


@dataclass
class Workload:
    """One step of `model` on `data`. step(model, data) -> loss or output replaces the default one.

    labels: the least and the largest label of the data that `data` is a probe of, where it has any.
    """

    model: nn.Module
    data: Any
    mode: str = "train"
    step: Callable[[nn.Module, Any], Any] | None = None
    labels: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        expect(self.mode in MODES, f"analyze: 'mode' is {self.mode!r}, wanted one of {', '.join(MODES)}")
        expect(self.step is None or callable(self.step), f"analyze: 'step' is {self.step!r}, wanted a function")
        expect(isinstance(self.model, nn.Module), f"analyze: 'model' is {type(self.model).__name__}, wanted a Module")

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return device_of(self.model)

    def copied(self) -> Workload:
        """The same step of a copy of its model."""
        return replace(self, model=copy.deepcopy(self.model))

    def run(self, recorder: Recorder | None = None) -> None:
        """One step; gradients are cleared before it."""
        training = self.model.training
        self.model.train(self.mode == "train")
        self.model.zero_grad(set_to_none=True)
        try:
            if self.mode == "infer":
                with torch.no_grad():
                    self._forward()
                return
            with torch.enable_grad():
                loss = scalar(self._forward(), self.data, self.labels)
            if recorder is not None:
                recorder.phase = "backward"
            if loss.requires_grad:
                loss.backward()
                if recorder is not None:
                    recorder.backward_ended()
        finally:
            self.model.train(training)

    def _forward(self) -> Any:
        if self.step is not None:
            return self.step(self.model, self.data)
        return self.model(*arguments(self.model, self.data), **keywords(self.model, self.data))

    def trace(self, *, pooled: bool = False) -> Trace:
        """Everything but time. pooled: the very ops of a plain step; memory is then counted with what a pool keeps."""
        self.run()  # caches and lazy parameters are made outside the trace
        recorder = Recorder(self.model)
        with nullcontext() if pooled else unpooled(), recorder.recording():
            self.run(recorder)
        self.model.zero_grad(set_to_none=True)
        return recorder.trace

    def timed(self, *, repeats: int = 5, warmup: int = 2) -> Trace:
        """The trace with the median time of every op; plain and traced steps take turns. The model stays as it is."""
        with put_back(self.model):
            return self._timed(repeats, warmup)

    def _timed(self, repeats: int, warmup: int) -> Trace:
        peak = self.trace().peak_bytes
        for _ in range(max(1, warmup)):
            self.run()
        for attempt in range(ATTEMPTS):
            trace = self.trace(pooled=True)
            plain, passes = self._passes(repeats)
            if attempt == ATTEMPTS - 1 or any(same_ops(trace, p) for p in passes):
                break  # otherwise the tuner was still trying plans: each has its own ops
        trace.peak_bytes = peak
        merge_times(trace, passes, plain)
        return trace

    def _passes(self, repeats: int) -> tuple[list[float], list[Recorder]]:
        """Seconds of plain steps, and as many light traces, in turns."""
        plain: list[float] = []
        passes: list[Recorder] = []
        wait = waiter(self.device)
        gc.collect()
        for _ in range(repeats):
            start = time.perf_counter()
            self.run()
            if wait is not None:
                wait()
            plain.append(time.perf_counter() - start)
            recorder = Recorder(self.model, full=False)
            with recorder.recording():
                self.run(recorder)
            passes.append(recorder)
        self.model.zero_grad(set_to_none=True)
        return plain, passes


def same_ops(trace: Trace, light: Recorder) -> bool:
    """Whether a light pass ran the ops of the trace."""
    return [name for name, _, _ in light.times] == [op.name for op in trace]


def merge_times(trace: Trace, passes: list[Recorder], plain: list[float]) -> None:
    """Put the times of light passes into the full trace, op by op; passes that ran other ops do not count."""
    same = [p for p in passes if same_ops(trace, p)]
    if not same:
        counts = [len(p.times) for p in passes]
        fail(f"profile: the step runs other ops each time ({len(trace.ops)} ops, then {counts})")
    for i, op in enumerate(trace.ops):
        op.typical = statistics.median(p.times[i][1] for p in same)
    # One pass as a whole, so that its parts add up: the one whose ops took what they usually take.
    chosen = min(same, key=lambda p: sum(abs(p.times[i][1] - op.typical) for i, op in enumerate(trace.ops)))
    for i, op in enumerate(trace.ops):
        op.seconds = chosen.times[i][1]
        where = (op.path, op.phase)
        trace.host[where] = trace.host.get(where, 0.0) + chosen.times[i][2]
    if chosen.ending:
        trace.host["", "backward"] = trace.host.get(("", "backward"), 0.0) + chosen.ending
    trace.traced_seconds, trace.tracer_seconds = chosen.trace.traced_seconds, chosen.own
    trace.tail_seconds = chosen.trace.tail_seconds
    trace.step_seconds = statistics.median(plain)


def scalar(out: Any, data: Any, labels: tuple[int, int] | None = None) -> Tensor:
    """A loss: of a scalar itself, cross entropy over the train mask where there are labels for it, else a sum.

    Of a dict the sum over its values, of a tuple or list that of the first that has a tensor. labels: the range that
    the output must have columns for, where `data` are not all there are.
    """
    if isinstance(out, dict):
        values = [scalar(v, None) for v in out.values() if _has_tensor(v)]
        out = sum(values, torch.zeros(())) if values else None
    elif isinstance(out, (tuple, list)):
        return scalar(next((v for v in out if _has_tensor(v)), None), data, labels)
    if not isinstance(out, Tensor):
        fail(f"analyze: a step gives {type(out).__name__}, wanted a tensor to take gradients of; pass step=")
    if out.dim() == 0:
        return out
    if not has_labels(out, data):
        return out.sum()
    if labels is not None and not (labels[0] >= 0 and labels[1] < out.size(1)):
        _no_column(out, *labels)
    mask = train_mask(data)
    rows, y = (out, data.y) if mask is None else (out[mask], data.y[mask])
    try:
        return F.cross_entropy(rows, y, ignore_index=IGNORED)
    except IndexError:  # asking beforehand would be an op of the step
        _no_column(out, int(y.min()), int(y.max()))


def _no_column(out: Tensor, low: int, high: int) -> NoReturn:
    raise LabelError(
        f"analyze: 'y' has labels from {low} to {high}, but the model's output has {out.size(1)} columns, one for each "
        f"class from 0 ({IGNORED} is no label); pass step= if 'y' is something else"
    )


def labels_of(data: Any) -> tuple[int, int] | None:
    """The least and the largest label that a loss is taken of."""
    y, mask = getattr(data, "y", None), train_mask(data)
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
        return None
    y = y if mask is None or len(mask) != len(y) else y[mask]
    y = y[y != IGNORED]
    return (int(y.min()), int(y.max())) if y.numel() else None


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves(value))


def has_labels(out: Any, data: Any) -> bool:
    """Whether the data has a class for each row of the output, and there are several."""
    y = getattr(data, "y", None)
    if not isinstance(y, Tensor) or not isinstance(out, Tensor) or y.dim() != 1 or y.is_floating_point():
        return False
    return out.dim() == 2 and len(y) == len(out) and out.size(1) > 1


def train_mask(data: Any) -> Tensor | None:
    """The data's mask over nodes; a list of places, or masks of several splits side by side, are none."""
    mask = getattr(data, "train_mask", None)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 1:
        return None
    return mask if mask.numel() == data.num_nodes else None


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Its parameters. Looked up in every step: asking Python anew took a twentieth of a small one."""
    return tuple(inspect.signature(function).parameters.values())


def _forward_parameters(model: nn.Module) -> tuple[inspect.Parameter, ...]:
    """What forward takes, itself not included."""
    bound = hasattr(model.forward, "__func__")
    return _parameters(getattr(model.forward, "__func__", model.forward))[int(bound) :]


def _plain_parameters(model: nn.Module) -> tuple[inspect.Parameter, ...]:
    """What forward takes by position."""
    known = _forward_parameters(model)
    plain = tuple(p for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    if not plain and any(p.kind is p.VAR_POSITIONAL for p in known):  # Sequential of PyG hides its signature
        plain = tuple(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("x", "edge_index"))
    return plain


def names_of(model: nn.Module) -> list[str]:
    """Names of the arguments of forward."""
    return [parameter.name for parameter in _plain_parameters(model)]


def arguments(model: nn.Module, data: Any) -> list[Any]:
    """What to call the model with: data's attributes by the names of forward's parameters, or the data itself."""
    if isinstance(data, (tuple, list)):
        return _in_order(model, data)
    if isinstance(data, dict):
        return [] if by_name(model, data) else [data]
    result: list[Any] = []
    plain = _plain_parameters(model)
    for parameter in plain:
        value = _called(data, parameter.name)
        if value is not None:
            result.append(value)
        elif parameter.default is not inspect.Parameter.empty:
            break
        elif len(plain) == 1:
            return [data]
        else:
            _lacks(model, parameter)
    return result


def keywords(model: nn.Module, data: Any) -> dict[str, Any]:
    """The same of what forward takes by name alone."""
    if isinstance(data, (tuple, list)):
        return {}
    if isinstance(data, dict):
        return data if by_name(model, data) else {}
    result: dict[str, Any] = {}
    for parameter in _forward_parameters(model):
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        value = _called(data, parameter.name)
        if value is not None:
            result[parameter.name] = value
        elif parameter.default is inspect.Parameter.empty:
            _lacks(model, parameter)
    return result


def _in_order(model: nn.Module, values: Any) -> list[Any]:
    """Arguments of forward as they come: as many as it takes."""
    known = _forward_parameters(model)
    plain = _plain_parameters(model)
    least = sum(parameter.default is inspect.Parameter.empty for parameter in plain)
    several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in known)
    if not (min(least, 1) if several else least) <= len(values) <= (len(values) if several else len(plain)):
        fail(
            f"analyze: 'data' is a {type(values).__name__} of {len(values)}, wanted what forward of "
            f"{type(model).__name__} takes: {', '.join(names_of(model)) or 'nothing'}"
        )
    return list(values)


def by_name(model: nn.Module, values: dict[Any, Any]) -> bool:
    """Whether a dict is the arguments of forward by name; otherwise it is the only one that forward takes."""
    known = _forward_parameters(model)
    named = [p for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = {p.name for p in named if p.default is inspect.Parameter.empty}
    any_name = any(p.kind is p.VAR_KEYWORD for p in known)
    if needed <= values.keys() and (any_name or values.keys() <= {p.name for p in named}):
        return True
    if len(_plain_parameters(model)) != 1:
        fail(
            f"analyze: 'data' is a dict of {', '.join(map(str, values)) or 'nothing'}, wanted what forward of "
            f"{type(model).__name__} takes by name: {', '.join(p.name for p in named)}"
        )
    return False


def _called(data: Any, name: str) -> Any:
    """What the data has for a parameter of this name; None: nothing."""
    hetero = {"x": "x_dict", "edge_index": "edge_index_dict"} if hasattr(data, "node_types") else {}
    present = (getattr(data, known, None) for known in (hetero.get(name, name), *ALIASES.get(name, ())))
    return next((v for v in present if v is not None and not callable(v)), None)


def _lacks(model: nn.Module, parameter: inspect.Parameter) -> NoReturn:
    fail(
        f"analyze: forward of {type(model).__name__} wants {parameter.name!r}, which the data does not have; "
        "pass step=lambda model, data: ..."
    )
