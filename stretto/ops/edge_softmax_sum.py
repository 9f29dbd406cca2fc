"""softmax_sum: GENConv's softmax aggregation, channel by channel, without an edge x channel array of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels import backend, reference_edge
from stretto.ops.checks import check_shape, check_values
from stretto.ops.edge_messages import messages_cost
from stretto.ops.kernel import Kernel, Sample, through


def softmax_sum(
    graph: Graph,
    x: Tensor,
    edge: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    *,
    act: str = "relu",
    shift: float = 0.0,
    detached: bool = False,
) -> Tensor:
    """Sum over neighbours of p * y with y = act(x_j + edge) + shift and p = softmax of temperature * y, per channel.

    graph [n, m], x [m, k], edge [E, k], temperature a number, [1] or [k] -> [n, k]; nodes without edges give 0.
    act: identity, relu, sigmoid, softplus, silu. detached: p counts as a constant (PyG's semi_grad).
    """
    expect(
        act in reference_edge.ACTS[1:],
        f"softmax_sum: 'act' is {act!r}, wanted one of {', '.join(reference_edge.ACTS[1:])}",
    )
    expect(isinstance(shift, Real), f"softmax_sum: 'shift' is a {type(shift).__name__}, wanted a number")
    check_shape("softmax_sum", "x", x, graph.device, graph.num_cols, "k")
    if edge is not None:
        check_shape("softmax_sum", "edge", edge, graph.device, graph.num_edges, x.size(1))
        if edge.dtype != x.dtype:
            wide = torch.promote_types(x.dtype, edge.dtype)
            x, edge = x.to(wide), edge.to(wide)
    acc = kernels.accumulate_type(x.dtype)
    if isinstance(temperature, Tensor):
        check_values("softmax_sum", "temperature", temperature, graph.device)
    heat = torch.as_tensor(temperature, dtype=None if isinstance(temperature, Tensor) else acc, device=x.device)
    if heat.numel() not in (1, x.size(1)):
        fail(f"softmax_sum: 'temperature' has shape {list(heat.shape)}, wanted a number, [1] or [{x.size(1)}]")
    heat = heat.to(acc).reshape(-1).expand(x.size(1))
    return KERNEL(graph, x, edge, heat, act, float(shift), detached)


def run(
    graph: Graph, x: Tensor, edge: Tensor | None, heat: Tensor, act: str, shift: float, detached: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """No autograd: the result, then the unrounded result and two statistics per row and channel for backward."""
    out, most, inverse = backend(x.device).softmax_sum(graph.edge_csr, x, edge, heat, act, shift)
    return out.to(x.dtype, copy=True), out, most, inverse


def gradient(
    graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], *options: Any
) -> tuple[Tensor | None, ...]:
    """No autograd: gradients of x, edge and heat."""
    x, edge, heat, *results = saved
    csrs = graph.edge_csr, graph.T.edge_csr
    made: tuple[Tensor | None, ...] = backend(x.device).softmax_sum_grad(
        *csrs, x, edge, heat, *options, tuple(results), grads[0], needs
    )
    return made


def _plain(graph: Graph, x: Tensor, edge: Tensor | None, heat: Tensor, *options: Any) -> Tensor:
    return reference_edge.softmax_sum(graph.edge_csr, x, edge, heat, *options)[0].to(x.dtype)


def _shapes(graph: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out = x.new_empty(graph.num_rows, x.shape[1])
    return out, *(torch.empty_like(out, dtype=kernels.accumulate_type(x.dtype)) for _ in range(3))


def reference(
    graph: Graph,
    x: Tensor,
    edge: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    *,
    act: str = "relu",
    shift: float = 0.0,
    detached: bool = False,
) -> Tensor:
    """softmax_sum in plain PyTorch."""
    heat = torch.as_tensor(temperature, dtype=kernels.accumulate_type(x.dtype)).reshape(-1)
    return reference_edge.softmax_sum(graph.edge_csr, x, edge, heat, act, shift, detached)[0].to(x.dtype)


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """With and without edges; one temperature, one per channel; constant weights."""
    m, e = graph.num_cols, graph.num_edges

    def values(*shape: int) -> Tensor:
        return (0.5 * torch.randn(*shape, dtype=torch.float64)).to(dtype)

    yield Sample((graph, values(m, 5)), {"act": "identity"})
    yield Sample((graph, values(m, 17), values(e, 17), values(17)), {"shift": 1e-7})
    yield Sample((graph, values(m, 3), values(e, 3), values(1)), {"act": "identity"})


KERNEL = Kernel(
    "softmax_sum",
    "Tensor x, Tensor? edge, Tensor heat, str act, float shift, bool detached",
    run=run,
    shapes=_shapes,
    gradient=gradient,
    again=through(_plain),
    saves=lambda tensors, results, needs: (*tensors, *results[1:]),
    results=4,
    function=softmax_sum,
    reference=reference,
    samples=samples,
    flops=lambda graph, x, *rest, **options: 20 * graph.num_edges * x.size(1),
    bytes=lambda graph, x, edge=None, *rest, **options: (
        graph.num_edges * (4 + x.size(1) * x.element_size() * (1 if edge is None else 2))
        + 3 * graph.num_rows * x.size(1) * x.element_size()
    ),
    costs={"softmax_sum": messages_cost(7), "softmax_sum_grad": messages_cost(7, ways=2)},
)
