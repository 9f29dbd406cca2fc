"""The kernels in Triton: CUDA tensors, or CPU tensors under TRITON_INTERPRET=1. Same functions as cpu.py, one file each."""

from stretto.kernels.triton.extremum_grad import spmm_extremum_grad
from stretto.kernels.triton.gather import gather_rows
from stretto.kernels.triton.mul_grad import mul_grad
from stretto.kernels.triton.sddmm import sddmm, sddmm_add
from stretto.kernels.triton.softmax import edge_softmax, edge_softmax_grad
from stretto.kernels.triton.spmm import spmm

__all__ = [
    "edge_softmax",
    "edge_softmax_grad",
    "gather_rows",
    "mul_grad",
    "sddmm",
    "sddmm_add",
    "spmm",
    "spmm_extremum_grad",
]
