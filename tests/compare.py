"""How results are judged: fp64 to a few units, everything else by the error of plain torch at the same precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto import Graph
from stretto.kernels import accumulate_type
from stretto.ops import Sample

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def error(value: Tensor, truth: Tensor) -> float:
    """Largest difference."""
    return float((value.double() - truth).abs().max()) if truth.numel() else 0.0


def judge(ours: Tensor, baseline: Tensor, truth: Tensor, what: str = "", *, terms: int = 1, scale: float = 0.0) -> None:
    """error(ours, fp64) <= 2 * error(torch, fp64) + eps.

    eps is one rounding of the result and the expected drift of `terms` additions, relative to the larger of the true
    values and `scale`.
    """
    assert ours.shape == truth.shape, f"{what}: shape {list(ours.shape)}, wanted {list(truth.shape)}"
    assert ours.dtype == baseline.dtype, f"{what}: {ours.dtype}, wanted {baseline.dtype}"
    drift = torch.finfo(accumulate_type(ours.dtype)).eps * terms**0.5
    scale = max(scale, float(truth.detach().abs().max()) if truth.numel() else 0.0)
    eps = scale * (torch.finfo(ours.dtype).eps + drift) * (10 if ours.dtype == torch.float64 else 1)
    mine, theirs = error(ours, truth), error(baseline, truth)
    assert mine <= 2 * theirs + eps, f"{what}: error {mine:.3g}, torch's is {theirs:.3g}, allowed {eps:.3g} more"


def cast(sample: Sample, dtype: torch.dtype) -> Sample:
    """The same call with every floating tensor in dtype."""

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return Sample(tuple(map(convert, sample.args)), {k: convert(v) for k, v in sample.kwargs.items()})


SCALES = ("row_scale", "col_scale")  # constants as far as the fused kernels are concerned


def evaluate(function: Callable[..., Tensor], sample: Sample, cotangent: Tensor | None = None) -> list[Tensor]:
    """The result, and with a cotangent the gradient of every floating tensor of the call (scales left out)."""
    leaves: list[Tensor] = []

    def leaf(name: str, value: Any) -> Any:
        if cotangent is None or name in SCALES or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1]

    args = [leaf("", a) for a in sample.args]
    kwargs = {k: leaf(k, v) for k, v in sample.kwargs.items()}
    out = function(*args, **kwargs)
    if cotangent is None:
        return [out]
    if not out.requires_grad:  # a reference may lose the path where nothing flows: no edges, no rows
        assert out.numel() == 0 or not any(leaf.numel() for leaf in leaves) or function.__name__.startswith("reference")
        return [out, *map(torch.zeros_like, leaves)]
    # What cancels out of every result (own, in a variance) may have no path either: its gradient is 0 all the same.
    gradients = torch.autograd.grad(out, leaves, cotangent.to(out.dtype).reshape(out.shape), materialize_grads=True)
    return [out.detach(), *gradients]


def compare(function: Callable[..., Tensor], reference: Callable[..., Tensor], sample: Sample, what: str) -> None:
    """Results and gradients of function against reference, in fp64 and at the sample's own precision."""
    wide = cast(sample, torch.float64)
    out = reference(*wide.args, **wide.kwargs)
    cotangent = torch.randn(out.shape, dtype=torch.float64).to(_dtype(sample)).double()
    truth = evaluate(reference, wide, cotangent)
    baseline = evaluate(reference, sample, cotangent)
    ours = evaluate(function, sample, cotangent)
    names = ["result", *(f"gradient {i}" for i in range(len(truth) - 1))]
    scale, terms = float(cotangent.abs().max()) if cotangent.numel() else 0.0, _longest(sample)
    for name, mine, theirs, true in zip(names, ours, baseline, truth, strict=True):
        judge(mine, theirs, true, f"{what} {sample} {name}", terms=terms, scale=0.0 if name == "result" else scale)


def _longest(sample: Sample) -> int:
    """Terms of the longest sum: the largest degree, or the longest dot product."""
    longest = 1
    for value in sample.args:
        if isinstance(value, Graph) and value.num_edges:
            longest = max(longest, *(int(torch.bincount(end).max()) for end in value.edge_index))
        elif isinstance(value, Tensor) and not value.is_floating_point() and value.numel():
            longest = max(longest, int(torch.bincount(value).max()))
        elif isinstance(value, Tensor) and value.dim() > 1:
            longest = max(longest, value[:1].numel())
    return longest


def _dtype(sample: Sample) -> torch.dtype:
    return next(a.dtype for a in sample.args if isinstance(a, Tensor) and a.is_floating_point())
