"""edge_softmax: softmax over each destination's incoming edges, per head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import fail
from stretto.graph import Graph
from stretto.kernels import reference
from stretto.ops import library, rows
from stretto.ops.batched import one_by_one
from stretto.ops.checks import check_values
from stretto.ops.op import Op, Sample


def edge_softmax(graph: Graph, score: Tensor) -> Tensor:
    """exp(score) / sum over the destination's edges, shifted by the row's maximum first.

    graph [n, m], score [E] or [E, ...] in the order of edge_index -> the same shape.
    """
    check_values("edge_softmax", "score", score, graph.device)
    if not score.dim() or score.size(0) != graph.num_edges:
        fail(f"edge_softmax: 'score' has shape {list(score.shape)}, wanted {graph.num_edges} rows, one per edge")
    if score.dim() != 2:
        columns = score.reshape(graph.num_edges, rows._row_size(score))
        return edge_softmax(graph, columns).reshape(score.shape)
    if library.traced(score):
        return torch.ops.stretto.edge_softmax(graph.handle, score)
    if library.recorded(score):
        return _EdgeSoftmax.apply(graph, score)
    return run(graph, score)


def run(graph: Graph, score: Tensor) -> Tensor:
    """No autograd. score [E, h] -> [E, h]."""
    return kernels.backend(score.device).edge_softmax(graph.edge_csr, score)


def run_grad(graph: Graph, alpha: Tensor, grad: Tensor) -> Tensor:
    """No autograd."""
    return kernels.backend(alpha.device).edge_softmax_grad(graph.edge_csr, alpha, grad)


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, score: Tensor) -> Tensor:
        ctx.graph = graph
        alpha = run(graph, score)
        ctx.save_for_backward(alpha)
        return alpha

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        (alpha,), graph, grad = ctx.saved_tensors, ctx.graph, grads[0]
        if torch.is_grad_enabled() and (grad.requires_grad or alpha.requires_grad):  # differentiated again
            total = rows.gather_rows(rows.sum_edges(graph, alpha * grad), graph.segment_index)
            return None, alpha * (grad - total)
        return None, run_grad(graph, alpha, grad)


def reference_softmax(graph: Graph, score: Tensor) -> Tensor:
    """edge_softmax in plain PyTorch."""
    columns = score.reshape(graph.num_edges, rows._row_size(score))
    return reference.edge_softmax(graph.edge_csr, columns).reshape(score.shape)


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Without heads, with some, and with large scores."""
    e = graph.num_edges
    yield Sample((graph, torch.randn(e, dtype=torch.float64).to(dtype)), {})
    yield Sample((graph, torch.randn(e, 4, dtype=torch.float64).to(dtype)), {})
    yield Sample((graph, (torch.randn(e, 3, dtype=torch.float64) * 100).to(dtype)), {})


OP = Op(
    "edge_softmax",
    edge_softmax,
    reference_softmax,
    samples,
    lambda graph, score: 5 * score.numel(),
    lambda graph, score: 2 * score.numel() * score.element_size() + 8 * (graph.num_rows + 1),
)
