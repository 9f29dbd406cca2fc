"""Whether attention keeps its scores for backward or computes them again: a choice of the tuner, by memory and time.

Kept, they are one number per edge and head, and backward does not take the dot products of the scores again. Both ways
give the same bits. A signature is tried both ways in the user's own steps, forward and backward together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto import kernels
from stretto.graph import Graph
from stretto.kernels.schema import accumulate_type
from stretto.memory import pool
from stretto.ops.autograd_state import saved_elsewhere
from stretto.ops.pick import picker
from stretto.ops.variants import VARIANTS, Variant

FORMS = ("gat", "gatv2", "dot")  # whose scores are computed at all
LEAST = 1 << 22  # gathered values below which timing would measure noise
MOST = 1 / 16  # of the memory that is free: what kept scores may take
_MEMINFO = Path("/proc/meminfo")

AGAIN, KEPT = VARIANTS["attention"]["cpu"]


@dataclass
class Trial:
    """One forward pass and its backward pass."""

    key: Any
    variant: Variant
    timed: bool
    scores: Tensor | None
    start: float = 0.0
    seconds: float = 0.0

    def __enter__(self) -> Trial:
        self.start = time.perf_counter()
        return self

    def __exit__(self, *failure: object) -> None:
        self.seconds += time.perf_counter() - self.start

    def end(self) -> None:
        """Backward is done."""
        if self.timed:
            picker.told(self.key, self.variant, self.seconds)
            self.timed = False


def begin(graph: Graph, form: str, slope: float, values: Tensor, heads: int, score_width: int) -> Trial:
    """How the pass that starts now shall go about its scores; `scores` [E, h] is room for them, or None."""
    gathered = graph.num_edges * heads * (score_width + values.size(2))
    dtype = accumulate_type(values.dtype)
    bytes_kept = graph.num_edges * heads * dtype.itemsize
    if form not in FORMS or slope < 0 or not kernels.backend(values.device).native or gathered < LEAST:
        return Trial(None, AGAIN, False, None)
    if saved_elsewhere():  # by which the user spares memory, and both passes must save the same
        return Trial(None, AGAIN, False, None)
    edges_per_row = (graph.num_edges // max(graph.num_rows, 1)).bit_length()
    key = (
        "attention",
        form,
        heads,
        score_width,
        values.size(2),
        str(values.dtype),
        edges_per_row,
        graph.num_edges.bit_length(),
    )
    variant, timed = picker.offer(key, (AGAIN, KEPT))
    if variant is KEPT and bytes_kept > MOST * _free_bytes():
        variant, timed = AGAIN, False
    scores = pool.empty((graph.num_edges, heads), dtype) if variant is KEPT else None
    return Trial(key, variant, timed, scores)


def _free_bytes() -> float:
    """Memory the system could still give; without an answer, endless."""
    if not _MEMINFO.exists():
        return float("inf")
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return float("inf")
