"""MFConv: one weight per degree. Nodes are ordered by degree once per graph; all weights then act in one pass."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.graph import Graph
from stretto.layers import edges
from stretto.layers.base import Decline, note, weight_of
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_x
from stretto.ops import gather_rows, segment_matmul, spmm


def fast(conv: Conv, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """What MFConv.forward computes."""
    x_src, x_dst, _ = edges.ends(x)
    weights = [weight_of(lin, x_src, bias=True) for lin in conv.lins_l]
    roots = [] if x_dst is None else [weight_of(lin, x_dst) for lin in conv.lins_r]
    # Stock drops the values of a SparseTensor, which is no Tensor, and reads torch's matrices in its own way.
    between = edges.plain_graph if isinstance(edge_index, Tensor) else edges.graph_between
    graph = between(conv, edge_index, x_src, x_dst, size)
    if x_dst is not None and x_dst.size(0) != graph.num_rows:
        raise Decline("size and x disagree")
    order, place, degrees, bounds = graph.derived(
        ("by degree", conv.max_degree), lambda: _by_degree(graph, conv.max_degree)
    )
    note(conv, "[A X | X] [W_d; V_d], rows in order of degree")
    h = spmm(graph, x_src)
    stacked = torch.stack([w.t() for w in weights])
    if x_dst is not None:
        h = torch.cat([h, x_dst], dim=1)
        stacked = torch.cat([stacked, torch.stack([w.t() for w in roots])], dim=1)
    out = segment_matmul(gather_rows(h, order), bounds, stacked)
    if any(lin.bias is not None for lin in conv.lins_l):
        biases = torch.stack([edges.bias_of(lin) for lin in conv.lins_l])
        out = out + gather_rows(biases, degrees)
    return gather_rows(out, place)


def _by_degree(graph: Graph, most: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The order of nodes by degree (at most `most`), each node's place in it, degrees in it, and where each starts."""
    degree = graph.degree.clamp(max=most)
    order = degree.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.bincount(degree, minlength=most + 1)
    return order, place, degree[order], [0, *counts.cumsum(0).tolist()]


LAYER = Layer(pyg.MFConv, fast, aggr=SUM, message=as_wide_as_x)
