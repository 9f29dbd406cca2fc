"""max and min over neighbours. The gradient is shared evenly among the entries that attain the extremum, as PyG's
scatter does (torch.scatter_reduce with amax and amin)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.graph import Graph
from stretto.kernels import reference
from stretto.ops.cost import Cost, gathered, row_values
from stretto.ops.kernel import Kernel
from stretto.ops.rows import only_reached


def extremum(graph: Graph, x: Tensor, weight: Tensor | None, reduce: str, own: Tensor | None = None) -> Tensor:
    """The extremum over neighbours of weight * x_j, plus own_i; rows without neighbours give 0.

    graph [n, m], x [m, k] or [m, h, f], weight [E] or [E, h], own like the result -> [n, ...].
    """
    return KERNEL(graph, x, weight, own, reduce)


def run(
    graph: Graph, x: Tensor, weight: Tensor | None, own: Tensor | None, reduce: str, ties: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The result, the extremum without own, where there is own, and how many entries attain it; no autograd."""
    csr = graph.csr if weight is None else graph.edge_csr
    most, count = kernels.backend(x.device).spmm(csr, x, weight, reduce=reduce, count_ties=ties)
    return with_own(graph, most, own), None if own is None else most, count


def with_own(graph: Graph, most: Tensor, own: Tensor | None) -> Tensor:
    """The extremum of the messages plus own_i; 0 for rows without neighbours. most [n, ...], own like it."""
    return most if own is None else only_reached(graph, most + own)


def shares(out: Tensor, most: Tensor, ties: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What each entry that attains the extremum gets of grad, and the extremum to compare entries with.

    out: the result; most: the extremum without own, which is out itself where there is no own.
    """
    # scatter_reduce counts the zero its result starts from among the messages that attain 0: the share is PyG's own.
    share = grad.to(ties.dtype) / (ties + (out == 0))
    if out is most:
        return share, most
    known = out == out  # where own is NaN every message is, and all get a NaN, as in torch
    return torch.where(known, share, torch.nan), torch.where(known, most, torch.nan)


def gradient(
    graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], reduce: str, again: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and own; again: in plain PyTorch, so that they can be differentiated."""
    x, weight, _, out, most, ties = saved
    out = out.detach()
    share, most = shares(out, out if most is None or most.shape != out.shape else most, ties, grads[0])
    csr_t = graph.T.csr if weight is None else graph.T.edge_csr
    backend = reference if again else kernels.backend(x.device)
    dx, dweight = backend.spmm_extremum_grad(csr_t, x, weight, most, share, need_x=needs[0], need_weight=needs[1])
    return (
        None if dx is None else dx.to(x.dtype),
        None if dweight is None or weight is None else dweight.to(weight.dtype),
        (share * ties).to(out.dtype) if needs[2] else None,
    )


def saves(tensors: Sequence[Any], results: Sequence[Any], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Save x and weight, what has own's shape, and the results."""
    x, weight, own = tensors
    return x, weight, None if own is None else results[0], *results


def _shapes(graph: Any, x: Tensor, weight: Any, own: Any, reduce: str) -> tuple[Tensor, ...]:
    out = x.new_empty(graph.num_rows, *x.shape[1:])
    ties = out.new_empty(out.shape, dtype=kernels.accumulate_type(x.dtype))
    return out, x.new_empty(0) if own is None else torch.empty_like(out), ties


def _gradient_cost(graph: Any, x: Any, *rest: Any, **options: Any) -> Cost:
    """The extremum and its share of the gradient are read per entry."""
    return gathered("spmm", 2 * graph.num_edges * row_values(x), graph.nbytes + 2 * x.nbytes, graph.num_edges, x, x)


KERNEL = Kernel(
    "extremum",
    "Tensor x, Tensor? weight, Tensor? own, str reduce",
    run=run,
    infer=functools.partial(run, ties=False),
    shapes=_shapes,
    gradient=gradient,
    again=functools.partial(gradient, again=True),
    saves=saves,
    results=3,
    costs={"spmm_extremum_grad": _gradient_cost},
)
