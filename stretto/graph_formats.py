"""From the user's formats to pairs of indices: edge_index, EdgeIndex, torch sparse COO/CSR/CSC, SparseTensor.

Everything is checked here, before any kernel runs: types, shapes, sizes and ranges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto import settings
from stretto.errors import IndexRangeError, expect, fail
from stretto.kernels import Csr, build

Sizes = tuple[int | None, int | None]


def plain(index: Any) -> Any:
    """The tensor inside PyG's EdgeIndex or Index, which have no storage of their own; anything else as it is."""
    if type(index) is not Tensor and isinstance(index, Tensor) and hasattr(index, "as_tensor"):
        return index.as_tensor()
    return index


def sizes_of(edges: Any, num_nodes: Any) -> Sizes | None:
    """(num_src, num_dst) as far as the caller, or an EdgeIndex itself, says; None: nothing is said."""
    if type(num_nodes) is int and num_nodes >= 0:
        return num_nodes, num_nodes
    if num_nodes is None:
        own = (None, None)
        if type(edges) is not Tensor and isinstance(edges, Tensor) and hasattr(edges, "sparse_size"):
            own = edges.sparse_size()  # of a SparseTensor, which is no Tensor, pairs() reads them
        return None if own == (None, None) else (own[0], own[1])
    given = tuple(num_nodes) if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    if len(given) != 2 or any(s is not None and (not hasattr(s, "__index__") or int(s) < 0) for s in given):
        fail(f"Graph.of: 'num_nodes' is {num_nodes!r}, wanted a number of nodes or (num_src, num_dst)")
    return None if given[0] is None else int(given[0]), None if given[1] is None else int(given[1])


def pairs(edges: Any, sizes: Sizes | None, flow: str) -> tuple[Tensor, Tensor, int, int, bool | None]:
    """Destinations, sources, the numbers of both, all checked, and whether the destinations are in order, if known."""
    forward = flow == "source_to_target"
    if isinstance(edges, Tensor) and edges.layout == torch.strided:
        source, target = _edge_index(plain(edges))
        num_src, num_dst = sizes if sizes is not None else (None, None)
    else:
        target, source, (num_dst, num_src) = _sparse(edges)
        wanted_src, wanted_dst = sizes if sizes is not None else (None, None)
        expect(
            wanted_src in (None, num_src) and wanted_dst in (None, num_dst),
            f"Graph.of: the sparse matrix is {num_dst}x{num_src} (destinations x sources), "
            f"but 'num_nodes' says {wanted_dst}x{wanted_src}",
        )
    rows, cols, in_order = build.survey(*((target, source) if forward else (source, target)))
    of_target, of_source = (rows, cols) if forward else (cols, rows)
    if num_src is None and num_dst is None:
        num_src = num_dst = max(of_source[1], of_target[1]) + 1
    num_src = of_source[1] + 1 if num_src is None else num_src
    num_dst = of_target[1] + 1 if num_dst is None else num_dst
    _in_range("source", of_source, num_src)
    _in_range("destination", of_target, num_dst)
    found = (target, source, num_dst, num_src) if forward else (source, target, num_src, num_dst)
    return (*found, in_order)


def few(edges: Any, sizes: Sizes | None, flow: str) -> tuple[Csr, Csr] | None:
    """The matrix of few edges between known numbers of nodes and its transpose, all checked; None: not of that kind."""
    if type(edges) is not Tensor or sizes is None or edges.device.type != "cpu" or edges.layout != torch.strided:
        return None
    num_src, num_dst = sizes
    if num_src is None or num_dst is None or edges.dim() != 2 or not 0 < edges.size(1) < build.FEW_EDGES:
        return None
    if max(num_src, num_dst) > 2 * build.FEW_EDGES or not build.is_native(edges):
        return None
    if index_dtype(max(num_src, num_dst), edges.size(1)) is not torch.int32:
        return None
    source, target = _edge_index(edges)
    if flow == "source_to_target":
        of_target, of_source, csr, transposed = build.of_few(target, source, num_dst, num_src)
    else:
        of_source, of_target, csr, transposed = build.of_few(source, target, num_src, num_dst)
    _in_range("source", of_source, num_src)
    _in_range("destination", of_target, num_dst)
    assert csr is not None
    assert transposed is not None
    return csr, transposed


def check_range(what: str, index: Tensor, size: int) -> None:
    """Every index lies in [0, size)."""
    _in_range(what, build.minmax(index), size)


def _in_range(what: str, ends: tuple[int, int], size: int) -> None:
    least, most = ends
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise IndexRangeError(f"Graph.of: {what} index {wrong} is out of range, wanted 0 <= index < {size}")


def index_dtype(size: int, num_edges: int) -> torch.dtype:
    """int32 while nodes and edges fit, unless the user asks for int64."""
    wanted = settings.get("STRETTO_INDEX")
    fits = max(size, num_edges) < 2**31
    if wanted == "int32" and not fits:
        fail(f"STRETTO_INDEX=int32: {max(size, num_edges)} nodes or edges need int64")
    return torch.int32 if fits and wanted != "int64" else torch.int64


def _edge_index(edges: Tensor) -> tuple[Tensor, Tensor]:
    if edges.dim() != 2 or edges.size(0) != 2 or edges.dtype not in (torch.int64, torch.int32):
        fail(
            f"Graph.of: 'edges' is {edges.dtype} of shape {list(edges.shape)}, "
            "wanted an edge_index of int64 or int32 and shape [2, E]"
        )
    source, target = edges.unbind()
    return source, target


def _sparse(matrix: Any) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Rows, columns and shape of a sparse matrix, in the order of its stored values."""
    if isinstance(matrix, Tensor):
        expect(matrix.dim() == 2, f"Graph.of: the sparse tensor has shape {list(matrix.shape)}, wanted two dimensions")
        shape = (matrix.size(0), matrix.size(1))
        if matrix.layout == torch.sparse_coo:
            indices = matrix._indices()
            return indices[0], indices[1], shape
        if matrix.layout == torch.sparse_csr:
            col = matrix.col_indices()
            return _expand(matrix.crow_indices(), col), col, shape
        if matrix.layout == torch.sparse_csc:
            row = matrix.row_indices()
            return row, _expand(matrix.ccol_indices(), row), shape
    if hasattr(matrix, "coo") and hasattr(matrix, "sparse_sizes"):  # torch_sparse.SparseTensor
        row, col, _ = matrix.coo()
        return row, col, tuple(matrix.sparse_sizes())
    fail(
        f"Graph.of: 'edges' is {type(matrix).__name__}, wanted an edge_index, EdgeIndex, "
        "torch sparse COO, CSR or CSC tensor, or SparseTensor"
    )


def _expand(pointers: Tensor, like: Tensor) -> Tensor:
    return torch.repeat_interleave(pointers.diff(), output_size=like.numel()).to(like.dtype)
