"""The kernels in Triton, one file each, the functions of cpu.py: for CUDA, or for the CPU under TRITON_INTERPRET=1."""

from stretto.kernels.triton import attention_layer, tape
from stretto.kernels.triton.attention import BIAS_WIDTH, attention
from stretto.kernels.triton.attention_grad import attention_grad
from stretto.kernels.triton.column_sum import column_sum
from stretto.kernels.triton.edge_messages import edge_messages, edge_messages_grad
from stretto.kernels.triton.extremum_grad import spmm_extremum_grad
from stretto.kernels.triton.gather import gather_rows
from stretto.kernels.triton.mul_grad import mul_grad
from stretto.kernels.triton.pieces import short_rows
from stretto.kernels.triton.product import product, transposed_product
from stretto.kernels.triton.sddmm import sddmm, sddmm_add
from stretto.kernels.triton.segment_matmul import segment_matmul
from stretto.kernels.triton.softmax import edge_softmax, edge_softmax_grad
from stretto.kernels.triton.softmax_sum import softmax_sum, softmax_sum_grad
from stretto.kernels.triton.spmm import spmm

__all__ = [
    "BIAS_WIDTH",
    "attention",
    "attention_grad",
    "attention_layer",
    "column_sum",
    "edge_messages",
    "edge_messages_grad",
    "edge_softmax",
    "edge_softmax_grad",
    "gather_rows",
    "mul_grad",
    "product",
    "sddmm",
    "sddmm_add",
    "segment_matmul",
    "short_rows",
    "softmax_sum",
    "softmax_sum_grad",
    "spmm",
    "spmm_extremum_grad",
    "tape",
    "transposed_product",
]
