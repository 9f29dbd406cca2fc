"""Why a call runs as stock, and the reasons all layers share: arguments that no kernel can read (on the meta device,
fake, of a class of its own, no tensors at all), which are looked for before anything else, and parameters of another
type than the input, with which stock promotes or raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class Decline(Exception):
    """Raised by a fast function: this call runs as stock, for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Small(Decline):
    """Raised where few launches are all that counts: what is inside the layer runs as stock, too."""


class Quiet(Decline):
    """Raised by the fast function of a container: its layers run as they do by themselves, and nothing is told."""


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
    if isinstance(value, Tensor) and hasattr(
        value, "as_tensor"
    ):  # PyG's EdgeIndex and Index, which wrap a plain tensor
        return _why(value.as_tensor())
    if hasattr(value, "coo") and hasattr(value, "sparse_sizes"):  # torch_sparse's SparseTensor
        return None
    return f"an argument is a {type(value).__name__}"


def pair_of(x: Any) -> tuple[Any, Any]:
    """(x_src, x_dst) of what a user hands to a conv, or Decline."""
    if not isinstance(x, (tuple, list)):
        return x, x
    if len(x) != 2:
        raise Decline(f"the input is a {type(x).__name__} of {len(x)}")
    return x[0], x[1]


def same_type(x: Tensor, *parameters: Tensor | None) -> None:
    """Decline unless all have the input's type, where the input is."""
    for parameter in parameters:
        if parameter is not None and (parameter.dtype != x.dtype or parameter.device != x.device):
            what = f"{parameter.dtype} on {parameter.device}"
            raise Decline(f"a parameter is {what}, the input {x.dtype} on {x.device}")
