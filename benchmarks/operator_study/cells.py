"""The operator study's cells: dense products, selections, reductions by an index, sorting. See cell.py."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch_geometric.utils as pyg
from torch import Tensor

from benchmarks.operator_study import sparse_cells
from benchmarks.operator_study.cell import FACTORS, SPARSITIES, Call, Cell, Setting
from benchmarks.suites import stock
from stretto.ops import scatter_rows

# reduction -> torch's word for it
REDUCTIONS = {"sum": "sum", "mean": "mean", "mul": "prod", "max": "amax", "min": "amin"}


def cells(setting: Setting) -> Iterator[Cell]:
    """Every cell of the study."""
    yield from _products(setting)
    for name, shape in setting.shapes.items():
        for dim in range(len(shape)):
            for factor in FACTORS:
                yield from _selections(setting, name, dim, factor)
                yield from _reductions(setting, name, dim, factor)
    yield from _orders(setting)
    yield from sparse_cells.cells(setting)


def _products(setting: Setting) -> Iterator[Cell]:
    shape = setting.shapes["square"]
    side = setting.random(*shape)
    yield Cell("addmm", "square", shape, {"addmm": lambda x: torch.addmm(side.to(x.dtype), x, side.to(x.dtype))},
               lambda x: side.to(x.dtype) + x @ side.to(x.dtype))  # fmt: skip
    yield Cell("matmul", "square", shape, {"matmul": lambda x: x @ side.to(x.dtype)}, lambda x: x @ side.to(x.dtype))
    yield _combinations(setting)


def _combinations(setting: Setting) -> Cell:
    """C + A B with zeros in all three: four shares of each, 64 in all. A is what every cell moves."""
    shape = (setting.small,) * 2
    result: dict[str, Call] = {}
    for right in SPARSITIES:
        for added in SPARSITIES:
            name = f"addmm, zeros in B {right:.0%}, in C {added:.0%}"
            result[name] = _addmm(setting.values(shape, right, 1), setting.values(shape, added, 2))
    return Cell("addmm", "small square", shape, result, next(iter(result.values())), references=dict(result))


def _addmm(right: Tensor, added: Tensor) -> Call:
    return lambda x: torch.addmm(added.to(x.dtype), x, right.to(x.dtype))


def _selections(setting: Setting, name: str, dim: int, factor: int) -> Iterator[Cell]:
    """Rows or values by an index of a `factor`-th of the entries along the dimension."""
    shape = setting.shapes[name]
    count = max(1, shape[dim] // factor)
    index = setting.index((count,), shape[dim])
    yield Cell("index_select", name, shape, {"index_select": lambda x: x.index_select(dim, index)},
               lambda x: x.index_select(dim, index), factor, dim)  # fmt: skip
    everywhere = setting.index((*shape[:dim], count, *shape[dim + 1 :]), shape[dim])
    yield Cell("gather", name, shape, {"gather": lambda x: x.gather(dim, everywhere)},
               lambda x: x.gather(dim, everywhere), factor, dim)  # fmt: skip


def _along(index: Tensor, like: Tensor, dim: int) -> Tensor:
    return index.view(*[-1 if d == dim else 1 for d in range(like.dim())]).expand_as(like)


def _reductions(setting: Setting, name: str, dim: int, factor: int) -> Iterator[Cell]:
    """Entries along the dimension into a `factor`-th as many."""
    shape = setting.shapes[name]
    rows = max(1, shape[dim] // factor)
    size = (*shape[:dim], rows, *shape[dim + 1 :])
    index = setting.index((shape[dim],), rows)

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros(size).index_add_(dim, index, x)

    ways: dict[str, Call] = {"index_add_": summed}
    if dim == 0:
        ways["stretto"] = lambda x: scatter_rows(x, index, rows)
    yield Cell("index_add_", name, shape, ways, summed, factor, dim)
    module = stock.optional("torch_scatter")
    for reduce, native in REDUCTIONS.items():

        def torch_way(x: Tensor, native: str = native) -> Tensor:
            start = x.new_full(size, 1.0 if native == "prod" else 0.0)
            return start.scatter_reduce_(dim, _along(index, x, dim), x, native, include_self=native == "prod")

        def pyg_way(x: Tensor, reduce: str = reduce) -> Tensor:
            return pyg.scatter(x, index, dim, rows, reduce)

        def scatter_way(x: Tensor, reduce: str = reduce) -> Tensor:
            scatter: Callable[..., Tensor] = getattr(module, "scatter")  # noqa: B009
            return scatter(x, index, dim=dim, dim_size=rows, reduce=reduce)

        cell = Cell(f"scatter_{reduce}", name, shape, {"torch": torch_way}, torch_way, factor, dim)
        if reduce != "mul":  # PyG wants torch_scatter for it; empty rows give 1 in one and 0 in the other
            cell.candidates["PyG"] = pyg_way
        if isinstance(module, str):
            cell.missing["torch_scatter"] = module
        else:
            cell.candidates["torch_scatter"] = scatter_way
        yield cell


def _orders(setting: Setting) -> Iterator[Cell]:
    for name in ("1-D", "square", "cube"):
        for stable in (False, True):

            def sort(x: Tensor, stable: bool = stable) -> Tensor:
                return x.sort(stable=stable).values

            def placed(x: Tensor, stable: bool = stable) -> Tensor:
                return x.gather(-1, x.argsort(stable=stable))

            def numpy(x: Tensor, stable: bool = stable) -> Tensor:
                return torch.from_numpy(np.sort(x.numpy(), kind="stable" if stable else "quicksort"))

            ways: dict[str, Call] = {"torch": sort, "argsort, then gather": placed}
            if setting.device == "cpu":
                ways["numpy"] = numpy
            yield Cell("sort, stable" if stable else "sort", name, setting.shapes[name], ways, sort)
    swaps: dict[str, Call] = {
        "torch": lambda x: x.t().contiguous(),
        "copied into a new one": lambda x: x.new_empty(x.shape[::-1]).copy_(x.t()),
        "einsum": lambda x: torch.einsum("ij->ji", x).contiguous(),
    }
    yield Cell("transpose", "square", setting.shapes["square"], swaps, swaps["torch"])
