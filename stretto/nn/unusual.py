"""Arguments that no kernel can read: on the meta device, fake, of a class of its own, or no tensors at all.

Looked at once a call, before anything else: what is odd about a tensor that is plain (its type, shape or length) is for
the layer itself to say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_LONGEST = 8  # parts of a list that is a pair, a triple or sizes; a longer one is an array written as a list
META = "a tensor is on the meta device"


def why_unusual(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a layer cannot read its arguments, or None."""
    for value in args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.is_meta:
                return META
        elif value is not None:
            reason = _why(value)
            if reason is not None:
                return reason
    if kwargs:
        reason = _why(kwargs)
        if reason is not None:
            return reason
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_FAKE) is not None:
        return "a FakeTensorMode is on"
    return None


def _why(value: Any) -> str | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if type(value) is Tensor or type(value) is Parameter:
        return META if value.is_meta else None
    if isinstance(value, dict) or (isinstance(value, (tuple, list)) and len(value) <= _LONGEST):
        for part in value.values() if isinstance(value, dict) else value:
            reason = _why(part)
            if reason is not None:
                return reason
        return None
    if hasattr(value, "as_tensor"):  # PyG's EdgeIndex and Index, which wrap a plain tensor
        return _why(value.as_tensor())
    if hasattr(value, "coo") and hasattr(value, "sparse_sizes"):  # torch_sparse's SparseTensor
        return None
    return f"an argument is a {type(value).__name__}"
