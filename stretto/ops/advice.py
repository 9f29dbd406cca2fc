"""What would fit, when a device runs out of memory in one of our steps."""

from __future__ import annotations

import re

import torch
from torch import Tensor

LESS = (
    "bfloat16 takes half, stretto.NeighborLoader trains on batches, stretto.inference evaluates layer by layer. "
    "The model and its graphs are as they were."
)


def add(error: torch.OutOfMemoryError, what: str, x: Tensor | None) -> None:
    """Say beside torch's own words how many of the rows of x would fit, and what takes less."""
    if "stretto:" in str(error):  # said already, further inside
        return
    total, held = torch.cuda.mem_get_info()[1], torch.cuda.memory_allocated()
    asked = re.search(r"allocate ([\d.]+) ([KMG])iB", str(error))
    more = 0 if asked is None else float(asked[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[asked[2]]
    used = f"{held / 2**30:.1f} of {total / 2**30:.1f} GiB are in use"
    if x is not None:
        rows = int(x.size(0) * min(1, total / max(held + more, 1)))
        what += f" on rows of shape {list(x.shape)} and {x.dtype}"
        used += f"; at most about {rows:,} such rows would fit"
    error.args = (f"{error}\nstretto: {what}: {used}. {LESS}",)
