"""The kernels in Triton, one file each, the functions of cpu.py: for CUDA, or for the CPU under TRITON_INTERPRET=1."""

from stretto.kernels.backend import Backend
from stretto.kernels.triton import (
    attention,
    attention_grad,
    attention_layer,
    column_sum,
    edge_messages,
    extremum_grad,
    gather,
    mul_grad,
    pieces,
    product,
    sddmm,
    segment_matmul,
    softmax,
    softmax_sum,
    spmm,
    tape,
)

BACKEND = Backend.of(
    "triton",
    *(attention, attention_grad, column_sum, edge_messages, extremum_grad, gather, mul_grad, pieces, product, sddmm),
    *(segment_matmul, softmax, softmax_sum, spmm),
    variants="cuda",
    device_seed=True,
    bias_width=attention.BIAS_WIDTH,
    attention_layer=attention_layer,
    tape=tape,
)
