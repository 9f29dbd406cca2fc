"""What is measured: a Spec (the words of the command line) and the Case it stands for (tensors and candidates)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.bench.stock import Candidate
from stretto.errors import fail
from stretto.machine import facts
from stretto.machine.timing import Timing, ratio

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
DIRECTIONS = ("fwd", "both")
WEIGHTS = ("none", "edge", "scales")
OURS = "stretto"


@dataclass(frozen=True)
class Spec:
    """One cell of a benchmark."""

    op: str = "spmm"
    graph: str = "rmat:17:1200000"
    width: int = 256
    dtype: str = "f32"
    reduce: str = "sum"
    weight: str = "none"  # none, one per edge, or row and column scales
    heads: int = 1
    direction: str = "fwd"  # both: forward and backward
    threads: int = 2

    def __post_init__(self) -> None:
        allowed = (("dtype", tuple(DTYPES)), ("direction", DIRECTIONS), ("weight", WEIGHTS))
        for name, values in allowed:
            if getattr(self, name) not in values:
                fail(f"bench: '--{name}' is {getattr(self, name)!r}, wanted one of {', '.join(values)}")
        for name in ("width", "heads", "threads"):
            if getattr(self, name) < 1:
                fail(f"bench: '--{name}' is {getattr(self, name)}, wanted at least 1")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return DTYPES[self.dtype]

    def command(self, repeats: int) -> str:
        """The command that measures this cell again."""
        always = ("op", "graph", "width", "dtype", "threads")
        shown = [
            f"--{f.name} {getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name in always or getattr(self, f.name) != f.default
        ]
        return " ".join(["stretto bench ops", *shown, f"--repeats {repeats}"])


@dataclass
class Case:
    """Inputs (all differentiable), candidates, reference and cost of one Spec."""

    inputs: tuple[Tensor, ...]
    candidates: list[Candidate]
    reference: Callable[..., Tensor]  # of the inputs in fp64
    # How the reference may be taken a few columns at a time, to bound its memory: "each" column of the output depends
    # on that column of the inputs; the output is the "sum" over columns; or only as a "whole".
    columns: str
    num_nodes: int
    num_edges: int
    flops: float  # of the forward pass, as is `bytes`; 0 where the direction is both
    bytes: float
    gathered: tuple[int, Tensor] | None = None  # (rows, index): the rows of the inputs that the op reads at random
    skipped: dict[str, str] = field(default_factory=dict)  # candidate -> why it is not here


@dataclass
class Outcome:
    """One candidate: its error against stock, timing and peak memory, or why it did not run."""

    name: str
    error: float | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None
    reason: str = ""


def rows_of(cell: dict[str, object], outcomes: list[Outcome]) -> list[dict[str, object]]:
    """One flat record per candidate of a cell, with the machine and its ratio to ours."""
    ours = next((o.timing for o in outcomes if o.name == OURS), None)
    rows = []
    for o in outcomes:
        row = {**cell, "candidate": o.name, "error": o.error, "peak_bytes": o.peak_bytes, "reason": o.reason}
        if o.timing is not None:
            row |= o.timing.to_dict()
            if ours is not None:
                row["times_ours"] = ratio(o.timing, ours)
        rows.append({**row, "machine": facts.facts()})
    return rows
