"""What callers ask of the device that a tensor is on: here alone its kind is looked at."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

SHARE = 16  # one temporary array takes at most this share of the device's memory: a layer holds half a dozen at once
SHARE_OF_FREE = 8  # and this share of what is free, where that is less

# Whether a tensor's values lie in the processor's memory: a look at them waits for nobody, and native code reads them
# by their address. No function of Python's: it stands in every layer's call.
on_host: Callable[[Tensor], bool] = operator.attrgetter("is_cpu")


def has_own_memory(device: torch.device) -> bool:
    """Whether a device's memory, rather than a processor's caches, decides how much is made at once."""
    return device.type == "cuda"


def room(device: torch.device) -> int:
    """Bytes that one temporary array may take now. What the allocator holds without using it counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total // SHARE, free // SHARE_OF_FREE)


def kind_of(tensor: Tensor) -> str:
    """What decisions about a tensor are kept under: they hold for every device of its kind."""
    return tensor.device.type


def autocasts(tensor: Tensor) -> bool:
    """Whether torch.autocast is on where the tensor is: torch's operations choose types of their own."""
    return torch.is_autocast_enabled(tensor.device.type)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type in which torch multiplies there while autocast is on; None while it is off."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def in_given_types(tensor: Tensor) -> AbstractContextManager[object]:
    """Whatever autocast says where the tensor is: the types have been chosen already."""
    return torch.autocast(tensor.device.type, enabled=False) if autocasts(tensor) else nullcontext()
