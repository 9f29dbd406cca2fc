"""RGCNConv and FastRGCNConv: a weight per relation, all relations side by side.

pairs     one row per (relation, node) that has an edge, so that P <= min(E, R n) rows meet a weight, not R n;
bases     sum_b (sum_r c_rb A_r) X V_b: B sums with merged weights in one pass, one GEMM over B bases.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.compile import Order, Trial, best_order
from stretto.compile.cost import rgcn_seconds
from stretto.graph import Graph
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, note, note_order
from stretto.layers.declines import same_type
from stretto.layers.layer import SIMPLE, SUM, Conv, Layer, as_wide_as_result, as_wide_as_x
from stretto.machine.rates import Profile
from stretto.ops import gather_rows, segment_matmul, spmm
from stretto.ops.attention import attention


@dataclass
class Relations:
    """The pairs (relation, node) that have an edge, ordered by relation."""

    into: Graph  # [P, m]: each edge goes to its pair
    out: Graph  # [n, P]: each pair goes to its node
    bounds: list[int]  # where each relation's pairs start
    edge_type: Tensor
    edge_pair: Tensor  # [E] the pair of each edge
    _derived: dict[Any, Any] = field(default_factory=dict)  # what depends on edge_type and further tensors


def fast(conv: Conv, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
    """What RGCNConv.forward computes."""
    reduce = edges.reduction(conv)
    x_src, x_dst = _inputs(conv, x)
    if torch.promote_types(torch.get_default_dtype(), conv.weight.dtype) != conv.weight.dtype:
        raise Decline("stock adds onto zeros of a wider type")
    return _rooted(conv, _relational(conv, x_src, x_dst, edge_index, edge_type, reduce), x_dst)


def fast_grouped(conv: Conv, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
    """What FastRGCNConv.forward computes."""
    reduce = edges.reduction(conv)
    x_src, x_dst = _inputs(conv, x)
    return _rooted(conv, _relational(conv, x_src, x_dst, edge_index, edge_type, reduce), x_dst)


def _inputs(conv: Conv, x: Any) -> tuple[Tensor, Tensor]:
    x_src = x[0] if isinstance(x, tuple) else x
    if x_src is None:
        x_src = _numbers(conv.in_channels_l, conv.weight.device)
    x_dst = x[1] if isinstance(x, tuple) else x_src
    if all(isinstance(t, Tensor) and not t.is_floating_point() and t.dim() == 1 for t in (x_src, x_dst)):
        return x_src, x_dst
    x_src, x_dst = edges.both_ends((x_src, x_dst))
    same_type(x_src, conv.weight, conv.root, conv.bias)
    if x_src.size(1) != conv.in_channels_l:
        raise Decline("x does not fit the layer")
    return x_src, x_dst


@functools.lru_cache(maxsize=16)
def _numbers(count: int, device: torch.device) -> Tensor:
    """0, 1, ... as one tensor, so that what depends on it is found again."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


def _rooted(conv: Conv, out: Tensor, x_dst: Tensor) -> Tensor:
    if conv.root is not None:
        out = torch.addmm(out, x_dst, conv.root) if x_dst.is_floating_point() else out + conv.root[x_dst]
    return out if conv.bias is None else out + conv.bias


def _relational(conv: Conv, x: Tensor, x_dst: Tensor, edge_index: Any, edge_type: Any, reduce: str) -> Tensor:
    """Sum over relations of reduce(A_r x) W_r. -> [n, o]."""
    graph = _graph(conv, edge_index, x, x_dst)
    if isinstance(edge_type, Tensor) and (edge_type.dtype not in adjacency.INDEX or edge_type.layout != torch.strided):
        raise Decline(f"edge_type is {edge_type.dtype}, {edge_type.layout}")
    relations = _relations(conv, graph, edge_type)
    if not x.is_floating_point():
        return _lookup(conv, graph, relations, x, reduce)
    bases, weight = conv.num_bases, conv.weight
    if bases is not None and reduce in ("sum", "mean"):
        order, trial = _ordered(conv, graph, relations, x)
        if trial is not None:
            x, weight = trial.enter(x, weight)
        if order.name == BASES:
            out = _by_bases(conv, weight, graph, relations, x, reduce)
        else:
            out = _by_pairs(conv, _merged(conv, weight), relations, x, reduce)
        return out if trial is None else trial.leave(out)
    if bases is not None:
        weight = _merged(conv, weight)
    note(conv, PAIRS if conv.num_blocks is None else PAIRS + ", W_r block-diagonal")
    return _by_pairs(conv, weight, relations, x, reduce)


PAIRS, BASES = "pairs: sum_r (A_r X) W_r", "bases: sum_b (sum_r c_rb A_r) X V_b"


def _ordered(conv: Conv, graph: Graph, relations: Relations, x: Tensor) -> tuple[Order, Trial | None]:
    """By pairs or by bases; and what times it, while that is not settled."""
    n, count, bases = graph.num_rows, relations.bounds[-1], conv.num_bases
    i, o, size = conv.in_channels_l, conv.out_channels, x.element_size()
    sizes = {"n": n, "m": graph.num_cols, "E": graph.num_edges, "P": count, "i": i, "o": o, "b": bases}
    wanted = torch.is_grad_enabled() and (x.requires_grad or conv.weight.requires_grad)

    def priced(rates: Profile) -> list[tuple[float, Order]]:
        orders = Order(PAIRS, (i, o), count * i * size), Order(BASES, (bases * i,), n * bases * i * size)
        return list(zip(rgcn_seconds(rates, sizes, bases, size, 3 if wanted else 1), orders, strict=True))

    order, trial, key = best_order("RGCN", priced, sizes, x, wanted)
    note_order(conv, order, key)
    return order, trial


def _merged(conv: Conv, weight: Tensor) -> Tensor:
    """W_r = sum_b c_rb V_b. [R, i, o]."""
    of_relations = conv.comp @ weight.view(conv.num_bases, -1)
    result: Tensor = of_relations.view(conv.num_relations, conv.in_channels_l, conv.out_channels)
    return result


def _by_pairs(conv: Conv, weight: Tensor, relations: Relations, x: Tensor, reduce: str) -> Tensor:
    """One row per pair of relation and node meets the relation's weight."""
    u = spmm(relations.into, x, reduce=reduce)
    if conv.num_blocks is not None:
        return spmm(relations.out, _by_blocks(u, relations.bounds, weight))
    return spmm(relations.out, segment_matmul(u, relations.bounds, weight))


def _by_bases(conv: Conv, weight: Tensor, graph: Graph, relations: Relations, x: Tensor, reduce: str) -> Tensor:
    """U[i, b] = sum over edges of c[type, b] / count * x_j, then one GEMM over all bases."""
    merged = gather_rows(conv.comp, relations.edge_type)
    if reduce == "mean":
        merged = merged * _shares(relations, x.dtype).unsqueeze(1)
    u = attention(graph, x.unsqueeze(1), edge=merged, form="weight")
    assert isinstance(u, Tensor)
    return u.reshape(u.size(0), -1) @ weight.view(-1, conv.out_channels)


def _by_blocks(u: Tensor, bounds: list[int], weight: Tensor) -> Tensor:
    """Rows of each relation times its block-diagonal weight. u [P, i], weight [R, b, i / b, o / b] -> [P, o]."""
    _, blocks, rows, cols = weight.shape
    pieces = [
        torch.einsum("pbc,bcd->pbd", u[a:b].view(b - a, blocks, rows), weight[r]).reshape(b - a, blocks * cols)
        for r, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    return torch.cat(pieces)


def _lookup(conv: Conv, graph: Graph, relations: Relations, x: Tensor, reduce: str) -> Tensor:
    """Nodes are numbers: x_j W_r is row x_j of W_r, so each edge takes one row of all weights stacked."""
    if conv.num_blocks is not None or reduce not in ("sum", "mean"):
        raise Decline("numbered nodes with blocks or a maximum")
    note(conv, "rows of [W_1; ...; W_R], one aggregation")
    weight, rows = conv.weight, conv.in_channels_l
    if conv.num_bases is not None:
        weight = conv.comp @ weight.view(conv.num_bases, -1)

    def make() -> Graph:
        target = graph.segment_index.long()
        column = relations.edge_type.long() * rows + x[edges.sources(graph)]
        return Graph.of(torch.stack([column, target]), (conv.num_relations * rows, graph.num_rows))

    stacked: Graph = adjacency.kept_for(relations, ("rows", rows), x, make)
    share = _shares(relations, weight.dtype) if reduce == "mean" else None
    return spmm(stacked, weight.reshape(-1, conv.out_channels), share)


def _graph(conv: Conv, edge_index: Any, x: Tensor, x_dst: Tensor) -> Graph:
    if not edges.is_plain(edge_index):
        raise Decline(f"edge_index is a {type(edge_index).__name__}, not [2, E]")
    if conv.flow == "target_to_source" and x.size(0) != x_dst.size(0):
        raise Decline("flow target_to_source between two sets of nodes")
    return adjacency.graph_of(conv, edge_index, x.size(0), x_dst.size(0))


def _shares(relations: Relations, dtype: torch.dtype) -> Tensor:
    """1 / the number of edges of the edge's own relation and destination. [E]."""
    into = relations.into
    result: Tensor = into.derived(("shares", dtype), lambda: into.mean_scale(dtype)[relations.edge_pair])
    return result


def _relations(conv: Conv, graph: Graph, edge_type: Any) -> Relations:
    if not isinstance(edge_type, Tensor) or edge_type.shape != (graph.num_edges,) or edge_type.is_floating_point():
        raise Decline("edge_type is not one number per edge")
    count = conv.num_relations

    def make() -> Relations | None:
        if edge_type.numel() and not 0 <= int(edge_type.min()) <= int(edge_type.max()) < count:
            return None
        source, target = graph.edge_index
        number, place = (edge_type.long() * graph.num_rows + target).unique(return_inverse=True)
        relation, node = number // max(graph.num_rows, 1), number % max(graph.num_rows, 1)
        pairs = number.numel()
        bounds = [0, *torch.bincount(relation, minlength=count).cumsum(0).tolist()]
        into = Graph.of(torch.stack([source, place]), (graph.num_cols, pairs))
        out = Graph.of(torch.stack([torch.arange(pairs, device=node.device), node]), (pairs, graph.num_rows))
        return Relations(into, out, bounds, edge_type.clone(), place)

    found: Relations | None = adjacency.kept_for(graph, ("relations", count), edge_type, make)
    if found is None:
        raise Decline("an edge_type is out of range")
    return found


RGCN = Layer(pyg.RGCNConv, fast, aggr=SIMPLE, message=as_wide_as_x)
GROUPED = Layer(pyg.FastRGCNConv, fast_grouped, aggr=(*SUM, "mean"), message=as_wide_as_result)
