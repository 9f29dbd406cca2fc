"""How far a result is from the one in fp64, and how far it may be by its type."""

from __future__ import annotations

import torch
from torch import Tensor

# Types by the names that command lines and rows have for them.
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
# Largest relative error (Frobenius) against fp64 that passes a check.
LIMITS = {"f32": 1e-5, "f64": 1e-12, "bf16": 1e-2, "f16": 2e-3}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of `wanted` (or over 1, where it is 0)."""
    size = float(wanted.norm())
    return float((got.double() - wanted).norm()) / (size or 1.0)
