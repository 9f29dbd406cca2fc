"""Who may stand for a gather or a scatter by rows: the ways of torch, PyG, torch_scatter, pyg_lib, and ours.

What a way needs of the index alone (its order, a matrix) is made once where the model's steps have one index, and in
every call where each step makes its index anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from stretto.ops import gather_rows, segment_reduce
from stretto.profile import stock
from stretto.profile.contest import Candidates

DENSE = 1 << 22  # entries of a one-hot matrix that a dense product may have
Offers = tuple[Candidates, dict[str, str]]  # candidates; those that are not to be had, with the reason
Step = Callable[[Tensor], Tensor]


def prepared(make: Callable[[], Step], lasting: bool) -> Step:
    """What make() gives, made once or in every call."""
    return make() if lasting else lambda x: make()(x)


def gather_candidates(index: Tensor, num_rows: int, reduce: str = "sum", *, lasting: bool = True) -> Offers:
    """x[index]: torch's ways, and ours. index [E], x [num_rows, K]."""
    result: Candidates = {
        "index_select": lambda x: x.index_select(0, index),
        "x[index]": lambda x: x[index],
        "embedding": lambda x: torch.nn.functional.embedding(index, x),
        "gather": lambda x: x.gather(0, index.long()[:, None].expand(-1, x.size(1))),
    }
    if index.numel() * num_rows <= DENSE:
        result["dense GEMM"] = prepared(
            lambda: dense_product(torch.nn.functional.one_hot(index.long(), num_rows)), lasting
        )
    # A new tensor with the same content is recognised at a cost, which an index made in every step has to pay.
    result["stretto"] = lambda x: gather_rows(x, index if lasting else index.detach())
    return result, {}


def scatter_candidates(index: Tensor, num_rows: int, reduce: str = "sum", *, lasting: bool = True) -> Offers:
    """Rows of s [E, K] reduced by index [E] -> [num_rows, K]; 0 where there are none. reduce: sum, mean, max or min."""
    long = index.long()
    native = stock.TORCH_REDUCE[reduce]
    offers, skipped = stock.segment_reduce(torch.empty(index.numel(), 1, device=index.device), long, num_rows, reduce)
    result: Candidates = {c.name: c.forward for c in offers}
    result["scatter_reduce_"] = lambda s: s.new_zeros(num_rows, s.size(1)).scatter_reduce_(
        0, long[:, None].expand_as(s), s, native, include_self=False
    )
    if reduce == "sum":
        result["index_add_"] = lambda s: s.new_zeros(num_rows, s.size(1)).index_add_(0, index, s)
        result["index_put_"] = lambda s: s.new_zeros(num_rows, s.size(1)).index_put_((index,), s, accumulate=True)
        result["scatter_add_"] = lambda s: s.new_zeros(num_rows, s.size(1)).scatter_add_(
            0, long[:, None].expand_as(s), s
        )
        result["sparse CSR product"] = prepared(lambda: _selection(long, num_rows), lasting)
        if index.numel() * num_rows <= DENSE:
            result["dense GEMM"] = prepared(
                lambda: dense_product(torch.nn.functional.one_hot(long, num_rows).T.contiguous()), lasting
            )
    else:
        with warnings.catch_warnings():  # its warning is said once in a process, and here to nobody
            warnings.filterwarnings("ignore", "index_reduce")
            torch.zeros(1, 1).index_reduce_(0, torch.zeros(1, dtype=torch.long), torch.ones(1, 1), native)
        result["index_reduce_"] = lambda s: s.new_zeros(num_rows, s.size(1)).index_reduce_(
            0, long, s, native, include_self=False
        )
    sort: dict[str, Callable[[Tensor], Tensor]] = {"sorted, segment_reduce": torch.argsort}
    pyg_lib = stock.optional("pyg_lib")
    if isinstance(pyg_lib, str):
        skipped["sorted by pyg_lib, segment_reduce"] = pyg_lib
    else:
        sort["sorted by pyg_lib, segment_reduce"] = lambda i: pyg_lib.ops.index_sort(i, num_rows)[1]
    for name, order in sort.items():
        result[name] = prepared(lambda order=order: _segments(long, num_rows, reduce, order), lasting)  # type: ignore[misc]
    result["stretto"] = lambda s: segment_reduce(s, index if lasting else index.detach(), num_rows, reduce=reduce)
    return result, skipped


def _segments(index: Tensor, num_rows: int, reduce: str, sort: Callable[[Tensor], Tensor]) -> Step:
    order, lengths = sort(index), torch.bincount(index, minlength=num_rows)
    empty = (lengths == 0)[:, None]

    def reduced(s: Tensor) -> Tensor:
        out = torch.segment_reduce(s[order], reduce, lengths=lengths, unsafe=True)
        return out if reduce == "sum" else out.masked_fill(empty, 0)

    return reduced


def dense_product(selection: Tensor) -> Step:
    """selection @ x, the selection made once in each type."""
    saved: dict[torch.dtype, Tensor] = {}

    def product(x: Tensor) -> Tensor:
        if x.dtype not in saved:
            saved[x.dtype] = selection.to(x.dtype)
        return saved[x.dtype] @ x

    return not_in_half(product)


def not_in_half(function: Step) -> Step:
    """Half products go through oneDNN, which ends the process with an illegal instruction on some virtual CPUs."""

    def call(x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64) and not x.is_cuda:
            raise NotImplementedError("dense products are not tried in half precision")
        return function(x)

    return call


def _selection(index: Tensor, num_rows: int) -> Step:
    entries = torch.arange(index.numel(), device=index.device)
    saved: dict[torch.dtype, Tensor] = {}

    def product(s: Tensor) -> Tensor:
        if s.dtype not in saved:
            saved[s.dtype] = _csr(index, entries, torch.ones(index.numel(), dtype=s.dtype, device=s.device), num_rows)
        return saved[s.dtype] @ s

    return product


def _csr(rows: Tensor, columns: Tensor, ones: Tensor, num_rows: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")
        size = (num_rows, rows.numel())
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), ones, size, check_invariants=False).to_sparse_csr()


FAMILIES: dict[str, Callable[..., Offers]] = {"gather": gather_candidates, "scatter": scatter_candidates}
