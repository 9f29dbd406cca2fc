"""Signature and output of every kernel: the whole native surface on one page.

A kernel takes tensors and a Csr and returns tensors; it knows no autograd, no Graph, no PyG. Each is written three
times: reference.py (plain PyTorch: specification, oracle, fallback), cpu.py over csrc/kernels, and triton/ (GPU).

    kernel              arguments                                             result
    spmm                x [m, k] or [m, h, f], weight [E] or [E, h] ...       [n, k] or [n, h, f] (and tie counts)
    spmm_extremum_grad  transposed csr, x, weight, out, share                 dx like x, dweight like weight
    sddmm               a [n, h, f], b [m, h, f]                              [E, h]
    sddmm_add           a [n, h], b [m, h]                                    [E, h]
    edge_softmax        score [E, h]                                          [E, h]
    edge_softmax_grad   alpha [E, h], grad [E, h]                             [E, h]
    mul_grad            x [E, k], grad [n, k]                                 [E, k]
    gather_rows         x [m, ...], index [E]                                 [E, ...]
    segment_matmul      x [N, i], ptr [S + 1], weight [S, i, o]               [N, o]
    attention           an Attention: v, left, right, att, edge, attr, query  out [n, h, f], out_attr, alpha, statistics
    attention_grad      the same, grad of out, out_attr and alpha             gradients of its tensors
    edge_messages       row, col, edge and row2, col2, edge2, activations     [n, k]
    edge_messages_grad  the same, grad [n, k]                                 gradients of its tensors
    softmax_sum         x [m, k], edge [E, k], temperature                    [n, k] and statistics
    softmax_sum_grad    the same, grad [n, k]                                 gradients of its tensors
    softplus            x, shift; with grad its gradient                      like x
    statistics          x [m, k], own [n, k], names of s statistics           [n, s, k]
    statistics_grad     the same, grad [n, s, k]                              gradients of x and own
    product             x [m, k], w [k, n], bias or what to add to            [m, n] (tall_product: by our kernel)
    product_in_blocks   x [m, k], w [k, n]; blocks of k are summed by themselves   [m, n]
    chain               stages, rows [n, i], their weights and biases         [n, o]
    chain_grad          the same, grad [n, o]                                 gradients of rows and tensors
    relu_dense          z [n, i], bias [i], weight [o, i], bias [o]           [n, o]
    relu_dense_grad     the same, grad [n, o]                                 gradients of z, its bias, weight and bias

n rows (destinations), m columns (sources), E entries; per-edge arrays are in the user's edge order.
Values are fp32, fp64, bf16 or fp16; weights and scales fp64 for fp64 values, else fp32, and so are sums.
"""

from enum import Enum

import torch

from stretto.errors import fail

# Where the CPU's kernels put what they make, said each time: else it is where torch.set_default_device() has it.
CPU = torch.device("cpu")

# Codes of csrc/abi.h.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
WIDE = (torch.float32, torch.float64)  # of kernels that add in the type of the values
REDUCES = {"sum": 0, "max": 1, "min": 2, "mul": 3}


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of dtype are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Reduce(str, Enum):
    """How messages are combined; "add" and "sum" are one value."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    MUL = "mul"
    STD = "std"
    VAR = "var"
    SOFTMAX = "softmax"
    MEDIAN = "median"

    @staticmethod
    def of(value: "str | Reduce", op: str, allowed: "tuple[Reduce, ...] | None" = None) -> "Reduce":
        """The enum for a user's string; a clear error names the op and what it takes."""
        aliases = {"add": "sum", "amax": "max", "amin": "min", "prod": "mul"}
        name = aliases.get(value, value)
        if name in _REDUCE_BY_NAME and (allowed is None or _REDUCE_BY_NAME[name] in allowed):
            return _REDUCE_BY_NAME[name]
        wanted = ", ".join(r.value for r in (allowed or tuple(Reduce)))
        fail(f"{op}: 'reduce' is {value!r}, wanted one of {wanted}")


_REDUCE_BY_NAME = {r.value: r for r in Reduce}
