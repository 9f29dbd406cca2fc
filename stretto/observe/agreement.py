"""How far a result is from the one in fp64 or from another way's, and how far it may be by its type."""

from __future__ import annotations

import torch
from torch import Tensor

# Types by the names that command lines and rows have for them.
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
# Largest relative error (Frobenius) against fp64 that passes a check.
LIMITS = {"f32": 1e-5, "f64": 1e-12, "bf16": 1e-2, "f16": 2e-3}
# The same of a model's outputs against those of another way to run it; of any other type as of fp32.
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of `wanted` (or over 1, where it is 0)."""
    size = float(wanted.norm())
    return float((got.double() - wanted).norm()) / (size or 1.0)


def worst(stock: list[Tensor], others: list[Tensor]) -> float:
    """The largest relative error among the outputs."""
    return max((relative_error(b, a.double()) for a, b in zip(stock, others, strict=True)), default=0.0)


def difference(stock: list[Tensor], others: list[Tensor]) -> str:
    """Why two lists of outputs are not the same; "" if they are."""
    if not stock or len(stock) != len(others):
        return "there are no outputs to compare" if not stock else "the outputs are other ones"
    for a, b in zip(stock, others, strict=True):
        error = relative_error(b, a.double())
        if not error <= ALLOWED.get(a.dtype, ALLOWED[torch.float32]):  # not a number is not equal either
            return f"outputs differ by {error:.1e}"
    return ""
