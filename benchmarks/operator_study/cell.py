"""The operator study of Hosseini, Simini and Vishwanath (arXiv 2207.09955) on this machine, with what it lacked.

`python -m benchmarks.operator_study [--only TEXT]`: its ops, sparsities, reduce factors, index dimensions and shapes,
at sizes that fit here; every candidate agrees with fp64 before it is timed; all sparsities of a cell take turns on the
clock, so that their ratio means something; quantiles of at least 20 samples. "Sparsity" is of stored values unless the
op takes a sparse matrix. At the end the study's three findings stand as statements with this machine's numbers.
cells.py and sparse_cells.py have the cells.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.machine.timing import Timing, in_a_row, measure
from stretto.observe.agreement import relative_error

SPARSITIES = (0.0, 0.5, 0.9, 0.99)
FACTORS = (1, 2, 4, 8)
ALLOWED = 1e-5
SAME = 0.05  # a change below this is none
REPEATS = 20
SKIPPED = {"spline_conv": "torch_spline_conv has no counterpart in torch or PyG"}

Call = Callable[[Tensor], Tensor]


def _gone(x: Tensor) -> Tensor:
    raise RuntimeError("this cell has been run, and its tensors are gone")


@dataclass
class Cell:
    """One op at one shape: candidates as functions of the values, and the values for each sparsity."""

    op: str
    shape: str
    values: tuple[int, ...]
    candidates: dict[str, Call]
    reference: Call  # of the values in fp64
    factor: int = 1
    dim: int = 0
    structural: bool = False  # sparsity of a sparse matrix, not of stored values
    references: dict[str, Call] = field(default_factory=dict)  # of candidates that have another one
    missing: dict[str, str] = field(default_factory=dict)  # candidate -> why it is not to be had here
    timings: dict[tuple[float, str], Timing] = field(default_factory=dict)
    errors: dict[tuple[float, str], float] = field(default_factory=dict)
    reasons: dict[tuple[float, str], str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The cell in words."""
        return f"{self.op} {self.shape} dim {self.dim} rf {self.factor}"

    @property
    def failed(self) -> set[str]:
        """The candidates that were wrong or raised."""
        return {name for _, name in self.reasons}

    def forget(self) -> None:
        """Keep what was measured, and let go of the tensors."""
        self.candidates = dict.fromkeys(self.candidates, _gone)
        self.reference, self.references = _gone, {}


@dataclass(frozen=True)
class Setting:
    """Where the study runs, and how large its tensors are there."""

    device: str = "cpu"
    line: int = 1 << 18
    side: int = 512
    cube: int = 64
    tall: tuple[int, int] = (1 << 14, 16)
    small: int = 256  # side of matrices that are run in many combinations, or made dense again

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return {"1-D": (self.line,), "square": (self.side,) * 2, "cube": (self.cube,) * 3, "tall": self.tall}

    def random(self, *shape: int) -> Tensor:
        """Values in [0, 1)."""
        return torch.rand(shape, generator=self._drawing(0), device=self.device)

    def values(self, shape: tuple[int, ...], sparsity: float, seed: int = 0) -> Tensor:
        """Values in [0.5, 1.5), a share of them zero."""
        generator = self._drawing(seed)
        x = torch.rand(shape, generator=generator, device=self.device) + 0.5
        return x * (torch.rand(shape, generator=generator, device=self.device) >= sparsity)

    def index(self, shape: tuple[int, ...], limit: int) -> Tensor:
        """Places below a limit."""
        return torch.randint(max(1, limit), shape, generator=self._drawing(1), device=self.device)

    def _drawing(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


SETTINGS = {
    "cpu": Setting(),
    "cuda": Setting("cuda", line=1 << 24, side=4096, cube=256, tall=(1 << 20, 16)),
}


def run(cell: Cell, repeats: int, setting: Setting) -> None:
    """Check every candidate at every sparsity, then time all of them in turns."""
    calls: dict[tuple[float, str], Callable[[], object]] = {}
    for sparsity in SPARSITIES[1:] if cell.structural else SPARSITIES:
        x = setting.values(cell.values, sparsity)
        usual = cell.reference(x.double())
        for name, function in cell.candidates.items():
            key = (sparsity, name)
            wanted = cell.references[name](x.double()) if name in cell.references else usual
            try:
                cell.errors[key] = relative_error(function(x), wanted)
            except (RuntimeError, NotImplementedError, ImportError) as error:
                cell.reasons[key] = f"raises: {str(error).splitlines()[0]}"
                continue
            if cell.errors[key] > ALLOWED:
                cell.reasons[key] = f"wrong: relative error {cell.errors[key]:.1e}"
            else:
                calls[key] = lambda function=function, x=x: function(x)  # type: ignore[misc]
    table = {f"{sparsity} {name}": call for (sparsity, name), call in calls.items()}
    if table:
        timings = measure(
            table,
            repeats=max(repeats, REPEATS),
            warmup=1,
            device=setting.device,
            sample_seconds=in_a_row(setting.device),
        )
        cell.timings = {key: timings[f"{key[0]} {key[1]}"] for key in calls}
