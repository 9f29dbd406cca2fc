"""How large one temporary array may be on a device with a memory of its own."""

from __future__ import annotations

import torch

SHARE = 16  # one such array takes at most this share of the device's memory: a layer holds half a dozen at once
SHARE_OF_FREE = 8  # and this share of what is free, where that is less


def has_own_memory(device: torch.device) -> bool:
    """Whether a device's memory, rather than a processor's caches, decides how much is made at once."""
    return device.type == "cuda"


def room(device: torch.device) -> int:
    """Bytes that one temporary array may take now. What the allocator holds without using it counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total // SHARE, free // SHARE_OF_FREE)
