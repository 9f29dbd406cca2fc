"""Hot ops again, outside the model: with the very indices they had there, and with the same indices shuffled.

The time of an op that follows an index depends on the index. A replay with random ones would measure another op.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto import memory
from stretto.analyze.predict import fresh_bytes, touched_since
from stretto.analyze.trace import OpRecord, Recorder
from stretto.kernels.attention import TENSORS, Attention
from stretto.tune.timing import Timing

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

REPEATS = 20
MODEL = "in the model"
FAR = 1 << 27  # bytes of other work after which nothing is in a cache any more


def capture(profile: Profile, groups: list[Group]) -> dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The inputs of each group's slowest call, taken from one more step. -> op index -> (function, args, kwargs)"""
    trace = profile.trace
    wanted = frozenset(max(group.ops, key=lambda i: trace.ops[i].seconds) for group in groups)
    recorder = Recorder(profile.workload.model, full=False, capture=wanted)
    with recorder.recording():
        profile.workload.run(recorder)
    profile.workload.model.zero_grad(set_to_none=True)
    return recorder.captured


def is_index(value: Any) -> bool:
    """Whether a value is a tensor of places."""
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() > 0


def shuffled(value: Any, generator: torch.Generator) -> Any:
    """The value with every index tensor inside in a random order; an expanded one stays expanded."""
    if is_index(value):
        return value[torch.randperm(value.size(0), generator=generator)] if value.stride(0) else value
    if isinstance(value, (list, tuple)):
        return type(value)(shuffled(v, generator) for v in value)
    return value


def fingerprint(index: Tensor, size: int | None = None) -> dict[str, Any]:
    """What decides the speed of an op that follows this index: sizes, counts, order, reuse. index [E]."""
    flat = index.detach().cpu().reshape(index.size(0), -1)[:, 0].numpy() if index.numel() else np.zeros(0, np.int64)
    rows = size if size is not None else (int(flat.max()) + 1 if flat.size else 0)
    counts = np.bincount(flat, minlength=rows) if flat.size else np.zeros(rows, np.int64)
    order = np.argsort(flat, kind="stable")
    gaps = np.diff(order)[np.diff(flat[order]) == 0] if flat.size else np.zeros(0)
    steps = np.diff(flat)
    return {
        "entries": int(flat.size),
        "rows": int(rows),
        "degrees": np.bincount(np.minimum(counts, 64)).tolist(),
        "sorted": float((steps >= 0).mean()) if steps.size else 1.0,
        "reuse": float(np.median(gaps)) if gaps.size else None,
        "bandwidth": float(np.abs(steps).mean()) if steps.size else 0.0,
        "hash": hashlib.sha256(flat.tobytes()).hexdigest()[:16],
    }


def regenerate(mark: dict[str, Any], *, seed: int = 0) -> Tensor:
    """An index like the one a fingerprint was taken of: the same counts of rows, as sorted as it was."""
    rng = np.random.default_rng(seed)
    degrees = np.repeat(np.arange(len(mark["degrees"])), mark["degrees"])
    degrees = degrees[rng.permutation(degrees.size)]
    rest = mark["entries"] - int(degrees.sum())
    if rest > 0:  # counts above 64 were merged: the largest rows take what is missing
        top = np.argsort(degrees)[-max(1, mark["degrees"][-1]) :]
        degrees[top] += rest // top.size
        degrees[top[0]] += rest % top.size
    index = np.repeat(np.arange(degrees.size), degrees)[: mark["entries"]]
    if mark["sorted"] < 1.0:
        loose = rng.random(index.size) < min(1.0, 2 * (1 - mark["sorted"]))
        index[loose] = rng.permutation(index[loose])
    return torch.from_numpy(index)


def calls(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """The op with its own indices and, if it has any, with shuffled ones."""
    found: dict[str, Callable[[], object]] = {"real indices": lambda: function(*args, **kwargs)}
    if any(is_index(v) or (isinstance(v, (list, tuple)) and any(map(is_index, v))) for v in args):
        generator = torch.Generator().manual_seed(0)
        other = tuple(shuffled(v, generator) for v in args)
        found["shuffled indices"] = lambda: function(*other, **kwargs)
    return found


def operands(value: Any) -> list[Tensor]:
    """Every dense tensor inside a value, in the order in which a trace lists them."""
    if isinstance(value, Tensor):
        return [value] if value.layout == torch.strided else []
    if isinstance(value, Attention):
        return [t for t in (getattr(value, name) for name in TENSORS) if t is not None]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for v in value for t in operands(v)] if isinstance(value, (list, tuple)) else []


class _Cache:
    """Puts operands as far away as they were in the model: other memory is read between their last use and the call."""

    def __init__(self) -> None:
        self.other = torch.ones(FAR // 4)
        self.at = 0

    def read(self, size: float) -> None:
        """Read so many bytes that nobody else uses, not those read last."""
        count = min(int(size), FAR) // 4
        first, rest = self.other[self.at : self.at + count], self.at + count - self.other.numel()
        first.sum()
        if rest > 0:
            self.other[:rest].sum()
        self.at = (self.at + count) % self.other.numel()

    def place(self, used: list[tuple[float, Tensor | int]], fresh: bool) -> None:
        """used: bytes touched since the tensor, or memory of so many bytes for a result, was last used.

        fresh: in the model the result was memory that the process did not have.
        """
        ordered = sorted(used, key=lambda pair: -pair[0])
        after = [*[since for since, _ in ordered[1:]], 0.0][: len(ordered)]
        if fresh:
            memory.give_back()
        for (since, what), then in zip(ordered, after, strict=True):
            if isinstance(what, Tensor):
                if since < FAR:
                    what.sum()
            elif since < FAR and not fresh:
                torch.empty(what, dtype=torch.uint8).zero_()  # freed at once: the next of this size gets it
            self.read(since - then)


def replay(profile: Profile, *, share: float = 0.9, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per hot group: in the model, alone with its indices, alone with shuffled ones, in milliseconds.

    Steps of the model and single ops take turns, so that a machine that drifts slows both; before a single op its
    operands are put where the model had them, in a cache or in memory.
    """
    groups = profile.hot(share)
    captured = capture(profile, groups)
    trace, places = profile.trace, touched_since(profile.trace)
    slowest = [max(group.ops, key=lambda i: trace.ops[i].seconds) for group in groups]
    slowest = [index for index in slowest if index in captured]
    table = {index: calls(*captured[index]) for index in slowest}
    used = {i: _used(trace.ops[i], places[i], operands(captured[i][1:])) for i in slowest}
    fresh = set() if memory.is_kept() else set(fresh_bytes(trace))
    samples: dict[tuple[int, str], list[float]] = {}
    cache, order = _Cache(), random.Random(0)
    for turn in range(repeats + 1):
        recorder = Recorder(profile.workload.model, full=False)
        with recorder.recording():
            profile.workload.run(recorder)
        same = len(recorder.times) == len(trace.ops)
        keys = [(index, name) for index, options in table.items() for name in options]
        order.shuffle(keys)
        for index, name in keys:
            cache.place(used[index], index in fresh)
            with torch.no_grad():
                start = time.perf_counter()
                table[index][name]()
                taken = time.perf_counter() - start
            if turn:
                samples.setdefault((index, name), []).append(taken)
        for index in slowest if turn and same else ():
            samples.setdefault((index, MODEL), []).append(recorder.times[index][1])
    profile.workload.model.zero_grad(set_to_none=True)
    return [_row(profile, index, captured[index][1], samples) for index in slowest]


def _used(op: OpRecord, since: list[float], inputs: list[Tensor]) -> list[tuple[float, Tensor | int]]:
    """Inputs and new results of an op with the bytes touched since that memory was last used."""
    count = len(op.inputs)
    known = {spec.key for spec in op.inputs}
    results = [
        (s, int(spec.nbytes)) for s, spec in zip(since[count:], op.outputs, strict=True) if spec.key not in known
    ]
    return [*zip(since, inputs, strict=False), *results]


def _row(profile: Profile, index: int, args: Any, samples: dict[tuple[int, str], list[float]]) -> dict[str, Any]:
    op = profile.trace.ops[index]
    mine = {name: Timing(tuple(values)) for (which, name), values in samples.items() if which == index}
    inside = mine[MODEL].median if MODEL in mine else op.typical or op.seconds
    index_in = next((v for a in args for v in (a if isinstance(a, (list, tuple)) else (a,)) if is_index(v)), None)
    return {
        "op": op.name, "phase": op.phase, "shapes": op.shapes, "in model ms": inside * 1e3,
        **{name: timing.to_dict() for name, timing in mine.items() if name != MODEL},
        "ratio": mine["real indices"].median / inside if inside else None,
        "index": None if index_in is None else fingerprint(index_in),
    }  # fmt: skip
