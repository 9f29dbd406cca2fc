"""HANConv and HGTConv: attention between types of nodes, over all relations in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.han_conv import group

from stretto.graph import Graph
from stretto.graph.derived import kept_with
from stretto.graph.formats import index_dtype
from stretto.kernels import autocasts
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, check_input, note
from stretto.layers.declines import same_type
from stretto.layers.layer import SUM, Conv, Layer, as_wide_as_result, when
from stretto.ops.attention import attention


def _check(conv: Conv, x_dict: Any, edge_index_dict: Any) -> None:
    """Decline what is no dictionary of plain tensors, or not of one type."""
    if not isinstance(x_dict, dict) or not isinstance(edge_index_dict, dict) or not edge_index_dict:
        raise Decline("x and edge_index are no dictionaries, or without relations")
    tensors = list(x_dict.values())
    check_input(*tensors)
    same_type(tensors[0], *conv.parameters())
    if len({t.dtype for t in tensors}) > 1 or autocasts(tensors[0]):
        raise Decline("several types of numbers, or autocast is on")
    for source, _, target in edge_index_dict:
        if source not in x_dict or target not in x_dict:
            raise Decline(f"no features of {source} or {target}")


def fast_han(conv: Conv, x_dict: Any, edge_index_dict: Any, return_semantic_attention_weights: bool = False) -> Any:
    """What HANConv.forward computes."""
    _check(conv, x_dict, edge_index_dict)
    graphs = [
        adjacency.graph_of(conv, edge_index, x_dict[kind[0]].size(0), x_dict[kind[2]].size(0))
        for kind, edge_index in edge_index_dict.items()
    ]
    heads, width = conv.heads, conv.out_channels // conv.heads
    x = {kind: conv.proj[kind](value).view(-1, heads, width) for kind, value in x_dict.items()}
    values, left, right = [], [], []
    for kind in edge_index_dict:
        source, target = x[kind[0]], x[kind[2]]
        name = "__".join(kind)
        values.append(source)
        left.append((target * conv.lin_dst[name]).sum(dim=-1))
        right.append((source * conv.lin_src[name]).sum(dim=-1))
    out = attention(
        _side_by_side(graphs),
        *(torch.cat(parts) for parts in (values, left, right)),
        form="gat",
        negative_slope=conv.negative_slope,
        dropout=conv.dropout if conv.training else 0.0,
    )
    assert isinstance(out, Tensor)
    note(conv, "alpha X, all relations in one pass")
    found: dict[str, list[Tensor]] = {kind: [] for kind in x_dict}
    each = out.reshape(-1, conv.out_channels).relu().split([graph.num_rows for graph in graphs])
    for kind, part in zip(edge_index_dict, each, strict=True):
        found[kind[2]].append(part)
    grouped = {kind: group(outs, conv.q, conv.k_lin) for kind, outs in found.items()}
    results = {kind: out for kind, (out, _) in grouped.items()}
    if return_semantic_attention_weights:
        return results, {kind: weights for kind, (_, weights) in grouped.items()}
    return results


def fast_hgt(conv: Conv, x_dict: Any, edge_index_dict: Any) -> dict[str, Tensor | None]:
    """What HGTConv.forward computes."""
    _check(conv, x_dict, edge_index_dict)
    graph = _joined(conv, x_dict, edge_index_dict)
    heads, width = conv.heads, conv.out_channels // conv.heads
    k_dict, q_dict, v_dict = {}, {}, {}
    for kind, value in conv.kqv_lin(x_dict).items():
        parts = [part.view(-1, heads, width) for part in torch.tensor_split(value, 3, dim=1)]
        k_dict[kind], q_dict[kind], v_dict[kind] = parts
    q, offsets = conv._cat(q_dict)
    k, v, _ = conv._construct_src_node_feat(k_dict, v_dict, edge_index_dict)
    # A relation's prior scales every score of its edges: as well the keys, which each relation has for itself.
    priors = [conv.p_rel["__".join(kind)].expand(k_dict[kind[0]].size(0), heads) for kind in edge_index_dict]
    k = k if edges.seems_finite(k) else edges.only_read(graph, k, target=False)
    k = k * torch.cat(priors).unsqueeze(-1)
    out = attention(graph, v, q, k, form="dot", scale=1 / math.sqrt(width))
    assert isinstance(out, Tensor)
    note(conv, "alpha V, all relations in one pass")
    out = out.reshape(-1, conv.out_channels)
    received = {
        kind: out[start : start + q_dict[kind].size(0)]
        for kind, start in offsets.items()
        if kind in conv.dst_node_types
    }
    made = conv.out_lin({kind: torch.nn.functional.gelu(part) for kind, part in received.items()})
    results: dict[str, Tensor | None] = {}
    for kind in received:
        value = made[kind]
        if value.size(-1) == x_dict[kind].size(-1):
            alpha = conv.skip[kind].sigmoid()
            value = alpha * value + (1 - alpha) * x_dict[kind]
        results[kind] = value
    return results


def _side_by_side(graphs: list[Graph]) -> Graph:
    """Relations as the blocks of a diagonal, each with its own rows and columns; not sorted anew."""
    if len(graphs) == 1:
        return graphs[0]

    def make() -> Graph:
        pointers, columns, ids = [graphs[0].csr.rowptr[:1]], [], []
        num_rows = num_cols = num_edges = 0
        for graph in graphs:
            csr = graph.edge_csr
            pointers.append(csr.rowptr[1:] + num_edges)
            columns.append(csr.columns() + num_cols)
            order = torch.arange(csr.num_edges, device=csr.device) if csr.edge_id is None else csr.edge_id.long()
            ids.append(order + num_edges)
            num_rows, num_cols, num_edges = num_rows + csr.num_rows, num_cols + csr.num_cols, num_edges + csr.num_edges
        dtype = index_dtype(max(num_rows, num_cols), num_edges)
        col, edge_id = torch.cat(columns).to(dtype), torch.cat(ids).to(dtype)
        return Graph.of_pointers(torch.cat(pointers), col, num_cols, edge_id=edge_id, known=True)

    return _together(graphs, "side by side", make)


def _joined(conv: Conv, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Graph:
    """All relations as one graph: a block of columns for each, rows the nodes of all types."""
    graphs = []
    for kind, edge_index in edge_index_dict.items():
        if kind not in conv.edge_types_map or type(edge_index) is not Tensor or not edges.is_plain(edge_index):
            raise Decline("a relation without parameters, or an edge_index that is no plain [2, E]")
        graphs.append(adjacency.graph_of(conv, edge_index, x_dict[kind[0]].size(0), x_dict[kind[2]].size(0)))
    starts, count = {}, 0
    for kind, value in x_dict.items():
        starts[kind] = count
        count += value.size(0)
    targets = tuple(starts[kind[2]] for kind in edge_index_dict)

    def make() -> Graph:
        columns, pairs = 0, []
        for graph, start in zip(graphs, targets, strict=True):
            pairs.append(graph.edge_index + torch.tensor([[columns], [start]], device=graph.device))
            columns += graph.num_cols
        return Graph.of(torch.cat(pairs, dim=1), (columns, count))

    return _together(graphs, ("joined", targets, count), make)


def _together(graphs: list[Graph], what: Hashable, make: Callable[[], Graph]) -> Graph:
    """make()'s graph, kept on the first of `graphs` for as long as the others live.

    A relation that stays while others are new at every step does not collect what nobody can ask for again.
    """
    first, *others = graphs
    return kept_with(first, (what, tuple([id(graph) for graph in others])), others, make)


ONE_WAY = when(lambda c: c.flow != "source_to_target", "flow target_to_source between types of nodes")
HAN = Layer(pyg.HANConv, fast_han, aggr=SUM, declines=(ONE_WAY,), message=as_wide_as_result)
HGT = Layer(pyg.HGTConv, fast_hgt, aggr=SUM, declines=(ONE_WAY,), message=as_wide_as_result)
