"""What the machine can do at most: copying, gathering rows, multiplying matrices.

Ceilings are measured among the candidates, in the same rounds, so that a share of one survives a drifting machine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.suites.case import Case
from stretto.kernels import cpu, native
from stretto.memory import pages

KINDS = ("copy", "gemm", "gather", "random gather")
COPY_BYTES = 256 << 20
GEMM_SIDE = 1024
PREFETCH = (0, 8, 24)  # rows ahead; the fastest counts
LINE = 64  # the gather kernel takes rows of whole cache lines


@dataclass(frozen=True)
class Ceiling:
    """One thing to run, and how much of `unit` a call does. Of several with one kind the fastest counts."""

    kind: str
    unit: str  # "byte" or "flop"
    amount: float
    call: Callable[[], object]


def ceilings(case: Case) -> dict[str, Ceiling]:
    """Everything to measure beside a case, by a name of its own.

    "gather" reads the very rows the op reads, in the same order, and only adds them up: no kernel can read them faster.
    "random gather" reads as many rows at uniformly random places: what a graph without any locality would cost.
    """
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    left = torch.ones(GEMM_SIDE, GEMM_SIDE)
    found = {
        "copy": Ceiling("copy", "byte", 2.0 * COPY_BYTES, lambda: target.copy_(source)),
        "gemm": Ceiling("gemm", "flop", 2.0 * GEMM_SIDE**3, lambda: left @ left),
    }
    if case.gathered is None or native.library() is None:
        return found
    num_rows, index = case.gathered
    row_bytes = case.inputs[0][0].numel() * case.inputs[0].element_size()
    lines = max(1, round(row_bytes / LINE))
    rows = torch.ones(num_rows, lines * LINE // 4)
    pages.enlarge(rows.data_ptr(), rows.nbytes)
    streams = {
        "gather": index.to(torch.int32),
        "random gather": torch.randint(num_rows, index.shape, dtype=torch.int32),
    }
    amount = float(index.numel() * row_bytes)
    for kind, stream in streams.items():
        for ahead in PREFETCH:
            found[f"{kind}, {ahead} ahead"] = Ceiling(kind, "byte", amount, _gather(rows, stream, ahead))
    return found


def _gather(rows: Tensor, stream: Tensor, ahead: int) -> Callable[[], object]:
    return lambda: cpu.gather_ceiling(rows, stream, ahead)
