"""The operators: autograd over kernels, in terms of Graph. OPS lists them all."""

from stretto.ops import attention as _attention
from stretto.ops import edge_messages as _edge_messages
from stretto.ops import edge_softmax_sum as _edge_softmax_sum
from stretto.ops import edge_statistics as _edge_statistics
from stretto.ops import matmul as _matmul
from stretto.ops import rows as _rows
from stretto.ops import sddmm as _sddmm
from stretto.ops import segment as _segment
from stretto.ops import softmax as _softmax
from stretto.ops import spmm as _spmm
from stretto.ops.attention import attention, cosine_attention
from stretto.ops.edge_messages import edge_messages
from stretto.ops.edge_mlp import edge_mlp
from stretto.ops.edge_softmax_sum import softmax_sum
from stretto.ops.edge_statistics import neighbour_statistics, statistics
from stretto.ops.matmul import segment_matmul
from stretto.ops.op import Op, Sample
from stretto.ops.registered import REGISTERED
from stretto.ops.rows import gather_rows, scatter_rows
from stretto.ops.sddmm import sddmm
from stretto.ops.segment import segment_reduce
from stretto.ops.softmax import edge_softmax
from stretto.ops.spmm import spmm

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        _spmm.OP,
        _sddmm.OP,
        _softmax.OP,
        _segment.OP,
        _rows.GATHER,
        _rows.SCATTER,
        _matmul.OP,
        _attention.OP,
        _edge_messages.OP,
        _edge_softmax_sum.OP,
        _edge_statistics.OP,
    )
}

__all__ = [
    "OPS",
    "REGISTERED",
    "Op",
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
