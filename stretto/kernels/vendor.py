"""torch's own kernels behind our signatures: a candidate of the tuner, and the backend STRETTO_BACKEND=torch.

Sums over neighbours are torch's sparse CSR product. For the rest torch has no kernel of its own: there the reference
runs, which is composed of torch's operations.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from stretto.kernels import reference
from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type


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
) -> tuple[Tensor, Tensor | None]:
    """reference.spmm, sums by torch's CSR product with rows scaled before and after it."""
    options = {"row_scale": row_scale, "col_scale": col_scale, "y": y, "beta": beta}
    per_head = weight is not None and weight.dim() > 1
    if reduce != "sum" or per_head or csr.num_edges == 0 or x.numel() == 0:
        return reference.spmm(csr, x, weight, reduce=reduce, count_ties=count_ties, **options)  # type: ignore[arg-type]
    acc = accumulate_type(x.dtype)
    values = _ones(csr, acc) if weight is None else csr.to_csr_order(weight).to(acc)
    rows = x.to(acc).flatten(1)
    rows = rows if col_scale is None else rows * col_scale.to(acc).unsqueeze(1)
    out = _matrix(csr, values) @ rows
    out = out if row_scale is None else out * row_scale.to(acc).unsqueeze(1)
    out = out.view(csr.num_rows, *x.shape[1:])
    out = out if y is None else torch.add(out, y.to(acc), alpha=beta)
    return out.to(x.dtype), None


def _matrix(csr: Csr, values: Tensor) -> Tensor:
    columns = csr.columns() if csr.col is None else csr.col
    pointers = csr.cache.get("torch_rowptr")
    if pointers is None:  # torch wants both index arrays of one type; the columns are shared
        pointers = csr.cache["torch_rowptr"] = csr.rowptr.to(columns.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "beta state"
        return torch.sparse_csr_tensor(
            pointers, columns, values, size=(csr.num_rows, csr.num_cols), check_invariants=False
        )


def _ones(csr: Csr, dtype: torch.dtype) -> Tensor:
    key = f"ones_{dtype}"
    ones: Tensor | None = csr.cache.get(key)
    if ones is None:
        ones = csr.cache[key] = torch.ones(csr.num_edges, dtype=dtype, device=csr.device)
    return ones
