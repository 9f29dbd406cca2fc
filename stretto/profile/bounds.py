"""Is an op bound by what its label says? The same op on half of its rows must take half the time, or, if it is bound by
its launch, as long as before. The labels come from the machine file; this does not look at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.profile.replay import capture, is_index, operands
from stretto.tune.timing import measure

if TYPE_CHECKING:
    from stretto.profile.profiling import Profile

FAMILIES = ("gather", "scatter", "pointwise", "reduce", "gemm", "softmax")  # whose arguments are all tensors of rows
# Half over whole: 1 if the launch is all there is, 0.5 if the work is; where both take as long, and the label changes,
# it is between. Far below a half the whole has left a cache that the half fits into, but not so far.
EQUAL, LEAST = 0.75, 0.3
REPEATS = 20


def halved(value: Any, longest: int) -> Any:
    """The value with every dimension that is `longest` cut to its first half; tensors keep their layout, by which
    libraries choose their kernels."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        cut = [dim for dim, size in enumerate(value.shape) if size == longest]
        for dim in cut:
            value = value.narrow(dim, 0, max(1, longest // 2))
        # An expanded tensor stays expanded: one entry of its index serves a whole row.
        return _without_gaps(value) if cut and 0 not in value.stride() else value
    if isinstance(value, (list, tuple)):
        return type(value)(halved(v, longest) for v in value)
    return value


def _without_gaps(value: Tensor) -> Tensor:
    """A copy whose values lie side by side, its dimensions in the same order in memory."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    places = sorted(range(value.dim()), key=order.__getitem__)
    return value.permute(order).contiguous().permute(places)


def check_bounds(profile: Profile, *, share: float = 0.9, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per hot group that can be cut: milliseconds of the whole and of half, and whether its label fits."""
    groups = [g for g in profile.hot(share) if g.family in FAMILIES and not g.name.startswith("stretto::")]
    captured = capture(profile, groups)
    rows: list[dict[str, Any]] = []
    for group in groups:
        at = next((i for i in group.ops if i in captured), None)
        if at is None:
            continue
        function, args, kwargs = captured[at]
        found = operands((args, kwargs))
        longest = max((size for tensor in found for size in tensor.shape), default=0)
        if longest < 2 or any(t.dtype == torch.bool for t in found):  # how much a mask selects cannot be cut in half
            continue
        if longest in found[0].shape and any(int(t.max()) >= longest // 2 for t in found if is_index(t) and t.numel()):
            continue  # an index would name rows that the half of its table has not
        part = tuple(halved(v, longest) for v in args), {k: halved(v, longest) for k, v in kwargs.items()}
        with torch.no_grad():
            calls = {
                "whole": lambda f=function, a=args, k=kwargs: f(*a, **k),
                "half": lambda f=function, a=part[0], k=part[1]: f(*a, **k),
            }
            taken = measure(calls, repeats=repeats, warmup=2, device=profile.workload.device)
        ratio = taken["half"].median / taken["whole"].median
        fits = ratio >= EQUAL if group.bound == "launch" else LEAST <= ratio <= EQUAL
        rows.append(
            {"op": group.name, "phase": group.phase, "shapes": group.shapes, "bound": group.bound,
             "whole ms": taken["whole"].median * 1e3, "half ms": taken["half"].median * 1e3, "ratio": ratio,
             "fits": fits}
        )  # fmt: skip
    return rows
