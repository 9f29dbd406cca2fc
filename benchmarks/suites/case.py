"""What is measured: a Spec (the words of the command line) and the Case it stands for (tensors and candidates)."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.suites.stock import Candidate
from stretto.errors import fail
from stretto.machine.timing import Timing
from stretto.observe.agreement import DTYPES

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


def reasons(outcomes: Iterable[Outcome]) -> str:
    """Who did not run, and why."""
    return "; ".join(f"{o.name}: {o.reason}" for o in outcomes if o.reason)


def details(outcomes: Iterable[Outcome], ours: str, stock: str) -> dict[str, object]:
    """What a row says of outcomes beside the times of ours and of stock: memory, error, other candidates."""
    known = {o.name: o for o in outcomes}
    mib = {name: o.peak_bytes / 2**20 for name, o in known.items() if o.peak_bytes is not None}
    others = {f"{o.name} ms": o.timing.median * 1e3 for o in known.values() if o.timing and o.name not in (ours, stock)}
    error = known[ours].error if ours in known else None
    return {"error": error, "ours_mib": mib.get(ours), "stock_mib": mib.get(stock), **others}
