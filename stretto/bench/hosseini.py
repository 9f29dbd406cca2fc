"""The operator study of Hosseini, Simini and Vishwanath (arXiv 2207.09955) on this machine, with what it lacked.

`stretto bench ops --suite hosseini [--only TEXT]`: its ops, sparsities, reduce factors, index dimensions and shapes, at
sizes that fit here; every candidate agrees with fp64 before it is timed; all sparsities of a cell take turns on the
clock, so that their ratio means something; quantiles of at least 20 samples. "Sparsity" is of stored values unless the
op takes a sparse matrix. At the end the study's three findings stand as statements with this machine's numbers.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch_geometric.utils as pyg
from torch import Tensor

from stretto.bench.run import relative_error
from stretto.ops import scatter_rows
from stretto.tune.timing import Timing, in_a_row, measure

SPARSITIES = (0.0, 0.5, 0.9, 0.99)
FACTORS = (1, 2, 4, 8)
SMALL = 256  # side of sparse matrices that are multiplied with one another, or made dense again
ALLOWED = 1e-5
SAME = 0.05  # a change below this is none
REPEATS = 20
SKIPPED = {"spline_conv": "torch_spline_conv has no counterpart in torch or PyG"}

Call = Callable[[Tensor], Tensor]


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
    timings: dict[tuple[float, str], Timing] = field(default_factory=dict)
    errors: dict[tuple[float, str], float] = field(default_factory=dict)
    reasons: dict[tuple[float, str], str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The cell in words."""
        return f"{self.op} {self.shape} dim {self.dim} rf {self.factor}"


@dataclass(frozen=True)
class Setting:
    """Where the study runs, and how large its tensors are there."""

    device: str = "cpu"
    line: int = 1 << 18
    side: int = 512
    cube: int = 64
    tall: tuple[int, int] = (1 << 14, 16)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return {"1-D": (self.line,), "square": (self.side,) * 2, "cube": (self.cube,) * 3, "tall": self.tall}

    def random(self, *shape: int) -> Tensor:
        """Values in [0, 1)."""
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def values(self, shape: tuple[int, ...], sparsity: float) -> Tensor:
        """Values in [0.5, 1.5), a share of them zero."""
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(shape, generator=generator) + 0.5
        return (x * (torch.rand(shape, generator=generator) >= sparsity)).to(self.device)

    def index(self, shape: tuple[int, ...], limit: int) -> Tensor:
        """Places below a limit."""
        return torch.randint(max(1, limit), shape, generator=torch.Generator().manual_seed(1)).to(self.device)


SETTINGS = {
    "cpu": Setting(),
    "cuda": Setting("cuda", line=1 << 24, side=4096, cube=256, tall=(1 << 20, 16)),
}


def _rows(index: Tensor, like: Tensor) -> Tensor:
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def cells(setting: Setting) -> Iterator[Cell]:
    """Every cell of the study."""
    yield from _products(setting)
    for name, shape in setting.shapes.items():
        for dim in range(len(shape)):
            yield from _selections(setting, name, dim)
    for name in ("1-D", "square", "tall"):
        for factor in FACTORS:
            yield from _reductions(setting, name, factor)
    yield from _orders(setting)
    yield from _sparse(setting)


def _products(setting: Setting) -> Iterator[Cell]:
    shape = setting.shapes["square"]
    side = setting.random(*shape)
    yield Cell("addmm", "square", shape, {"addmm": lambda x: torch.addmm(side.to(x.dtype), x, side.to(x.dtype))},
               lambda x: side.to(x.dtype) + x @ side.to(x.dtype))  # fmt: skip
    yield Cell("addmm, zeros in the right factor", "square", shape,
               {"addmm": lambda x: torch.addmm(side.to(x.dtype), side.to(x.dtype), x)},
               lambda x: side.to(x.dtype) + side.to(x.dtype) @ x)  # fmt: skip
    yield Cell("addmm, zeros in the term added", "square", shape,
               {"addmm": lambda x: torch.addmm(x, side.to(x.dtype), side.to(x.dtype))},
               lambda x: x + side.to(x.dtype) @ side.to(x.dtype))  # fmt: skip
    yield Cell("matmul", "square", shape, {"matmul": lambda x: x @ side.to(x.dtype)}, lambda x: x @ side.to(x.dtype))


def _selections(setting: Setting, name: str, dim: int) -> Iterator[Cell]:
    shape = setting.shapes[name]
    index = setting.index((shape[dim],), shape[dim])
    yield Cell("index_select", name, shape, {"index_select": lambda x: x.index_select(dim, index)},
               lambda x: x.index_select(dim, index), dim=dim)  # fmt: skip
    everywhere = setting.index(shape, shape[dim])
    yield Cell(
        "gather",
        name,
        shape,
        {"gather": lambda x: x.gather(dim, everywhere)},
        lambda x: x.gather(dim, everywhere),
        dim=dim,
    )


def _reductions(setting: Setting, name: str, factor: int) -> Iterator[Cell]:
    shape = setting.shapes[name]
    rows = max(1, shape[0] // factor)
    index = setting.index((shape[0],), rows)

    def new(x: Tensor) -> Tensor:
        return x.new_zeros(rows, *x.shape[1:])

    def summed(x: Tensor) -> Tensor:
        return new(x).index_add_(0, index, x)

    yield Cell("index_add_", name, shape, {"index_add_": summed, "stretto": lambda x: scatter_rows(x, index, rows)},
               summed, factor)  # fmt: skip
    for reduce, native in (("sum", "sum"), ("mean", "mean"), ("mul", "prod"), ("max", "amax"), ("min", "amin")):

        def torch_way(x: Tensor, native: str = native) -> Tensor:
            start = x.new_full((rows, *x.shape[1:]), 1.0 if native == "prod" else 0.0)
            return start.scatter_reduce_(0, _rows(index, x), x, native, include_self=native == "prod")

        def pyg_way(x: Tensor, reduce: str = reduce) -> Tensor:
            return pyg.scatter(x, index, 0, rows, reduce)

        candidates: dict[str, Call] = {"torch": torch_way, "PyG": pyg_way}
        if reduce == "mul":  # PyG wants torch_scatter for it; empty rows give 1 in one and 0 in the other
            candidates.pop("PyG")
        yield Cell(f"scatter_{reduce}", name, shape, candidates, torch_way, factor)


def _orders(setting: Setting) -> Iterator[Cell]:
    for name in ("1-D", "square", "cube"):
        for stable in (False, True):
            label = "sort, stable" if stable else "sort"

            def sort(x: Tensor, stable: bool = stable) -> Tensor:
                return x.sort(stable=stable).values

            yield Cell(label, name, setting.shapes[name], {"torch": sort}, sort)

    def swap(x: Tensor) -> Tensor:
        return x.t().contiguous()

    yield Cell("transpose", "square", setting.shapes["square"], {"torch": swap}, swap)


def _sparse(setting: Setting) -> Iterator[Cell]:
    half, side = (SMALL, SMALL), setting.side
    for name, shape, columns in (("square", (side, side), 64), ("SpMV", (side, side), 1), ("outer", (side, 1), side)):
        yield _spmm(name, shape, setting.random(shape[1], columns))
    ways: dict[str, Call] = {"torch.sparse.mm": _prepared(lambda m: (m @ m).to_dense(), csr=True)}
    yield Cell("spspmm", "square", half, ways, lambda x: x @ x, structural=True)
    for factor in FACTORS:
        yield _coalesce(half, factor)


def _spmm(name: str, shape: tuple[int, ...], dense: Tensor) -> Cell:
    ways: dict[str, Call] = {
        "torch.sparse.mm": _prepared(lambda m: m @ dense.to(m.dtype), csr=True),
        "gather + scatter": _edges(dense),
    }
    return Cell("spmm", name, shape, ways, lambda x: x @ dense.to(x.dtype), structural=True)


def _coalesce(shape: tuple[int, int], factor: int) -> Cell:
    """Entries of `factor` rows fall together: 1 is sorted already, more are duplicates. The result is dense in both."""
    rows = shape[0] // factor

    def places(matrix: Tensor) -> Tensor:
        row, column = matrix._indices()
        return torch.stack([row // factor, column])

    def native(matrix: Tensor) -> Tensor:
        size = (rows, shape[1])
        return torch.sparse_coo_tensor(
            places(matrix), matrix._values(), size, check_invariants=False
        ).coalesce().to_dense()  # fmt: skip

    def with_pyg(matrix: Tensor) -> Tensor:
        edges, weight = pyg.coalesce(places(matrix), matrix._values())
        return matrix._values().new_zeros(rows, shape[1]).index_put_((edges[0], edges[1]), weight)

    ways: dict[str, Call] = {"torch": _prepared(native, csr=False), "PyG": _prepared(with_pyg, csr=False)}
    return Cell(
        "coalesce", "square", shape, ways, lambda x: x.view(rows, factor, -1).sum(1), factor=factor, structural=True
    )


def _prepared(function: Callable[[Tensor], Tensor], *, csr: bool) -> Call:
    """The conversion to a sparse matrix is done once per value tensor, outside the clock."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # the values are kept too, so that no other tensor gets their id

    def call(x: Tensor) -> Tensor:
        if id(x) not in kept:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
                kept[id(x)] = (x, x.to_sparse_csr() if csr else x.to_sparse())
        return function(kept[id(x)][1])

    return call


def _edges(dense: Tensor) -> Call:
    kept: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def call(x: Tensor) -> Tensor:
        if id(x) not in kept:
            row, col = x.nonzero(as_tuple=True)
            kept[id(x)] = (x, row, col, x[row, col][:, None])
        _, row, col, weight = kept[id(x)]
        return x.new_zeros(x.size(0), dense.size(1)).index_add_(0, row, weight * dense.to(x.dtype)[col])

    return call


def run(cell: Cell, repeats: int, setting: Setting) -> None:
    """Check every candidate at every sparsity, then time all of them in turns."""
    calls: dict[tuple[float, str], Callable[[], object]] = {}
    for sparsity in SPARSITIES[1:] if cell.structural else SPARSITIES:
        x = setting.values(cell.values, sparsity)
        wanted = cell.reference(x.double())
        for name, function in cell.candidates.items():
            key = (sparsity, name)
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
