"""torch's own sparse kernels behind our signature: a candidate of the tuner, and the backend STRETTO_BACKEND=torch."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from stretto.kernels.csr import Csr


def spmm(csr: Csr, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
    """Sum over neighbours by torch's CSR product. csr [n, m], x [m, k], weight [E] -> [n, k]."""
    values = _ones(csr, x.dtype) if weight is None else csr.to_csr_order(weight).to(x.dtype)
    return _matrix(csr, values) @ x, None


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
    if key not in csr.cache:
        csr.cache[key] = torch.ones(csr.num_edges, dtype=dtype, device=csr.device)
    return csr.cache[key]
