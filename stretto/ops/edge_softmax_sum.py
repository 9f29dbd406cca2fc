"""softmax_sum: GENConv's softmax aggregation, channel by channel, without an edge x channel array of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels import reference_edge
from stretto.ops import library, twice
from stretto.ops.batched import one_by_one
from stretto.ops.checks import check_values
from stretto.ops.edge_messages import _promoted, backend
from stretto.ops.op import Op, Sample


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
    """sum over neighbours of p * y with y = act(x_j + edge) + shift and p = softmax of temperature * y, per channel.

    graph [n, m], x [m, k], edge [E, k], temperature a number, [1] or [k] -> [n, k]; nodes without edges give 0.
    act: identity, relu, sigmoid, softplus, silu. detached: p counts as a constant (PyG's semi_grad).
    """
    expect(
        act in reference_edge.ACTS[1:],
        f"softmax_sum: 'act' is {act!r}, wanted one of {', '.join(reference_edge.ACTS[1:])}",
    )
    check_values("softmax_sum", "x", x, graph.device)
    if edge is not None:
        check_values("softmax_sum", "edge", edge, graph.device)
    if x.dim() != 2 or x.size(0) != graph.num_cols:
        fail(f"softmax_sum: 'x' is {x.dtype} of shape {list(x.shape)}, wanted floats of shape [{graph.num_cols}, k]")
    if edge is not None and tuple(edge.shape) != (graph.num_edges, x.size(1)):
        fail(f"softmax_sum: 'edge' has shape {list(edge.shape)}, wanted {[graph.num_edges, x.size(1)]}")
    x, edge = _promoted((x, edge))  # type: ignore[assignment]
    acc = kernels.accumulate_type(x.dtype)
    if isinstance(temperature, Tensor):
        check_values("softmax_sum", "temperature", temperature, graph.device)
    heat = torch.as_tensor(temperature, dtype=None if isinstance(temperature, Tensor) else acc, device=x.device)
    if heat.numel() not in (1, x.size(1)):
        fail(f"softmax_sum: 'temperature' has shape {list(heat.shape)}, wanted a number, [1] or [{x.size(1)}]")
    heat = heat.to(acc).reshape(-1).expand(x.size(1))
    if any(library.traced(t) for t in (x, edge, heat) if t is not None):
        return torch.ops.stretto.softmax_sum(graph.handle, x, edge, heat, act, shift, detached, graph.num_rows)[0]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, edge, heat)):
        return _SoftmaxSum.apply(graph, (act, float(shift), detached), x, edge, heat)
    return run(graph, x, edge, heat, act, shift)[0]


def run(
    graph: Graph, x: Tensor, edge: Tensor | None, heat: Tensor, act: str, shift: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """No autograd: the result, then the unrounded result and two statistics per row and channel for backward."""
    out, most, inverse = backend(x.device).softmax_sum(graph.edge_csr, x, edge, heat, act, shift)
    return out.to(x.dtype, copy=True), out, most, inverse


def run_grad(
    graph: Graph,
    x: Tensor,
    edge: Tensor | None,
    heat: Tensor,
    options: tuple[str, float, bool],
    kept: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """No autograd: gradients of x, edge and heat."""
    csr, csr_t = graph.edge_csr, graph.T.edge_csr
    return backend(x.device).softmax_sum_grad(csr, csr_t, x, edge, heat, *options, kept, grad, needs)


class _SoftmaxSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, options: tuple[str, float, bool], x: Tensor, edge: Any, heat: Tensor) -> Tensor:
        out, *kept = run(graph, x, edge, heat, *options[:2])
        ctx.graph, ctx.options = graph, options
        ctx.save_for_backward(x, edge, heat, *kept)
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        x, edge, heat, *kept = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # to be differentiated again: through plain PyTorch

            def again(x: Tensor, edge: Tensor | None, heat: Tensor) -> list[Tensor]:
                return [reference_edge.softmax_sum(ctx.graph.edge_csr, x, edge, heat, *ctx.options)[0].to(x.dtype)]

            return None, None, *twice.gradients(again, grads, (x, edge, heat), needs)
        return None, None, *run_grad(ctx.graph, x, edge, heat, ctx.options, tuple(kept), grads[0], needs)


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


OP = Op(
    "softmax_sum",
    softmax_sum,
    reference,
    samples,
    lambda graph, x, *rest, **options: 20 * graph.num_edges * x.size(1),
    lambda graph, x, edge=None, *rest, **options: (
        graph.num_edges * (4 + x.size(1) * x.element_size() * (1 if edge is None else 2))
        + 3 * graph.num_rows * x.size(1) * x.element_size()
    ),
)
