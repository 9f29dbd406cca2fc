"""What every op asks of a tensor before a kernel reads it: a tensor of floats, strided, where the graph is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.errors import fail
from stretto.kernels import DTYPES


def check_values(op: str, name: str, tensor: Any, device: torch.device) -> None:
    """Raise unless the kernels of `device` can read the tensor."""
    if (
        isinstance(tensor, Tensor)
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
        and tensor.device == device
    ):
        return
    if not isinstance(tensor, Tensor):
        fail(f"{op}: '{name}' is a {type(tensor).__name__}, wanted a tensor")
    if tensor.dtype not in DTYPES:
        fail(f"{op}: '{name}' is {tensor.dtype}, wanted float32, float64, bfloat16 or float16")
    if tensor.layout is not torch.strided:
        fail(f"{op}: '{name}' is {tensor.layout}, wanted a dense tensor")
    fail(f"{op}: '{name}' is on {tensor.device}, but the graph is on {device}")


def check_shape(op: str, name: str, tensor: Any, device: torch.device, *sizes: int | str) -> None:
    """Raise unless it is also of these sizes; one that may be anything has a name."""
    check_values(op, name, tensor, device)
    if tensor.dim() == len(sizes):
        for size, wanted in zip(tensor.shape, sizes, strict=True):
            if type(wanted) is not str and size != wanted:
                break
        else:
            return
    fail(f"{op}: '{name}' has shape {list(tensor.shape)}, wanted [{', '.join(map(str, sizes))}]")


def check_index(op: str, name: str, index: Any, device: torch.device) -> None:
    """Raise unless it is a vector of indices on `device`."""
    if not isinstance(index, Tensor):
        fail(f"{op}: '{name}' is a {type(index).__name__}, wanted a tensor")
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64) or index.layout is not torch.strided:
        fail(f"{op}: '{name}' is {index.dtype} of shape {list(index.shape)}, wanted int32 or int64 of shape [E]")
    if index.device != device:
        fail(f"{op}: '{name}' is on {index.device}, but the values are on {device}")
