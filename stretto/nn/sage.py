"""SAGEConv and GraphConv: aggregate(x_j) W_l + b + x_i W_r. The root term is the beta of the aggregation, or joins the
GEMM; the bias stays outside, since a node without neighbours must still get it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.compile import Adjacency, Leaf, Sparse, Term, Transpose, linear
from stretto.nn import adjacency
from stretto.nn.base import Decline, check_input, note_plan, record_of, weight_of
from stretto.ops import spmm

A, X, W, V = Sparse("A", "n", "m"), Leaf("X", "m", "i"), Leaf("W", "o", "i"), Leaf("V", "o", "r")
OWN = Leaf("X", "m", "i"), Leaf("V", "o", "i")
OTHER = Leaf("R", "n", "r")
NEIGHBOURS = (Term((A, X, Transpose(W))),)
WITH_OWN_ROOT = (*NEIGHBOURS, Term((OWN[0], Transpose(OWN[1]))))
WITH_OTHER_ROOT = (*NEIGHBOURS, Term((OTHER, Transpose(V))))


def fast_sage(conv: Any, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """What SAGEConv.forward computes."""
    x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
    own = x_dst is x_src
    check_input(x_src, *(() if x_dst is None or own else (x_dst,)))
    _check_aggr(conv)
    if conv.project and hasattr(conv, "lin"):
        x_src, own = conv.lin(x_src).relu(), False
    root = x_dst if conv.root_weight else None
    out = root_linear(
        conv, edge_index, x_src, x_dst, size, conv.lin_l, conv.lin_r if conv.root_weight else None, root, own
    )
    return torch.nn.functional.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def fast_graph(conv: Any, x: Any, edge_index: Any, edge_weight: Tensor | None = None, size: Any = None) -> Tensor:
    """What GraphConv.forward computes."""
    x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
    own = x_dst is x_src
    check_input(x_src, *(() if x_dst is None or own else (x_dst,)))
    _check_aggr(conv)
    return root_linear(
        conv,
        edge_index,
        x_src,
        x_dst,
        size,
        conv.lin_rel,
        conv.lin_root,
        x_dst,
        own,
        edge_weight=edge_weight,
        weighted=True,
    )


def root_linear(
    conv: Any,
    edge_index: Any,
    x: Tensor,
    x_dst: Tensor | None,
    size: Any,
    neighbours: Any,
    root_linear: Any,
    root: Tensor | None,
    own: bool,
    *,
    edge_weight: Tensor | None = None,
    weighted: bool = False,
) -> Tensor:
    """aggregate(x) neighbours.weight' + neighbours.bias + root root_linear.weight'."""
    weight = weight_of(neighbours, x)
    root_weight = None if root is None else weight_of(root_linear, root)
    num_dst = destinations(edge_index, size, x_dst, x)
    graph = adjacency.graph_of(conv, edge_index, x.size(0), num_dst)
    values = adjacency.values_of(edge_index) if weighted else None
    edge_weight = adjacency.weighted(graph, edge_weight if values is None else values, x) if weighted else None
    if conv.aggr in ("max", "min") or (edge_weight is not None and edge_weight.requires_grad):
        record_of(conv).plan = f"({conv.aggr} A X) W'" + ("" if root is None else " + X V'")
        reduced = spmm(graph, x, edge_weight, reduce=conv.aggr)
        out = torch.nn.functional.linear(reduced, weight, neighbours.bias)
        return out if root is None or root_weight is None else torch.addmm(out, root, root_weight.t())
    scale_type = torch.float64 if x.dtype == torch.float64 else torch.float32
    adj = Adjacency(graph, graph.mean_scale(scale_type) if conv.aggr == "mean" else None, None, edge_weight)
    note = note_plan(conv)
    if root is None or root_weight is None:
        return linear(NEIGHBOURS, {"X": x, "W": weight}, {"A": adj}, bias=neighbours.bias, note=note)
    if own:
        tensors = {"X": x, "W": weight, "V": root_weight}
        return linear(WITH_OWN_ROOT, tensors, {"A": adj}, bias=neighbours.bias, note=note)
    tensors = {"X": x, "W": weight, "R": root, "V": root_weight}
    return linear(WITH_OTHER_ROOT, tensors, {"A": adj}, bias=neighbours.bias, note=note)


def destinations(edge_index: Any, size: Any, x_dst: Tensor | None, x: Tensor) -> int:
    """How many nodes receive messages, as PyG infers it."""
    if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
        return edge_index.size(0)
    if size is not None and size[1] is not None:
        if x_dst is not None and size[1] != x_dst.size(0):
            raise Decline("size and x disagree")
        return int(size[1])
    if x_dst is not None:
        return x_dst.size(0)
    if hasattr(edge_index, "sparse_size"):
        known = edge_index.sparse_size(1)
        if known is not None:
            return int(known)
    return x.size(0)


def _check_aggr(conv: Any) -> None:
    if conv.aggr not in ("mean", "add", "sum", "max", "min"):
        raise Decline(f"aggr is {conv.aggr}")
