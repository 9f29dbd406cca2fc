"""edge_softmax: softmax over each destination's incoming edges, per head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import fail
from stretto.graph import Graph
from stretto.kernels import reference
from stretto.ops import rows
from stretto.ops.checks import check_values
from stretto.ops.cost import Cost, row_values
from stretto.ops.kernel import Kernel, Sample


def edge_softmax(graph: Graph, score: Tensor) -> Tensor:
    """exp(score) / sum over the destination's edges, shifted by the row's maximum first.

    graph [n, m], score [E] or [E, ...] in the order of edge_index -> the same shape.
    """
    check_values("edge_softmax", "score", score, graph.device)
    if not score.dim() or score.size(0) != graph.num_edges:
        fail(f"edge_softmax: 'score' has shape {list(score.shape)}, wanted {graph.num_edges} rows, one per edge")
    if score.dim() != 2:
        columns = score.reshape(graph.num_edges, row_values(score))
        return edge_softmax(graph, columns).reshape(score.shape)
    return KERNEL(graph, score)


def run(graph: Graph, score: Tensor) -> Tensor:
    """No autograd. score [E, h] -> [E, h]."""
    return kernels.backend(score.device).edge_softmax(graph.edge_csr, score)


def gradient(graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor]:
    """From alpha alone; no autograd."""
    return (kernels.backend(saved[0].device).edge_softmax_grad(graph.edge_csr, saved[0], grads[0]),)


def again(graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor]:
    """The same by ops that can be differentiated."""
    (alpha,), (grad,) = saved, grads
    total = rows.gather_rows(rows.sum_edges(graph, alpha * grad), graph.segment_index)
    return (alpha * (grad - total),)


def reference_softmax(graph: Graph, score: Tensor) -> Tensor:
    """edge_softmax in plain PyTorch."""
    columns = score.reshape(graph.num_edges, row_values(score))
    return reference.edge_softmax(graph.edge_csr, columns).reshape(score.shape)


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Without heads, with some, and with large scores."""
    e = graph.num_edges
    yield Sample((graph, torch.randn(e, dtype=torch.float64).to(dtype)), {})
    yield Sample((graph, torch.randn(e, 4, dtype=torch.float64).to(dtype)), {})
    yield Sample((graph, (torch.randn(e, 3, dtype=torch.float64) * 100).to(dtype)), {})


def _cost(graph: Any, score: Any) -> Cost:
    return Cost("softmax", 5 * score.numel, 2 * score.nbytes + 8 * (graph.num_rows + 1), depth=None)


def _gradient_cost(graph: Any, alpha: Any, grad: Any) -> Cost:
    return Cost("softmax", 4 * alpha.numel, graph.nbytes + 2 * alpha.nbytes + grad.nbytes, depth=None)


KERNEL = Kernel(
    "edge_softmax",
    "Tensor score",
    run=run,
    shapes=lambda graph, score: score.new_empty(score.shape),
    gradient=gradient,
    again=again,
    saves=lambda tensors, alpha, needs: (alpha,),
    function=edge_softmax,
    reference=reference_softmax,
    samples=samples,
    flops=lambda graph, score: 5 * score.numel(),
    bytes=lambda graph, score: 2 * score.nbytes + 8 * (graph.num_rows + 1),
    costs={"edge_softmax": _cost, "edge_softmax_grad": _gradient_cost},
)
