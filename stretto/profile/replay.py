"""Hot ops again, outside the model: with the very indices they had there, and with the same indices shuffled.

The time of an op that follows an index depends on the index: a benchmark with random ones would measure another op. The
hot ops take turns, so that each finds in the caches what the others have left there, as in a step; Python, autograd and
the small ops of the model are missing, so that an op of tens of microseconds may come out faster than it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stretto.errors import expect
from stretto.kernels import has_own_memory
from stretto.machine.timing import Timing, in_a_row, measure
from stretto.observe.nested import mapped
from stretto.profile.captured import capture, is_index, operands, slowest

if TYPE_CHECKING:
    from stretto.profile.profiling import Profile

REPEATS = 20
REAL, SHUFFLED = "real indices", "shuffled indices"


def replay(profile: Profile, *, share: float = 0.9, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per hot group, of its slowest call: in the model, alone with its own indices and with shuffled ones, in
    milliseconds. An op whose inputs do not go with other indices has no shuffled side."""
    groups, device = profile.hot(share), profile.workload.device
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if has_own_memory(device) else []):
        inputs = capture(profile, groups)
        expect(bool(inputs), "replay: the step did not run its hot ops again")
        for place, group in enumerate(groups):
            at = slowest(profile, group)
            if at not in inputs:
                continue
            function, args, kwargs = inputs[at]
            calls[f"{REAL} {place}"] = _call(function, args, kwargs)
            index = next(filter(is_index, operands((args, kwargs))), None)
            if group.family in ("gather", "scatter") and index is not None:
                other = _call(function, shuffled(args), kwargs)
                if _runs(other):
                    calls[f"{SHUFFLED} {place}"] = other
        timings = measure(calls, repeats=repeats, warmup=2, device=device, sample_seconds=in_a_row(device))
    rows = []
    for place, group in enumerate(groups):
        if f"{REAL} {place}" in timings:
            inside = profile.trace.ops[slowest(profile, group)].typical
            row = {"op": group.name, "phase": group.phase, "shapes": group.shapes, "calls": len(group.ops),
                   "in model ms": inside * 1e3}  # fmt: skip
            for side in (REAL, SHUFFLED):
                if f"{side} {place}" in timings:
                    row[side] = _numbers(timings[f"{side} {place}"], inside)
            row["ratio"] = row[REAL]["ratio"]  # type: ignore[index]
            rows.append(row)
    return rows


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    return lambda: function(*args, **kwargs)


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except (IndexError, RuntimeError):  # what it makes has the size that its own indices gave it
        return False
    return True


def _numbers(timing: Timing, inside: float) -> dict[str, Any]:
    return {**timing.to_dict(), "ratio": timing.median / inside if inside else None}


def shuffled(value: Any) -> Any:
    """The value with every index tensor inside in a random order; an expanded one stays expanded."""

    def anew(leaf: Any) -> Any:
        if not is_index(leaf):
            return leaf
        order = torch.randperm(leaf.size(0), generator=torch.Generator().manual_seed(0)).to(leaf.device)
        narrow = leaf[:, :1] if leaf.dim() == 2 and not leaf.stride(1) else leaf
        return narrow[order].expand(leaf.shape) if leaf.stride(0) else leaf

    return mapped(value, anew)
