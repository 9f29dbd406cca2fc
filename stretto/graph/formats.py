"""From the user's formats to pairs of indices: edge_index, EdgeIndex, torch sparse COO/CSR/CSC, SparseTensor.

Everything is checked here, before any kernel runs: types, shapes, sizes and ranges.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from stretto import settings
from stretto.errors import IndexRangeError, expect, fail
from stretto.kernels import Csr, build, has_own_memory, on_host

Sizes = tuple[int | None, int | None]


def plain(index: Any) -> Any:
    """The tensor inside PyG's EdgeIndex or Index, which have no storage of their own; anything else as it is."""
    if type(index) is not Tensor and isinstance(index, Tensor):
        if hasattr(index, "as_tensor"):
            return index.as_tensor()
        if type(index) is torch.nn.Parameter:
            return index.detach()
    return index


def check_readable(name: str, index: Any) -> None:
    """Raise unless a kernel can read these indices where they lie."""
    if type(index) is not Tensor:
        fail(f"Graph.of: '{name}' is a {type(index).__name__}, wanted a plain tensor")
    if index.is_meta or (torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_FAKE) is not None):
        fail(f"Graph.of: '{name}' is on the meta device or fake, wanted indices that can be read")


_FAKE = torch._C._TorchDispatchModeKey.FAKE
MOST_NODES = 2**48  # pointers to more would take petabytes


def sizes_of(edges: Any, num_nodes: Any) -> Sizes | None:
    """(num_src, num_dst) as far as the caller, or an EdgeIndex itself, says; None: nothing is said."""
    if type(num_nodes) is int and 0 <= num_nodes < MOST_NODES:
        return num_nodes, num_nodes
    if num_nodes is None:
        own = (None, None)
        if type(edges) is not Tensor and isinstance(edges, Tensor) and hasattr(edges, "sparse_size"):
            own = edges.sparse_size()  # of a SparseTensor, which is no Tensor, pairs() reads them
        return None if own == (None, None) else (own[0], own[1])
    given = tuple(num_nodes) if isinstance(num_nodes, (tuple, list)) else (num_nodes, num_nodes)
    try:
        sizes = [None if s is None else operator.index(s) for s in given]
    except TypeError:  # a float, say, or a tensor of several
        sizes = []
    if len(sizes) != 2 or any(s is not None and not 0 <= s < MOST_NODES for s in sizes):
        fail(f"Graph.of: 'num_nodes' is {num_nodes!r}, wanted a number of nodes or (num_src, num_dst)")
    return sizes[0], sizes[1]


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
    check_readable("edges", source)
    check_readable("edges", target)
    if source.shape != target.shape or source.device != target.device:
        fail(f"Graph.of: 'edges' has {list(source.shape)} sources and {list(target.shape)} destinations, wanted pairs")
    rows, cols, in_order = build.survey(*((target, source) if forward else (source, target)))
    of_target, of_source = (rows, cols) if forward else (cols, rows)
    if num_src is None and num_dst is None:
        num_src = num_dst = max(of_source[1], of_target[1]) + 1
    num_src = of_source[1] + 1 if num_src is None else num_src
    num_dst = of_target[1] + 1 if num_dst is None else num_dst
    _in_range("source", of_source, num_src)
    _in_range("destination", of_target, num_dst)
    result = (target, source, num_dst, num_src) if forward else (source, target, num_src, num_dst)
    return (*result, in_order)


def few(edges: Any, sizes: Sizes | None, flow: str) -> tuple[Csr, Csr] | None:
    """The matrix of few edges between known numbers of nodes and its transpose, all checked; None: not of that kind."""
    if type(edges) is not Tensor or sizes is None or not on_host(edges) or edges.layout != torch.strided:
        return None
    num_src, num_dst = sizes
    if num_src is None or num_dst is None or edges.dim() != 2 or not 0 < edges.size(1) < build.FEW_EDGES:
        return None
    if max(num_src, num_dst) > 2 * build.FEW_EDGES or not build.is_native(edges):
        return None
    if index_dtype(max(num_src, num_dst), edges.size(1)) is not torch.int32:
        return None
    source, target = _edge_index(edges)
    check_readable("edges", edges)
    if flow == "source_to_target":
        of_target, of_source, csr, transposed = build.of_few(target, source, num_dst, num_src)
    else:
        of_source, of_target, csr, transposed = build.of_few(source, target, num_src, num_dst)
    _in_range("source", of_source, num_src)
    _in_range("destination", of_target, num_dst)
    assert csr is not None
    assert transposed is not None
    return csr, transposed


def check_csr(rowptr: Any, col: Any, num_cols: Any, edge_id: Any) -> None:
    """Raise unless these are the arrays of a CSR (kernels/csr.py) that kernels may follow blindly.

    On a device their values are not looked at: a mini-batch made there does not wait for the answer.
    """
    who = "Graph.of_pointers"
    expect(type(num_cols) is int and 0 <= num_cols < MOST_NODES, f"{who}: 'num_cols' is {num_cols!r}, wanted a number")
    expect(isinstance(rowptr, Tensor) and rowptr.dim() == 1 and rowptr.numel() > 0, f"{who}: 'rowptr' is no vector")
    if col is not None:
        check_readable("col", col)
    num_edges = num_cols if col is None else col.numel()
    kinds = (torch.int64,), (torch.int32, torch.int64), (torch.int32, torch.int64) if col is None else (col.dtype,)
    for (name, array), types in zip((("rowptr", rowptr), ("col", col), ("edge_id", edge_id)), kinds, strict=True):
        if array is None:
            continue
        check_readable(name, array)
        if array.dim() != 1 or array.dtype not in types or not array.is_contiguous() or array.device != rowptr.device:
            fail(
                f"{who}: '{name}' is {array.dtype} of shape {list(array.shape)} on {array.device}, wanted a contiguous "
                f"vector of {' or '.join(map(str, types))} on {rowptr.device}"
            )
    if has_own_memory(rowptr.device):
        return
    check_pointers(who, "rowptr", rowptr, rowptr.numel() - 1, num_edges)
    if col is not None:
        _in_range("column", build.minmax(col), num_cols)
    if edge_id is not None:
        expect(edge_id.numel() == num_edges, f"{who}: 'edge_id' has {edge_id.numel()} entries, wanted {num_edges}")
        _in_range("edge", build.minmax(edge_id), num_edges)
        once = bool((torch.bincount(edge_id, minlength=num_edges) == 1).all())
        expect(once, f"{who}: 'edge_id' names an edge twice, wanted each once")


def check_segments(index: Any, num_segments: Any) -> None:
    """Raise unless it is a vector of integers, and the number of segments one or None."""
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        got = f"{index.dtype} of shape {list(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        fail(f"Graph.of_segments: 'index' is {got}, wanted int32 or int64 of shape [E]")
    if num_segments is not None and not torch.compiler.is_compiling() and not _is_size(num_segments):
        fail(f"Graph.of_segments: 'num_segments' is {num_segments!r}, wanted a number or None")


def _is_size(number: Any) -> bool:
    return hasattr(number, "__index__") and not isinstance(number, Tensor) and 0 <= operator.index(number) < MOST_NODES


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
            return _expand("crow_indices", matrix.crow_indices(), col, shape[0]), col, shape
        if matrix.layout == torch.sparse_csc:
            row = matrix.row_indices()
            return row, _expand("ccol_indices", matrix.ccol_indices(), row, shape[1]), shape
    if hasattr(matrix, "coo") and hasattr(matrix, "sparse_sizes"):  # torch_sparse.SparseTensor
        row, col, _ = matrix.coo()
        return row, col, tuple(matrix.sparse_sizes())
    fail(
        f"Graph.of: 'edges' is {type(matrix).__name__}, wanted an edge_index, EdgeIndex, "
        "torch sparse COO, CSR or CSC tensor, or SparseTensor"
    )


def check_pointers(who: str, name: str, pointers: Tensor, size: int, num_edges: int) -> None:
    """Raise unless the pointers lead from 0 to num_edges, in `size` steps that never go back."""
    check_readable(name, pointers)
    if pointers.dim() != 1 or pointers.dtype not in (torch.int32, torch.int64) or pointers.numel() != size + 1:
        fail(f"{who}: '{name}' is {pointers.dtype} of shape {list(pointers.shape)}, wanted integers [{size + 1}]")
    first, last, falls = torch.stack(
        [pointers[0], pointers[-1], (pointers.diff() < 0).any().to(pointers.dtype)]
    ).tolist()
    if first != 0 or last != num_edges or falls:
        which = "going down in between" if falls else f"leading from {first} to {last}"
        fail(f"{who}: '{name}' is {which}, wanted pointers from 0 to {num_edges} that never go down")


def _expand(name: str, pointers: Tensor, like: Tensor, size: int) -> Tensor:
    check_pointers("Graph.of", name, pointers, size, like.numel())
    return torch.repeat_interleave(pointers.diff(), output_size=like.numel()).to(like.dtype)
