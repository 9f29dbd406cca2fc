"""max and min over neighbours. The gradient is shared evenly among the entries that attain the extremum, as PyG's
scatter does (torch.scatter_reduce with amax and amin)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.graph import Graph
from stretto.kernels import reference
from stretto.ops import library
from stretto.ops.batched import one_by_one


def extremum(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """graph [n, m], x [m, k] or [m, h, f], weight [E] or [E, h] -> [n, ...]; rows without neighbours give 0."""
    if library.traced(x):
        out, _ = torch.ops.stretto.extremum(graph.handle, x, weight, reduce, graph.num_rows)
        return out
    if library.recorded(x, weight):
        return _Extremum.apply(graph, x, weight, reduce)
    return run(graph, x, weight, reduce, ties=False)[0]


def run(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, *, ties: bool) -> tuple[Tensor, Tensor | None]:
    """The extremum and, if wanted, how many entries attain it; no autograd."""
    csr = graph.csr if weight is None else graph.edge_csr
    return kernels.backend(x.device).spmm(csr, x, weight, reduce=reduce, count_ties=ties)


def run_grad(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    out: Tensor,
    ties: Tensor,
    grad: Tensor,
    *,
    need_x: bool,
    need_weight: bool,
    twice: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dweight; no autograd, unless they are to be differentiated again: then in plain PyTorch."""
    # scatter_reduce counts the zero its result starts from among the entries that attain 0: the share is PyG's own.
    share = grad.to(ties.dtype) / (ties + (out == 0))
    csr_t = graph.T.csr if weight is None else graph.T.edge_csr
    backend = reference if twice else kernels.backend(x.device)
    dx, dweight = backend.spmm_extremum_grad(csr_t, x, weight, out, share, need_x=need_x, need_weight=need_weight)
    return (
        None if dx is None else dx.to(x.dtype),
        None if dweight is None or weight is None else dweight.to(weight.dtype),
    )


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, x: Tensor, weight: Any, reduce: str) -> Tensor:
        out, ties = run(graph, x, weight, reduce, ties=True)
        ctx.graph = graph
        ctx.save_for_backward(x, weight, out, ties)
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, out, ties = ctx.saved_tensors
        _, need_x, need_weight, _ = ctx.needs_input_grad
        needs = {"need_x": need_x, "need_weight": need_weight, "twice": torch.is_grad_enabled()}
        dx, dweight = run_grad(ctx.graph, x, weight, out.detach(), ties, grads[0], **needs)
        return None, dx, dweight, None
