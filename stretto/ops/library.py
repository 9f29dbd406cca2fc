"""The torch.library namespace "stretto": one node per op for torch.compile's eyes.

In eager mode ops run through plain autograd Functions, which cost less per call. Implementations, fake kernels and
gradients of these schemas are in registered.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stretto.graph import Graph
from stretto.graph.traced import TracedGraph

_FAKE = torch._C._TorchDispatchModeKey.FAKE
LIBRARY = torch.library.Library("stretto", "DEF")

# A graph travels as its number (`handle`); `transposed` ops run on graph.T.
SCHEMAS = (
    "graph(Tensor edge_index, SymInt num_src, SymInt num_dst, str flow) -> Tensor",
    "segments(Tensor index, SymInt num_segments) -> Tensor",
    "transposed(Tensor handle) -> Tensor",
    "segments_of(Tensor handle) -> Tensor",
    "segment_index(Tensor handle, SymInt num_edges, Device device) -> Tensor",
    "mean_scale(Tensor handle, SymInt num_rows, ScalarType dtype, Device device) -> Tensor",
    "spmm(Tensor handle, Tensor x, Tensor? weight, Tensor? row_scale, Tensor? col_scale, Tensor? y, float beta, "
    "SymInt num_rows, SymInt num_cols, bool transposed) -> Tensor",
    "extremum(Tensor handle, Tensor x, Tensor? weight, Tensor? own, str reduce, SymInt num_rows) -> "
    "(Tensor, Tensor, Tensor)",
    "extremum_grad(Tensor handle, Tensor x, Tensor? weight, Tensor out, Tensor most, Tensor ties, Tensor grad) -> "
    "(Tensor, Tensor, Tensor)",
    "sddmm(Tensor handle, Tensor a, Tensor b, str op, SymInt num_edges, bool transposed) -> Tensor",
    "edge_softmax(Tensor handle, Tensor score) -> Tensor",
    "edge_softmax_grad(Tensor handle, Tensor alpha, Tensor grad) -> Tensor",
    "gather_rows(Tensor x, Tensor index) -> Tensor",
    "scatter_rows(Tensor src, Tensor index, SymInt num_rows) -> Tensor",
    "segment_mul(Tensor handle, Tensor src, SymInt num_rows) -> Tensor",
    "segment_mul_grad(Tensor handle, Tensor src, Tensor grad) -> Tensor",
    "segment_matmul(Tensor x, SymInt[] ptr, Tensor weight) -> Tensor",
    "attention(Tensor handle, Tensor? v, Tensor? left, Tensor? right, Tensor? att, Tensor? edge, Tensor? attr, "
    "Tensor? query, Tensor? seed, str form, float slope, float scale, float dropout, bool weights, bool dropped, "
    "SymInt num_rows, SymInt num_edges) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attention_grad(Tensor handle, Tensor? v, Tensor? left, Tensor? right, Tensor? att, Tensor? edge, Tensor? attr, "
    "Tensor? query, Tensor? seed, str form, float slope, float scale, float dropout, bool weights, bool dropped, "
    "Tensor out, Tensor out_attr, Tensor alpha, Tensor stats, Tensor wide, Tensor? grad, Tensor? grad_attr, "
    "Tensor? grad_alpha, bool[] needs) -> Tensor[]",
    "edge_messages(Tensor handle, Tensor? row, Tensor? col, Tensor? edge, Tensor? row2, Tensor? col2, Tensor? edge2, "
    "str act, str act2, SymInt num_rows) -> Tensor",
    "edge_messages_grad(Tensor handle, Tensor? row, Tensor? col, Tensor? edge, Tensor? row2, Tensor? col2, "
    "Tensor? edge2, str act, str act2, Tensor grad, bool[] needs) -> Tensor[]",
    "softmax_sum(Tensor handle, Tensor x, Tensor? edge, Tensor heat, str act, float shift, bool detached, "
    "SymInt num_rows) -> (Tensor, Tensor, Tensor, Tensor)",
    "softmax_sum_grad(Tensor handle, Tensor x, Tensor? edge, Tensor heat, str act, float shift, bool detached, "
    "Tensor out, Tensor most, Tensor inverse, Tensor grad, bool[] needs) -> Tensor[]",
    "statistics(Tensor handle, Tensor x, Tensor? own, str[] names, SymInt num_rows) -> Tensor",
    "statistics_grad(Tensor handle, Tensor x, Tensor? own, str[] names, Tensor grad, bool[] needs) -> Tensor[]",
)
for _schema in SCHEMAS:
    LIBRARY.define(_schema)


def traced(x: Tensor) -> bool:
    """Whether x must go through torch.library: under torch.compile or a FakeTensorMode, and where it is not plain."""
    if torch.compiler.is_compiling() or (type(x) is not Tensor and type(x) is not torch.nn.Parameter):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_mode(_FAKE) is not None


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd must see a call: some tensor carries a gradient, or forward mode is on (Functions refuse it)."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:  # a loop: small calls feel the generator of any()
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def mean_scale(graph: Graph | TracedGraph, dtype: torch.dtype) -> Tensor:
    """1 / max(degree, 1) of a graph, also while tracing. [n]."""
    if isinstance(graph, TracedGraph) or torch.compiler.is_compiling():
        return torch.ops.stretto.mean_scale(graph.handle, graph.num_rows, dtype, graph.device)
    return graph.mean_scale(dtype)
