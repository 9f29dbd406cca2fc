"""The operators: autograd over kernels, in terms of Graph. KERNELS lists them all, OPS those that users call."""

from stretto.ops.attention import KERNEL as _ATTENTION
from stretto.ops.attention import attention, cosine_attention
from stretto.ops.edge_messages import KERNEL as _EDGE_MESSAGES
from stretto.ops.edge_messages import edge_messages
from stretto.ops.edge_mlp import edge_mlp
from stretto.ops.edge_softmax_sum import KERNEL as _SOFTMAX_SUM
from stretto.ops.edge_softmax_sum import softmax_sum
from stretto.ops.edge_statistics import KERNEL as _STATISTICS
from stretto.ops.edge_statistics import neighbour_statistics, statistics
from stretto.ops.extremum import KERNEL as _EXTREMUM
from stretto.ops.kernel import Kernel, Sample
from stretto.ops.matmul import KERNEL as _SEGMENT_MATMUL
from stretto.ops.matmul import segment_matmul
from stretto.ops.rows import GATHER, SCATTER, gather_rows, scatter_rows
from stretto.ops.sddmm import KERNEL as _SDDMM
from stretto.ops.sddmm import sddmm
from stretto.ops.segment import KERNEL as _SEGMENT_REDUCE
from stretto.ops.segment import PRODUCT, segment_reduce
from stretto.ops.softmax import KERNEL as _EDGE_SOFTMAX
from stretto.ops.softmax import edge_softmax
from stretto.ops.spmm import KERNEL as _SPMM
from stretto.ops.spmm import spmm

KERNELS: tuple[Kernel, ...] = (
    _SPMM,
    _SDDMM,
    _EDGE_SOFTMAX,
    _SEGMENT_REDUCE,
    GATHER,
    SCATTER,
    _SEGMENT_MATMUL,
    _ATTENTION,
    _EDGE_MESSAGES,
    _SOFTMAX_SUM,
    _STATISTICS,
    _EXTREMUM,
    PRODUCT,
)
OPS = {kernel.name: kernel for kernel in KERNELS if kernel.function is not None}

__all__ = [
    "KERNELS",
    "OPS",
    "Kernel",
    "Sample",
    "attention",
    "cosine_attention",
    "edge_messages",
    "edge_mlp",
    "edge_softmax",
    "gather_rows",
    "neighbour_statistics",
    "scatter_rows",
    "sddmm",
    "segment_matmul",
    "segment_reduce",
    "softmax_sum",
    "spmm",
    "statistics",
]
