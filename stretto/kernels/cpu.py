"""The kernels on the CPU: pointers out of tensors, then one call into libstretto each."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from stretto.kernels import abi, native
from stretto.kernels.csr import Csr
from stretto.kernels.looks import settled
from stretto.kernels.schema import CPU, DTYPES, REDUCES, accumulate_type
from stretto.lifetime import popped_from
from stretto.memory import pages
from stretto.memory.pool import empty
from stretto.recording import recorder

# From this many edges on, weights are brought into the order of the rows before they are used.
MANY_EDGES = 1 << 14
# Up to this many bytes, reading a scale for every row of x that is read is felt.
NARROW_BYTES = 256


def struct(csr: Csr, *, in_row_order: bool = False) -> int:
    """Address of the matrix's C struct, made once and kept with it. in_row_order: what is per edge has been sorted."""
    key = "struct_in_row_order" if in_row_order else "struct"
    kept: tuple[int, Any] | None = csr.cache.get(key)
    if kept is None:
        index = csr.col if csr.col is not None else csr.edge_id
        assert csr.tasks is not None
        assert csr.hubs is not None
        arrays = csr.rowptr, csr.col, None if in_row_order else csr.edge_id, csr.tasks, csr.hubs
        sizes = csr.num_rows, csr.num_cols, csr.num_edges, csr.tasks.size(0), csr.hubs.size(0), csr.num_slots
        fields = abi.CSR(*map(pointer, arrays), *sizes, index.element_size() if index is not None else 4)
        # Of two threads' structs the first: the other is freed while nobody holds its address.
        kept = csr.cache.setdefault(key, (ctypes.addressof(fields), fields))
    if recorder.program is not None:
        recorder.program.matrices[kept[0]] = csr
    return kept[0]


def spmm(
    csr: Csr,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    y: Tensor | None = None,
    beta: float = 1.0,
    count_ties: bool = False,
    tile: int = 0,
    prefetch: int = 8,
) -> tuple[Tensor, Tensor | None]:
    x = by_rows(x)
    pages.read_at_random(x)
    dtype = x.dtype
    heads, width = (x.size(1), x.size(2)) if x.dim() == 3 else (1, x.size(1))
    out = empty((csr.num_rows, *x.shape[1:]), dtype)
    if out.numel() == 0:
        return out, torch.empty_like(out, dtype=accumulate_type(dtype)) if count_ties else None
    ties = empty(out.shape, accumulate_type(dtype)) if count_ties else None
    in_row_order = False
    if weight is not None and csr.edge_id is not None and csr.num_edges >= MANY_EDGES:
        weight, in_row_order = _in_row_order(csr, weight), True
    weight, weight_heads = _weight(weight, dtype)
    row_scale, col_scale = _plain(row_scale, dtype), _plain(col_scale, dtype)
    narrow = x.element_size() in (4, 8) and x.element_size() * heads * width <= NARROW_BYTES
    if col_scale is not None and weight is None and narrow:
        weight = _scale_of_edges(csr, col_scale)
        if weight is not None:
            weight_heads, col_scale, in_row_order = 1, None, True
    if y is not None:
        y = by_rows(y.to(dtype))
    graph, y_step = struct(csr, in_row_order=in_row_order), 0 if y is None else y.stride(0)
    rows = x, x.stride(0), heads, width
    factors = weight, weight_heads, row_scale, col_scale
    result = y, y_step, beta, out, heads * width, ties
    native.kernel("stretto_spmm", graph, DTYPES[dtype], REDUCES[reduce], *rows, *factors, *result, tile, prefetch)
    return out, ties


def spmm_extremum_grad(
    csr_t: Csr, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor, *, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    x, out, share = x.contiguous(), out.contiguous(), share.contiguous()
    pages.read_at_random(x)
    acc = accumulate_type(x.dtype)
    heads, width = (x.size(1), x.size(2)) if x.dim() == 3 else (1, x.size(1))
    shape = None if weight is None else weight.shape
    weight, weight_heads = _weight(weight, x.dtype)
    dx = empty(x.shape, acc) if need_x else None
    dweight = torch.empty(shape, dtype=acc, device=CPU) if need_weight and shape is not None else None
    if x.numel() == 0 or csr_t.num_edges == 0:
        return (None if dx is None else dx.zero_()), (None if dweight is None else dweight.zero_())
    rest = x, heads, width, weight, weight_heads, out, share, dx, dweight
    native.kernel("stretto_spmm_extremum_grad", struct(csr_t), DTYPES[x.dtype], *rest)
    return dx, dweight


def sddmm(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    a, b = by_rows(a), by_rows(b)
    pages.read_at_random(b)
    out = empty((csr.num_edges, a.size(1)), accumulate_type(a.dtype))
    if out.numel():
        rest = a, a.stride(0), b, b.stride(0), a.size(1), a.size(2), out
        native.kernel("stretto_sddmm", struct(csr), DTYPES[a.dtype], *rest)
    return out


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    return _per_edge("stretto_sddmm_add", csr, a, b, (csr.num_edges, a.size(1)))


def edge_softmax(csr: Csr, score: Tensor) -> Tensor:
    return _per_edge("stretto_edge_softmax", csr, score, None, score.shape)


def edge_softmax_grad(csr: Csr, alpha: Tensor, grad: Tensor) -> Tensor:
    return _per_edge("stretto_edge_softmax_grad", csr, alpha, grad, alpha.shape)


def mul_grad(csr: Csr, x: Tensor, grad: Tensor) -> Tensor:
    return _per_edge("stretto_mul_grad", csr, x, grad, x.shape)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    x, index = x.contiguous(), index.contiguous()
    pages.read_at_random(x)
    out = empty((index.numel(), *x.shape[1:]), x.dtype)
    if out.numel():
        row_bytes = x[0].numel() * x.element_size()
        native.kernel("stretto_gather_rows", x, row_bytes, index, index.element_size(), index.numel(), out)
    return out


def gather_ceiling(x: Tensor, index: Tensor, prefetch: int) -> Tensor:
    """Sums of random rows of x [m, 16 k] fp32 at index [E] int32: nothing is stored, so no gather can be faster."""
    out = torch.empty((index.numel() + 2047) // 2048, device=CPU)
    native.kernel("stretto_gather_ceiling", x, x.size(1) * 4, index, index.numel(), prefetch, out)
    return out


def _per_edge(name: str, csr: Csr, a: Tensor, b: Tensor | None, shape: tuple[int, ...] | torch.Size) -> Tensor:
    dtype = a.dtype
    acc = accumulate_type(dtype)
    a = a.to(acc).contiguous()
    out = empty(shape, acc)
    if out.numel():
        operands = (a,) if b is None else (a, b.to(acc).contiguous())
        native.kernel(name, struct(csr), DTYPES[acc], *operands, a.size(1), out)
    return out.to(dtype)


def _in_row_order(csr: Csr, weight: Tensor) -> Tensor:
    """A weight per edge, in the order of the CSR: reading it at random inside the kernel costs more than this pass.

    The last constant weight is kept beside the matrix: layers and steps that share it sort it once.
    """
    assert csr.edge_id is not None
    look = settled(weight)
    known: tuple[Any, Any, dict[int, Tensor]] | None = None if look is None else csr.cache.get("weight")
    if known is not None and known[0]() is weight and known[1] == look and known[2]:
        return known[2][0]
    ordered = gather_rows(weight.detach(), csr.edge_id)
    if look is not None:
        cell = {0: ordered}  # emptied when the weight is gone
        csr.cache["weight"] = (popped_from(cell, 0, weight), look, cell)
    return ordered


def _scale_of_edges(csr: Csr, scale: Tensor) -> Tensor | None:
    """A scale per column as a weight per edge, kept beside the matrix: the same factors, but read one after another.

    None until the same scale comes a second time: then it is likely to stay (the degrees of the graph).
    """
    few = csr.num_edges < MANY_EDGES or csr.num_edges < 4 * csr.num_cols
    look = None if csr.col is None or few else settled(scale)
    if look is None or csr.col is None:
        return None
    known: tuple[Any, Any, dict[int, Tensor]] | None = csr.cache.get("scale")
    if known is None or known[0]() is not scale or known[1] != look:
        cell: dict[int, Tensor] = {}
        csr.cache["scale"] = (popped_from(cell, 0, scale), look, cell)
        return None
    if not known[2]:
        known[2][0] = gather_rows(scale, csr.col)
    return known[2][0]


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def by_rows(x: Tensor) -> Tensor:
    """x with rows contiguous in themselves; only the row stride is free."""
    if x.dim() == 3:
        return x if x.stride(2) == 1 and x.stride(1) == x.size(2) else x.contiguous()
    return x if x.stride(1) == 1 or (x.size(1) == 1 and x.is_contiguous()) else x.contiguous()


def _plain(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else values.to(accumulate_type(dtype)).contiguous()


def _weight(weight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, int]:
    if weight is None:
        return None, 0
    return _plain(weight, dtype), weight.size(1) if weight.dim() == 2 else 1
