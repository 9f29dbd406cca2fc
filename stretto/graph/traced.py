"""TracedGraph: what Graph.of gives while torch.compile traces. Sizes and a handle; the real graph is looked up when the
compiled code runs (stretto/ops/kernel.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.errors import expect


@dataclass
class TracedGraph:
    """num_rows destinations by num_cols sources; handle [1] int64 on the CPU is the number of the graph."""

    handle: Tensor
    num_rows: int
    num_cols: int
    num_edges: int
    device: torch.device

    @property
    def T(self) -> TracedGraph:
        handle = torch.ops.stretto.transposed(self.handle)
        return TracedGraph(handle, self.num_cols, self.num_rows, self.num_edges, self.device)

    @property
    def segments(self) -> TracedGraph:
        """The graph that sends edge e's message to its destination. [n, E]."""
        handle = torch.ops.stretto.segments_of(self.handle)
        return TracedGraph(handle, self.num_rows, self.num_edges, self.num_edges, self.device)

    @property
    def segment_index(self) -> Tensor:
        """Destination of every edge in the user's order. [E] int64."""
        index: Tensor = torch.ops.stretto.segment_index(self.handle, self.num_edges, self.device)
        return index

    @staticmethod
    def standing_for(graph: Any) -> TracedGraph:
        """A Graph made outside the traced function: what derives from it is looked up when the compiled code runs."""
        return TracedGraph(graph.handle, graph.num_rows, graph.num_cols, graph.num_edges, graph.device)

    @property
    def with_self_loops(self) -> TracedGraph:
        raise NotImplementedError("with_self_loops has a data-dependent size and cannot be traced")

    @staticmethod
    def of(edges: Any, num_nodes: Any, flow: str) -> TracedGraph:
        expect(
            isinstance(edges, Tensor) and edges.layout == torch.strided,
            "Graph.of: under torch.compile 'edges' must be an edge_index; make the Graph outside the compiled function",
        )
        if num_nodes is not None and not isinstance(num_nodes, (tuple, list)):
            num_nodes = (num_nodes, num_nodes)
        expect(
            num_nodes is not None and num_nodes[0] is not None and num_nodes[1] is not None,
            "Graph.of: under torch.compile 'num_nodes' must be given",
        )
        num_src, num_dst = num_nodes
        handle = torch.ops.stretto.graph(edges, num_src, num_dst, flow)
        if flow == "target_to_source":
            num_src, num_dst = num_dst, num_src
        return TracedGraph(handle, num_dst, num_src, edges.shape[1], edges.device)

    @staticmethod
    def of_segments(index: Tensor, num_segments: int | None) -> TracedGraph:
        expect(num_segments is not None, "Graph.of_segments: under torch.compile 'num_segments' must be given")
        assert num_segments is not None
        handle = torch.ops.stretto.segments(index, num_segments)
        return TracedGraph(handle, num_segments, index.shape[0], index.shape[0], index.device)
