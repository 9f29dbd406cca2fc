"""Hot ops again, outside the model: with the very indices they had there, and with the same indices shuffled.

The time of an op that follows an index depends on the index. A replay with random ones would measure another op.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stretto.analyze.trace import Recorder
from stretto.tune.timing import Timing, measure

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

REPEATS = 20


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


def replay(profile: Profile, *, share: float = 0.9, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per hot group: in the model, alone with its indices, alone with shuffled ones, in milliseconds.

    All ops take turns, as they do in the model: one op again and again would find its operands in the cache.
    """
    groups = profile.hot(share)
    captured = capture(profile, groups)
    slowest = [max(group.ops, key=lambda i: profile.trace.ops[i].seconds) for group in groups]
    table = {
        (at, name): call
        for at, index in enumerate(slowest)
        if index in captured
        for name, call in calls(*captured[index]).items()
    }
    keys = {f"{at} {name}": (at, name) for at, name in table}
    if not keys:
        return []
    with torch.no_grad():
        taken = measure({word: table[key] for word, key in keys.items()}, repeats=repeats, warmup=2)
    timings: dict[tuple[int, str], Timing] = {key: taken[word] for word, key in keys.items()}
    rows: list[dict[str, Any]] = []
    for at, (group, index) in enumerate(zip(groups, slowest, strict=True)):
        mine = {name: timing for (which, name), timing in timings.items() if which == at}
        if not mine:
            continue
        args = captured[index][1]
        places = next((v for a in args for v in (a if isinstance(a, (list, tuple)) else (a,)) if is_index(v)), None)
        op = profile.trace.ops[index]
        inside = op.typical or op.seconds
        rows.append(
            {
                "op": group.name, "phase": group.phase, "shapes": group.shapes, "in model ms": inside * 1e3,
                **{name: timing.to_dict() for name, timing in mine.items()},
                "ratio": mine["real indices"].median / inside if inside else None,
                "index": None if places is None else fingerprint(places),
            }
        )  # fmt: skip
    return rows
