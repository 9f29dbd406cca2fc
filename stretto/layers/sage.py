"""SAGEConv and GraphConv: aggregate(x_j) W_l + b + x_i W_r. The root term is the beta of the aggregation, or joins the
GEMM; the bias stays outside, since a node without neighbours must still get it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Adjacency, Expression, Leaf, Sparse, Term, Transpose, linear
from stretto.layers import adjacency
from stretto.layers.base import Decline, check_input, note, note_plan, weight_of
from stretto.layers.declines import pair_of
from stretto.layers.features import aggregated, linear_of_nonzeros
from stretto.layers.layer import SIMPLE, Conv, Layer, Maps, Split, Summands, as_wide_as_x
from stretto.ops import spmm
from stretto.ops.projections import plus

A, X, W, V = Sparse("A", "n", "m"), Leaf("X", "m", "i"), Leaf("W", "o", "i"), Leaf("V", "o", "r")
OWN = Leaf("X", "m", "i"), Leaf("V", "o", "i")
OTHER = Leaf("R", "n", "r")
NEIGHBOURS = (Term((A, X, Transpose(W))),)
WITH_OWN_ROOT = (*NEIGHBOURS, Term((OWN[0], Transpose(OWN[1]))))
WITH_OTHER_ROOT = (*NEIGHBOURS, Term((OTHER, Transpose(V))))
FEW_EDGES = 260_000  # on a device, below which stock's few launches cost less (docs/gpu.md)


def fast_sage(conv: Conv, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """What SAGEConv.forward computes."""
    out = evaluated(conv, of_sage(conv, x, edge_index, size))
    return torch.nn.functional.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def fast_graph(conv: Conv, x: Any, edge_index: Any, edge_weight: Tensor | None = None, size: Any = None) -> Tensor:
    """What GraphConv.forward computes."""
    return evaluated(conv, of_graph(conv, x, edge_index, edge_weight, size))


def of_sage(conv: Conv, x: Any, edge_index: Any, size: Any = None) -> Summands:
    """The summands of a SAGEConv, before it normalises."""
    x_src, x_dst, own = _ends(conv, x)
    if conv.project and hasattr(conv, "lin"):
        weight_of(conv.lin, x_src, bias=True)  # a plain one: it may run again where what follows declines
        x_src, own = conv.lin(x_src).relu(), False
    root = x_dst if conv.root_weight else None
    adj = _adjacency(conv, edge_index, x_src, x_dst, size)
    adj = replace(adj, weight=adjacency.weights_in(adj.graph, edge_index, x_src))
    root_weight = None if root is None else weight_of(conv.lin_r, root)
    weight = weight_of(conv.lin_l, x_src, bias=True)
    return Summands(x_src, weight, conv.lin_l.bias, adj, conv.aggr, root, root_weight, own)


def of_graph(conv: Conv, x: Any, edge_index: Any, edge_weight: Tensor | None = None, size: Any = None) -> Summands:
    """The summands of a GraphConv."""
    x_src, x_dst, own = _ends(conv, x)
    adj = _adjacency(conv, edge_index, x_src, x_dst, size)
    values = adjacency.values_of(edge_index)
    edge_weight = adjacency.weighted(adj.graph, edge_weight if values is None else values, x_src)
    adj = replace(adj, weight=edge_weight)
    root_weight = None if x_dst is None else weight_of(conv.lin_root, x_dst)
    weight = weight_of(conv.lin_rel, x_src, bias=True)
    return Summands(x_src, weight, conv.lin_rel.bias, adj, conv.aggr, x_dst, root_weight, own)


def _ends(conv: Conv, x: Any) -> tuple[Tensor, Tensor | None, bool]:
    x_src, x_dst = pair_of(x)
    own = x_dst is x_src
    check_input(x_src, *(() if x_dst is None or own else (x_dst,)))
    return x_src, x_dst, own


def _adjacency(conv: Conv, edge_index: Any, x: Tensor, x_dst: Tensor | None, size: Any) -> Adjacency:
    num_dst = adjacency.destinations(edge_index, size, x_dst, x)
    graph = adjacency.graph_of(conv, edge_index, x.size(0), num_dst, few=FEW_EDGES)
    scale_type = torch.float64 if x.dtype == torch.float64 else torch.float32
    return Adjacency(graph, graph.mean_scale(scale_type) if conv.aggr == "mean" else None)


def evaluated(conv: Conv, of: Summands) -> Tensor:
    """reduce(A x) weight' + bias + root root_weight' of a layer."""
    if not of.is_linear:
        note(conv, f"({of.reduce} A X) W'" + ("" if of.root is None else " + X V'"))
        reduced = spmm(of.adj.graph, of.x, of.adj.weight, reduce=of.reduce)
        out = torch.nn.functional.linear(reduced, of.weight, of.bias)
        return out if of.root is None or of.root_weight is None else torch.addmm(out, of.root, of.root_weight.t())
    h = linear_of_nonzeros(of.x, of.weight)
    if h is not None:
        root = None if of.root is None or of.root_weight is None else _product(of.root, of.root_weight)
        note(conv, "A (X W')" + ("" if root is None else " + X V'") + ", X by its nonzeros")
        out = aggregated(of.adj, h, root)
        return out if of.bias is None else plus(out, of.bias)
    tensors = {"X": of.x, "W": of.weight}
    expression: Expression = NEIGHBOURS
    if of.root is not None and of.root_weight is not None:
        tensors["V"] = of.root_weight
        expression = WITH_OWN_ROOT if of.own else WITH_OTHER_ROOT
        if not of.own:
            tensors["R"] = of.root
    return linear(expression, tensors, {"A": of.adj}, bias=of.bias, note=note_plan(conv))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    found = linear_of_nonzeros(x, weight)
    return x @ weight.t() if found is None else found


def _sage_summands(conv: Conv, *args: Any, **kwargs: Any) -> Summands:
    if conv.normalize:
        raise Decline("its result is normalised")
    return of_sage(conv, *args, **kwargs)


def _sent(conv: Conv, x: Tensor) -> Tensor:
    projected: Tensor = conv.lin(x).relu() if conv.project and hasattr(conv, "lin") else x
    return projected


def _made(conv: Conv, gathered: Tensor, own: Tensor) -> Tensor:
    out: Tensor = conv.lin_l(gathered)
    out = out + conv.lin_r(own) if conv.root_weight else out
    return torch.nn.functional.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def _maps(conv: Conv) -> Maps | str:
    if conv.normalize or conv.project:
        return "SAGEConv normalises or projects rows, which has no bound here"
    return [conv.lin_l.weight], [conv.lin_r.weight] if conv.root_weight else None


SAGE = Layer(
    pyg.SAGEConv,
    fast_sage,
    aggr=SIMPLE,
    message=as_wide_as_x,
    local=True,
    copies=True,
    few_edges=FEW_EDGES,
    summands=_sage_summands,
    split=Split(_made, _sent, maps=_maps),
)
GRAPH = Layer(
    pyg.GraphConv,
    fast_graph,
    aggr=SIMPLE,
    message=as_wide_as_x,
    local=True,
    copies=True,
    few_edges=FEW_EDGES,
    summands=of_graph,
)
