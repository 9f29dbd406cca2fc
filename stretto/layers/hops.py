"""SGConv, SSGConv, TAGConv, LGConv and APPNP: polynomials of the normalised adjacency.

Powers are chains of aggregations, taken on whichever side of the weight is narrower; their sums are Horner's scheme.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Adjacency, Expression, Leaf, Sparse, Term, Transpose, constant, linear
from stretto.kernels import autocasts
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, check_input, note, note_plan, weight_of
from stretto.layers.declines import same_type
from stretto.layers.layer import SUM, Condition, Conv, Layer, as_wide_as_x, when
from stretto.ops import spmm

X, W = Leaf("X", "n", "i"), Leaf("W", "o", "i")
MOST_HOPS = 100  # of a plan: its functions call themselves hop by hop, and Python's stack is the user's, too


@functools.cache
def power(hops: int) -> Expression:
    """A^hops X W'."""
    if hops == 0:
        return (Term((X, Transpose(W))),)
    return (Term((Sparse("A", "n", "n", hops), X, Transpose(W))),)


@functools.cache
def polynomial(hops: int) -> Expression:
    """Sum over k <= hops of A^k X W_k'."""
    weights = [Transpose(Leaf(f"W{k}", "o", "i")) for k in range(hops + 1)]
    first = Term((X, weights[0]))
    return (first, *(Term((Sparse("A", "n", "n", k), X, weights[k])) for k in range(1, hops + 1)))


@functools.cache
def chebyshev(hops: int) -> Expression:
    """X W_0' + the sum over 1 <= k <= hops of C_k(A) X W_k'."""
    weights = [Transpose(Leaf(f"W{k}", "o", "i")) for k in range(hops + 1)]
    powers = [Sparse("A", "n", "n", k, chebyshev=True) for k in range(1, hops + 1)]
    return (Term((X, weights[0])), *(Term((powers[k - 1], X, weights[k])) for k in range(1, hops + 1)))


@functools.cache
def mixture(hops: int) -> Expression:
    """(a X + c sum over 1 <= k <= hops of A^k X) W', of SSGConv."""
    powers = [Term((Sparse("A", "n", "n", k), X, Transpose(W)), "c") for k in range(1, hops + 1)]
    return (Term((X, Transpose(W)), "a"), *powers)


@functools.cache
def teleports(hops: int) -> Expression:
    """A^hops X + a sum over k < hops of A^k X: what APPNP's h <- A h + a X comes to."""
    powers = [Term((Sparse("A", "n", "n", k), X), "a") for k in range(1, hops)]
    return (Term((X,), "a"), *powers, Term((Sparse("A", "n", "n", hops), X)))


def fast_sg(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What SGConv.forward computes."""
    check_input(x)
    adj = adjacency.gcn(conv, x, edge_index, edge_weight, improved=False, add_self_loops=conv.add_self_loops)
    _no_weight_grad(adj)
    tensors = {"X": x, "W": weight_of(conv.lin, x, bias=True)}
    return linear(power(conv.K), tensors, {"A": adj}, bias=conv.lin.bias, note=note_plan(conv))


def fast_tag(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What TAGConv.forward computes."""
    check_input(x)
    hops = len(conv.lins) - 1
    if conv.normalize:
        adj = adjacency.gcn(conv, x, edge_index, edge_weight, improved=False, add_self_loops=False)
    else:
        adj = adjacency.as_given(conv, x, edge_index, edge_weight)
    _no_weight_grad(adj)
    same_type(x, conv.bias)
    tensors = {"X": x, **{f"W{k}": weight_of(lin, x) for k, lin in enumerate(conv.lins)}}
    out = linear(polynomial(hops), tensors, {"A": adj}, bias=conv.bias, note=note_plan(conv))
    return out if conv.bias is None else out.to(x.dtype)  # as stock's separate bias does under autocast


def fast_ssg(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What SSGConv.forward computes: (alpha X + (1 - alpha) / K sum_k A^k X) W, on the better side of the weight."""
    check_input(x)
    if autocasts(x):
        raise Decline("autocast is on")
    adj = adjacency.gcn(conv, x, edge_index, edge_weight, improved=False, add_self_loops=conv.add_self_loops)
    weight = weight_of(conv.lin, x, bias=True)
    kept = constant(x, adj, ("ssg", conv.K, conv.alpha), x.size(1), lambda: _mixed(conv, adj, x))
    if kept is not None:
        note(conv, "(kept a X + c A X + ...) W'")
        return torch.nn.functional.linear(kept, weight, conv.lin.bias)
    learns = edges.learns(adj)
    if not learns and conv.K <= MOST_HOPS:
        scalars = {"a": conv.alpha, "c": (1 - conv.alpha) / conv.K}
        tensors = {"X": x, "W": weight}
        chosen = note_plan(conv)
        return linear(
            mixture(conv.K), tensors, {"A": adj}, bias=conv.lin.bias, scalars=scalars, note=chosen, hoist=False
        )
    after = weight.size(0) < x.size(1)  # aggregate at the narrower side of the weight
    why = "edges learn" if learns else "many hops"
    note(conv, f"Horner(A, X W'), {why}" if after else f"Horner(A, X) W', {why}")
    out = _mixed(conv, adj, x @ weight.t() if after else x)
    if not after:
        return torch.nn.functional.linear(out, weight, conv.lin.bias)
    return out if conv.lin.bias is None else out + conv.lin.bias


def _mixed(conv: Conv, adj: Adjacency, base: Tensor) -> Tensor:
    """Compute alpha base + (1 - alpha) / K sum_k A^k base, of SSGConv."""
    total = base
    for _ in range(conv.K - 1):  # base + A (base + A (...))
        total = _hop(adj, total, base, 1.0)
    return _hop(_scaled(adj, (1 - conv.alpha) / conv.K), total, base, conv.alpha)


def fast_appnp(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What APPNP.forward computes: K times h <- (1 - alpha) A h + alpha x, each one aggregation with its beta.

    There is no weight to take sides of: Horner's scheme is the one order left, forward and backward (teleports).
    """
    check_input(x)
    adj = adjacency.gcn_of(conv, x, edge_index, edge_weight)
    kept = constant(x, adj, ("appnp", conv.K, conv.alpha), x.size(1), lambda: _propagated(conv, adj, x))
    if kept is not None:
        note(conv, f"kept: {conv.K} times A h + alpha X")
        return kept.clone()  # theirs to edit
    if 0 < conv.K <= MOST_HOPS and not edges.learns(adj) and not autocasts(x):
        step = _scaled(adj, 1 - conv.alpha)
        scalars = {"a": conv.alpha}
        return linear(teleports(conv.K), {"X": x}, {"A": step}, scalars=scalars, note=note_plan(conv), hoist=False)
    note(conv, f"{conv.K} times A h + alpha X, one kernel each")
    return _propagated(conv, adj, x)


def _propagated(conv: Conv, adj: Adjacency, x: Tensor) -> Tensor:
    """K times h <- (1 - alpha) A h + alpha x, of APPNP."""
    step = _scaled(adj, 1 - conv.alpha)
    h = x
    for _ in range(conv.K):
        h = _hop(step, h, x, conv.alpha)
    return h


def fast_lg(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
    """What LGConv.forward computes: A x, normalised or not."""
    check_input(x)
    if conv.normalize:
        adj = adjacency.gcn(conv, x, edge_index, edge_weight, add_self_loops=False)
    else:
        adj = adjacency.as_given(conv, x, edge_index, edge_weight)
    kept = constant(x, adj, "lg", x.size(1), lambda: _hop(adj, x, None, 1.0))
    note(conv, "A X" if kept is None else "kept A X")
    return _hop(adj, x, None, 1.0) if kept is None else kept.clone()  # theirs to edit


def _hop(adj: Adjacency, x: Tensor, y: Tensor | None, beta: float) -> Tensor:
    return spmm(adj.graph, x, adj.weight, row_scale=adj.row_scale, col_scale=adj.col_scale, y=y, beta=beta)


def _scaled(adj: Adjacency, factor: float) -> Adjacency:
    """The adjacency times a number, folded into whichever scaling it has."""
    if adj.row_scale is not None:
        return Adjacency(adj.graph, adj.row_scale * factor, adj.col_scale, adj.weight)
    if adj.weight is not None:
        return Adjacency(adj.graph, None, adj.col_scale, adj.weight * factor)
    scale = torch.full((adj.graph.num_rows,), factor, dtype=torch.float64, device=adj.graph.device)
    return Adjacency(adj.graph, scale, adj.col_scale, None)


def _no_weight_grad(adj: Adjacency) -> None:
    if adj.weight is not None and adj.weight.requires_grad:
        raise Decline("edge_weight needs a gradient")


def _hops(count: Callable[[Conv], int]) -> tuple[Condition, ...]:
    """What of a number of hops can be one plan."""
    return (
        when(lambda c: count(c) < 1, "K is 0"),
        when(lambda c: count(c) > MOST_HOPS, f"K is above {MOST_HOPS}"),
    )


def _keeps(name: str, what: str) -> Condition:
    """cached=True: stock keeps a result for ever."""
    return when(
        lambda c: c.cached or getattr(c, name) is not None, f"cached=True keeps {what} of the first call for ever"
    )


SG = Layer(
    pyg.SGConv,
    fast_sg,
    aggr=SUM,
    declines=(_keeps("_cached_x", "A^K X"), *_hops(lambda c: c.K)),
    message=as_wide_as_x,
    copies=True,
)
SSG = Layer(
    pyg.SSGConv,
    fast_ssg,
    aggr=SUM,
    declines=(_keeps("_cached_h", "the sum"), when(lambda c: c.K < 1, "K is 0")),
    message=as_wide_as_x,
    copies=True,
)
TAG = Layer(
    pyg.TAGConv,
    fast_tag,
    aggr=SUM,
    declines=_hops(lambda c: len(c.lins) - 1),  # as stock counts them, whatever c.K has become
    message=as_wide_as_x,
    copies=True,
)
APPNP = Layer(
    pyg.APPNP,
    fast_appnp,
    aggr=SUM,
    declines=(when(lambda c: c.dropout > 0 and c.training, "dropout on edge weights is on"),),
    message=as_wide_as_x,
    copies=True,
)
LG = Layer(pyg.LGConv, fast_lg, aggr=SUM, message=as_wide_as_x, copies=True)
