"""The operator study's cells with sparse matrices: spmm, spspmm, coalesce, transpose. See cell.py.

Every candidate gives a dense result, so that a coalesced one and one that is not are the same.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_geometric.utils as pyg
from torch import Tensor

from benchmarks.operator_study.cell import FACTORS, SPARSITIES, Call, Cell, Setting
from benchmarks.suites import stock


def cells(setting: Setting) -> Iterator[Cell]:
    """Every cell with a sparse matrix; sparsity is of its structure."""
    side, half = setting.side, (setting.small,) * 2
    for name, shape, columns in (("square", (side, side), 64), ("SpMV", (side, side), 1), ("outer", (side, 1), side)):
        yield _spmm(name, shape, setting.random(shape[1], columns))
    yield _zeros_in_the_dense_one(setting)
    yield _spspmm(setting, half)
    for name, shape in (("square", half), ("column", (setting.small**2, 1))):
        for factor in FACTORS:
            yield _coalesce(name, shape, factor)
    yield _transpose(half)


def _with_torch_sparse(cell: Cell, way: Callable[[Any], Call]) -> Cell:
    """The cell with one more candidate, where torch_sparse is there."""
    module = stock.optional("torch_sparse")
    if isinstance(module, str):
        cell.missing["torch_sparse"] = module
    else:
        cell.candidates["torch_sparse"] = way(module)
    return cell


def _spmm(name: str, shape: tuple[int, ...], dense: Tensor) -> Cell:
    ways: dict[str, Call] = {
        "torch.sparse.mm": prepared(lambda m: m @ dense.to(m.dtype), csr=True),
        "gather + scatter": _edges(dense),
    }

    def torch_sparse(module: Any) -> Call:
        return prepared(lambda m: module.spmm(m._indices(), m._values(), *shape, dense.to(m.dtype)), csr=False)

    cell = Cell("spmm", name, shape, ways, lambda x: x @ dense.to(x.dtype), structural=True)
    return _with_torch_sparse(cell, torch_sparse)


def _zeros_in_the_dense_one(setting: Setting) -> Cell:
    """A B with zeros stored in the dense B."""
    ways: dict[str, Call] = {}
    wanted: dict[str, Call] = {}
    for zeros in SPARSITIES:
        dense = setting.values((setting.side, 64), zeros, 1)
        for name, way in _spmm("", (), dense).candidates.items():
            if name != "torch_sparse":
                ways[f"{name}, zeros in B {zeros:.0%}"] = way
                wanted[f"{name}, zeros in B {zeros:.0%}"] = _times(dense)
    return Cell("spmm, zeros in B", "square", (setting.side,) * 2, ways, next(iter(wanted.values())),
                structural=True, references=wanted)  # fmt: skip


def _times(dense: Tensor) -> Call:
    return lambda x: x @ dense.to(x.dtype)


def _spspmm(setting: Setting, shape: tuple[int, int]) -> Cell:
    """A A of a sparse A; and A B with another share of zeros in a sparse B."""
    ways: dict[str, Call] = {
        "torch.sparse.mm": prepared(lambda m: (m @ m).to_dense(), csr=True),
        "torch, COO": prepared(lambda m: torch.sparse.mm(m, m).to_dense(), csr=False),
        "dense GEMM": lambda x: x @ x,
    }
    wanted: dict[str, Call] = {}
    for zeros in SPARSITIES[1:]:
        name, other = f"torch.sparse.mm, zeros in B {zeros:.0%}", setting.values(shape, zeros, 1)
        ways[name], wanted[name] = _by(other), _times(other)

    def torch_sparse(module: Any) -> Call:
        def product(m: Tensor) -> Tensor:
            index, value, n = m._indices(), m._values(), shape[0]
            place, result = module.spspmm(index, value, index, value, n, n, n)
            return value.new_zeros(shape).index_put_((place[0], place[1]), result, accumulate=True)

        return prepared(product, csr=False)

    cell = Cell("spspmm", "square", shape, ways, lambda x: x @ x, structural=True, references=wanted)
    return _with_torch_sparse(cell, torch_sparse)


def _by(other: Tensor) -> Call:
    saved: dict[torch.dtype, Tensor] = {}

    def product(m: Tensor) -> Tensor:
        if m.dtype not in saved:
            saved[m.dtype] = as_csr(other.to(m.dtype))
        return (m @ saved[m.dtype]).to_dense()

    return prepared(product, csr=True)


def _coalesce(name: str, shape: tuple[int, int], factor: int) -> Cell:
    """Entries of `factor` rows fall together: 1 is sorted already, more are duplicates."""
    rows = shape[0] // factor

    def places(matrix: Tensor) -> Tensor:
        row, column = matrix._indices()
        return torch.stack([row // factor, column])

    def native(matrix: Tensor) -> Tensor:
        size = (rows, shape[1])
        return torch.sparse_coo_tensor(
            places(matrix), matrix._values(), size, check_invariants=False
        ).coalesce().to_dense()  # fmt: skip

    def dense(matrix: Tensor, index: Tensor, value: Tensor) -> Tensor:
        return matrix._values().new_zeros(rows, shape[1]).index_put_((index[0], index[1]), value)

    def torch_sparse(module: Any) -> Call:
        return prepared(
            lambda m: dense(m, *module.coalesce(places(m), m._values(), rows, shape[1], op="add")), csr=False
        )

    ways: dict[str, Call] = {
        "torch": prepared(native, csr=False),
        "PyG": prepared(lambda m: dense(m, *pyg.coalesce(places(m), m._values())), csr=False),
    }
    cell = Cell(
        "coalesce", name, shape, ways, lambda x: x.view(rows, factor, -1).sum(1), factor=factor, structural=True
    )
    return _with_torch_sparse(cell, torch_sparse)


def _transpose(shape: tuple[int, int]) -> Cell:
    """Indices swapped and sorted again, by all of them: the study compared a swap alone with a swap and a sort."""

    def dense(matrix: Tensor, index: Tensor, value: Tensor) -> Tensor:
        return value.new_zeros(shape[::-1]).index_put_((index[0], index[1]), value)

    def native(matrix: Tensor) -> Tensor:
        swapped = matrix.t().coalesce()
        return dense(matrix, swapped._indices(), swapped._values())

    def torch_sparse(module: Any) -> Call:
        return prepared(lambda m: dense(m, *module.transpose(m._indices(), m._values(), *shape)), csr=False)

    ways: dict[str, Call] = {
        "torch": prepared(native, csr=False),
        "PyG": prepared(lambda m: dense(m, *pyg.coalesce(m._indices().flip(0), m._values())), csr=False),
    }
    cell = Cell("transpose, sparse", "square", shape, ways, lambda x: x.t(), structural=True)
    return _with_torch_sparse(cell, torch_sparse)


def as_csr(x: Tensor) -> Tensor:
    """The matrix without its zeros."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return x.to_sparse_csr()


def prepared(function: Callable[[Tensor], Tensor], *, csr: bool) -> Call:
    """The conversion to a sparse matrix is done once per value tensor, outside the clock."""
    saved: dict[int, tuple[Tensor, Tensor]] = {}  # the values are kept too, so that no other tensor gets their id

    def call(x: Tensor) -> Tensor:
        if id(x) not in saved:
            saved[id(x)] = (x, as_csr(x) if csr else x.to_sparse())
        return function(saved[id(x)][1])

    return call


def _edges(dense: Tensor) -> Call:
    saved: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def call(x: Tensor) -> Tensor:
        if id(x) not in saved:
            row, col = x.nonzero(as_tuple=True)
            saved[id(x)] = (x, row, col, x[row, col][:, None])
        _, row, col, weight = saved[id(x)]
        return x.new_zeros(x.size(0), dense.size(1)).index_add_(0, row, weight * dense.to(x.dtype)[col])

    return call
