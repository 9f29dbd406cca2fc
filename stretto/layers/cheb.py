"""ChebConv: sum over k of T_k(L) X W_k', with L the scaled Laplacian.

Up to three terms it is a polynomial of L, which the compiler orders (and hoists); beyond that the coefficients of the
powers grow, and Chebyshev's recurrence runs forward at width i, or backward (Clenshaw) at width o, and so for every
gradient, as the compiler finds best; of an X that stays the same, all T_k(L) X are kept side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Adjacency, constant, linear
from stretto.graph import Graph
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, note, note_plan, weight_of
from stretto.layers.declines import same_type
from stretto.layers.hops import MOST_HOPS, chebyshev, polynomial
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_x
from stretto.ops import spmm


def fast(
    conv: Conv,
    x: Tensor,
    edge_index: Any,
    edge_weight: Tensor | None = None,
    batch: Tensor | None = None,
    lambda_max: Any = None,
) -> Tensor:
    """What ChebConv.forward computes."""
    x, _, _ = edges.ends(x)
    same_type(x, conv.bias)
    weights = [weight_of(lin, x) for lin in conv.lins]
    if len(weights) == 1:
        return torch.nn.functional.linear(x, weights[0], conv.bias)
    adj = _laplacian(conv, x, edge_index, edge_weight, batch, lambda_max)
    if len(weights) <= 3 and not edges.learns(adj):
        if len(weights) == 3:  # T_2 = 2 L^2 - 1
            weights = [weights[0] - weights[2], weights[1], 2 * weights[2]]
        tensors = {"X": x, **{f"W{k}": w for k, w in enumerate(weights)}}
        return linear(polynomial(len(weights) - 1), tensors, {"A": adj}, bias=conv.bias, note=note_plan(conv))
    columns = len(weights) * x.size(1)
    kept = constant(x, adj, ("cheb", len(weights)), columns, lambda: torch.cat(_terms(adj, x, len(weights)), dim=1))
    if kept is not None:
        note(conv, "[kept T_0(L) X | ... | T_K(L) X] [W_0; ...; W_K]'")
        return torch.nn.functional.linear(kept, torch.cat(weights, dim=1), conv.bias)
    learns = edges.learns(adj)
    if not learns and len(weights) <= MOST_HOPS:
        halves = [weights[0], *(weight / 2 for weight in weights[1:])]  # 2 T_k(L) = C_k(2 L)
        tensors = {"X": x, **{f"W{k}": w for k, w in enumerate(halves)}}
        twice = {"A": Adjacency(adj.graph, weight=_twice(adj))}
        return linear(chebyshev(len(weights) - 1), tensors, twice, bias=conv.bias, note=note_plan(conv), hoist=False)
    why = "edges learn" if learns else "many hops"
    if weights[0].size(0) < x.size(1):
        note(conv, f"Clenshaw(L, X W'), {why}")
        out = _clenshaw(adj, x, weights)
    else:
        note(conv, f"sum T_k(L) X W_k', {why}")
        out = _recurrence(adj, x, weights)
    return out if conv.bias is None else out + conv.bias


def _laplacian(
    conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor | None, batch: Tensor | None, lambda_max: Any
) -> Adjacency:
    """Stock's own scaling of the Laplacian, kept on the graph where the graph alone determines it."""
    graph = edges.plain_graph(conv, edge_index, x, x)
    n = x.size(0)
    if edge_weight is not None and not isinstance(edge_weight, Tensor):
        raise Decline(f"edge_weight is a {type(edge_weight).__name__}")

    def make() -> tuple[Graph, Tensor | None]:
        plain = adjacency._plain(edge_index)
        found, norm = conv.__norm__(plain, n, edge_weight, conv.normalization, lambda_max, dtype=x.dtype, batch=batch)
        if norm.dim() != 1:
            raise Decline("edge_weight is not one number an edge")
        of_found = adjacency.graph_of(conv, found, n, n)
        return of_found, adjacency.weighted(of_found, norm, x)

    if isinstance(lambda_max, Tensor):
        found, norm = make()
    else:
        source = edge_index if edge_weight is None else edge_weight
        key = ("cheb", conv.normalization, lambda_max, x.dtype, edge_weight is None)
        found, norm = adjacency.kept_for(graph, key, source, make)
    return Adjacency(found, weight=norm)


def _twice(adj: Adjacency) -> Tensor:
    """The weights of 2 L, kept where those of L are. [E]."""
    weight = adj.weight
    assert weight is not None
    kept: Tensor = adjacency.kept_for(adj.graph, "twice", weight, lambda: 2 * weight)
    return kept


def _terms(adj: Adjacency, x: Tensor, count: int) -> list[Tensor]:
    """T_0 X, T_1 X, ... [n, i] each."""
    assert adj.weight is not None
    found, twice = [x, spmm(adj.graph, x, adj.weight)], 2 * adj.weight
    while len(found) < count:
        found.append(spmm(adj.graph, found[-1], twice, y=found[-2], beta=-1.0))
    return found


def _recurrence(adj: Adjacency, x: Tensor, weights: list[Tensor]) -> Tensor:
    """T_k X = 2 L T_{k-1} X - T_{k-2} X. x [n, i] -> [n, o]."""
    before, now = x, spmm(adj.graph, x, adj.weight)
    out = torch.addmm(x @ weights[0].t(), now, weights[1].t())
    assert adj.weight is not None
    twice = 2 * adj.weight
    for weight in weights[2:]:
        before, now = now, spmm(adj.graph, now, twice, y=before, beta=-1.0)
        out = torch.addmm(out, now, weight.t())
    return out


def _clenshaw(adj: Adjacency, x: Tensor, weights: list[Tensor]) -> Tensor:
    """b_k = X W_k' + 2 L b_{k+1} - b_{k+2}; the sum is X W_0' + L b_1 - b_2. x [n, i] -> [n, o]."""
    terms = (x @ torch.cat(weights).t()).split(weights[0].size(0), dim=1)
    assert adj.weight is not None
    twice = 2 * adj.weight
    later: Tensor | None = None
    now = terms[-1].contiguous()
    for term in reversed(terms[1:-1]):
        rest = term if later is None else term - later
        later, now = now, spmm(adj.graph, now, twice, y=rest.contiguous())
    last = terms[0] if later is None else terms[0] - later
    return spmm(adj.graph, now, adj.weight, y=last.contiguous())


LAYER = Layer(pyg.ChebConv, fast, aggr=SUM, copies=True, message=as_wide_as_x)
