"""The torch.library namespace "stretto": what torch.compile and torch.export see of us, one node per kernel.

A graph travels as its number (`handle`) and its sizes. The nodes that make and derive graphs are here; each kernel
registers its own from its declaration (kernel.py). In eager mode ops run through plain autograd Functions, which cost
less per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stretto.graph import Graph
from stretto.graph.traced import TracedGraph

_FAKE = torch._C._TorchDispatchModeKey.FAKE
LIBRARY = torch.library.Library("stretto", "DEF")


def add(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register a node: its schema, what it does, and what it makes of tensors that have a shape alone."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stretto::{name}", fake, lib=LIBRARY)


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
        scale: Tensor = torch.ops.stretto.mean_scale(graph.handle, graph.num_rows, dtype, graph.device)
        return scale
    return graph.mean_scale(dtype)


def graph_of(handle: Tensor) -> Graph:
    """The graph that a handle is the number of."""
    return Graph.numbered(int(handle))


# ---- graphs, and what derives from them ----


def _graph(edge_index: Tensor, num_src: int, num_dst: int, flow: str) -> Tensor:
    return Graph.of(edge_index, (num_src, num_dst), flow=flow).handle.clone()


def _segment_index(handle: Tensor, num_edges: int, device: torch.device) -> Tensor:
    return graph_of(handle).segment_index.to(torch.int64, copy=True)


def _mean_scale(handle: Tensor, num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return graph_of(handle).mean_scale(dtype).clone()


def _fake_handle(*arguments: Any) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_index(handle: Tensor, num_edges: int, device: torch.device) -> Tensor:
    return torch.empty(num_edges, dtype=torch.int64, device=device)


def _fake_scale(handle: Tensor, num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(num_rows, dtype=dtype, device=device)


add("graph(Tensor edge_index, SymInt num_src, SymInt num_dst, str flow) -> Tensor", _graph, _fake_handle)
add(
    "segments(Tensor index, SymInt num_segments) -> Tensor",
    lambda index, num_segments: Graph.of_segments(index, num_segments).handle.clone(),
    _fake_handle,
)
add("transposed(Tensor handle) -> Tensor", lambda handle: graph_of(handle).T.handle.clone(), _fake_handle)
add("segments_of(Tensor handle) -> Tensor", lambda handle: graph_of(handle).segments.handle.clone(), _fake_handle)
add("segment_index(Tensor handle, SymInt num_edges, Device device) -> Tensor", _segment_index, _fake_index)
add(
    "mean_scale(Tensor handle, SymInt num_rows, ScalarType dtype, Device device) -> Tensor",
    _mean_scale,
    _fake_scale,
)
