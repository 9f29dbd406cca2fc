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
from stretto.ops.rows import only_reached


def extremum(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, own: Tensor | None = None) -> Tensor:
    """The extremum over neighbours of weight * x_j, plus own_i; rows without neighbours give 0.

    graph [n, m], x [m, k] or [m, h, f], weight [E] or [E, h], own like the result -> [n, ...].
    """
    if library.traced(x):
        return torch.ops.stretto.extremum(graph.handle, x, weight, own, reduce, graph.num_rows)[0]
    if library.recorded(x, weight, own):
        return _Extremum.apply(graph, x, weight, own, reduce)
    return run(graph, x, weight, own, reduce, ties=False)[0]


def run(
    graph: Graph, x: Tensor, weight: Tensor | None, own: Tensor | None, reduce: str, *, ties: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The result, the extremum without own and, if wanted, how many entries attain it; no autograd."""
    csr = graph.csr if weight is None else graph.edge_csr
    most, count = kernels.backend(x.device).spmm(csr, x, weight, reduce=reduce, count_ties=ties)
    return with_own(graph, most, own), most, count


def with_own(graph: Graph, most: Tensor, own: Tensor | None) -> Tensor:
    """The extremum of the messages plus own_i; 0 for rows without neighbours. most, own [n, ...]"""
    return most if own is None else only_reached(graph, most + own)


def shares(out: Tensor, most: Tensor, ties: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What each entry that attains the extremum gets of grad, and the extremum to compare entries with. [n, ...] each

    out: the result; most: the extremum without own, which is out itself where there is no own.
    """
    # scatter_reduce counts the zero its result starts from among the messages that attain 0: the share is PyG's own.
    share = grad.to(ties.dtype) / (ties + (out == 0))
    if out is most:
        return share, most
    known = out == out  # where own is NaN every message is, and all get a NaN, as in torch
    return torch.where(known, share, torch.nan), torch.where(known, most, torch.nan)


def run_grad(
    graph: Graph,
    x: Tensor,
    weight: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    *,
    needs: tuple[bool, bool, bool],
    twice: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and own; no autograd, unless they are to be differentiated again: then in plain PyTorch.

    results: what `run` gave.
    """
    out, most, ties = results
    share, most = shares(out, most, ties, grad)
    csr_t = graph.T.csr if weight is None else graph.T.edge_csr
    backend = reference if twice else kernels.backend(x.device)
    dx, dweight = backend.spmm_extremum_grad(csr_t, x, weight, most, share, need_x=needs[0], need_weight=needs[1])
    return (
        None if dx is None else dx.to(x.dtype),
        None if dweight is None or weight is None else dweight.to(weight.dtype),
        (share * ties).to(out.dtype) if needs[2] else None,
    )


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, x: Tensor, weight: Any, own: Any, reduce: str) -> Tensor:
        out, most, ties = run(graph, x, weight, own, reduce, ties=True)
        ctx.graph = graph
        ctx.save_for_backward(x, weight, out, None if own is None else most, ties)
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, out, most, ties = ctx.saved_tensors
        out = out.detach()
        results = (out, out if most is None else most, ties)
        again = torch.is_grad_enabled()
        found = run_grad(ctx.graph, x, weight, results, grads[0], needs=ctx.needs_input_grad[1:4], twice=again)
        return None, *found, None
