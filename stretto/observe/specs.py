"""What the trace keeps of a tensor or a matrix: sizes, strides and types, never the values.

Sizes are integers in a trace and may be sympy expressions in a lifted one; every cost formula works on both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.kernels import Csr
from stretto.kernels.attention import TENSORS, Attention
from stretto.observe.nested import leaves

Size = Any  # int, or a sympy expression


@dataclass(frozen=True)
class Spec:
    """A tensor: shape, strides (numbers of elements), type."""

    shape: tuple[Size, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    key: int = 0  # identity of the storage while the trace ran
    grad: bool = field(default=False, compare=False)  # autograd wants a gradient of it: not of what is frozen, detached

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def numel(self) -> Size:
        """Elements, repeated ones included."""
        return product(self.shape)

    @property
    def nbytes(self) -> Size:
        """Bytes a kernel would touch: an expanded dimension (stride 0) is stored once."""
        sizes = [s for s, step in zip(self.shape, self.stride, strict=True) if step != 0 or s == 1]
        return product(sizes) * self.itemsize

    @property
    def row(self) -> Size:
        """Elements of one entry along the first dimension."""
        return product(self.shape[1:])

    @property
    def floating(self) -> bool:
        """Whether the tensor holds real numbers."""
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Matrix:
    """A stretto CSR or a torch sparse matrix: its sizes, and bytes of one column index."""

    num_rows: Size
    num_cols: Size
    num_edges: Size
    index_bytes: int
    value_bytes: int = 0

    @property
    def nbytes(self) -> Size:
        """Pointers (8 bytes each), columns and values."""
        return 8 * (self.num_rows + 1) + self.num_edges * (self.index_bytes + self.value_bytes)


def product(sizes: Any) -> Size:
    """The product of sizes, 1 for none."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor; 0 where it has none of its own."""
    if tensor.layout != torch.strided:
        return id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # functional or meta wrappers own no storage
        return 0


def describe(value: Any) -> Any:
    """The value, with a Spec or a Matrix in place of every tensor and matrix inside."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            return Spec(tuple(value.shape), value.stride(), value.dtype, storage_key(value), value.requires_grad)
        return _sparse(value)
    if isinstance(value, Csr):
        index = value.col if value.col is not None else value.edge_id
        size = index.element_size() if index is not None else 0
        return Matrix(value.num_rows, value.num_cols, value.num_edges, size)
    if isinstance(value, Attention):
        return {"form": value.form, **{name: describe(getattr(value, name)) for name in (*TENSORS, "bias")}}
    if isinstance(value, (list, tuple)):
        return tuple(describe(v) for v in value)
    if isinstance(value, dict):
        return {k: describe(v) for k, v in value.items()}
    return value


def _sparse(value: Tensor) -> Matrix:
    nnz = value._nnz()
    if value.layout in (torch.sparse_csr, torch.sparse_csc):
        inner = value.col_indices() if value.layout == torch.sparse_csr else value.row_indices()
        index = inner.element_size()
    else:
        index = 16
    return Matrix(value.shape[0], value.shape[-1], nnz, index, value.dtype.itemsize)


def tensors(value: Any) -> list[Spec]:
    """Every Spec inside a described value, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Spec)]


def matrices(value: Any) -> list[Matrix]:
    """Every Matrix inside a described value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Matrix)]
