"""ResGatedGraphConv and CGConv: gated sums. Their Linears act on nodes (and, narrower, on edge features) instead of on
the concatenation at every edge."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor

from stretto.graph import Graph
from stretto.layers import edges
from stretto.layers.base import Decline, hooked, note
from stretto.layers.edges import streaming
from stretto.layers.edges.chains import chain_of
from stretto.layers.edges.pairs import features_of
from stretto.layers.layer import SIMPLE, Conv, Layer, as_wide_as_result
from stretto.ops.dense import dense, plus_dense
from stretto.ops.edge_layer import gated_layer, takes
from stretto.ops.edge_messages import edge_messages
from stretto.ops.edge_packed import gated_messages, linear_of_data


def fast_residual(conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
    """What ResGatedGraphConv.forward computes: sum of act(k_i + q_j) v_j, root and bias."""
    edge_index, edge_attr, _ = edges.unpacked(conv, edge_index, edge_attr)
    x_src, x_dst = edges.both_ends(x)
    if (edge_attr is None) != (conv.edge_dim is None):
        raise Decline("edge_attr and edge_dim disagree")
    graph = (edges.graph_between if edge_attr is None else edges.plain_graph)(conv, edge_index, x_src, x_dst)
    finite = edges.no_infinity(x_src, None if x_dst is x_src else x_dst)
    note(conv, "node-side Linears, gate and sum in one pass")
    if edge_attr is None:
        out = _without_edges(conv, graph, x_src, x_dst)
    else:
        attr = edges.one_per_edge(graph, edge_attr, x_src)
        if attr.dim() != 2:
            raise Decline("edge_attr is not a matrix")
        edges.no_infinity(attr)
        out = _with_edges(conv, graph, x_src, x_dst, attr, finite)
    if conv.root_weight:
        out = out + conv.lin_skip(x_dst)
    return out if conv.bias is None else out + conv.bias


def _fuses(conv: Conv, reduce: str) -> bool:
    """Whether the gate is one that the kernel of edge messages knows."""
    return type(conv.act) is torch.nn.Sigmoid and reduce in ("sum", "mean") and not hooked(conv.act)


def _without_edges(conv: Conv, graph: Graph, x_src: Tensor, x_dst: Tensor) -> Tensor:
    reduce = edges.reduction(conv)
    key, query, value = conv.lin_key(x_dst), conv.lin_query(x_src), conv.lin_value(x_src)
    if not _fuses(conv, reduce):
        return _gated(conv, graph, key, torch.cat([query, value], dim=1), None, None, reduce)
    options = {"act": "sigmoid", "act2": "identity", "reduce": reduce}
    return edge_messages(graph, key, query, None, None, value, None, **options)


def _with_edges(conv: Conv, graph: Graph, x_src: Tensor, x_dst: Tensor, attr: Tensor, finite: bool) -> Tensor:
    """Each Linear of a concatenation with edge features taken apart: what acts on nodes, and what on edges."""
    target, other = (x_dst, x_src) if finite else _only_read(graph, x_src, x_dst)
    dim = attr.size(1)
    key_x, key_e = edges.split_weight(conv.lin_key, x_dst, x_dst.size(1), dim)
    query_x, query_e = edges.split_weight(conv.lin_query, x_src, x_src.size(1), dim)
    value_x, value_e = edges.split_weight(conv.lin_value, x_src, x_src.size(1), dim)
    key = dense(target, key_x, _sum(conv.lin_key.bias, conv.lin_query.bias))
    source = dense(other, torch.cat([query_x, value_x]))
    if conv.lin_value.bias is not None:
        source = source + torch.cat([torch.zeros_like(conv.lin_value.bias), conv.lin_value.bias])
    weight = torch.cat([key_e + query_e, value_e])
    return _gated(conv, graph, key, source, attr, weight, edges.reduction(conv))


def _gated(
    conv: Conv, graph: Graph, key: Tensor, source: Tensor, attr: Tensor | None, weight: Tensor | None, reduce: str
) -> Tensor:
    """Reduce act(key_i + query_j [+ e W_1']) (value_j [+ e W_2']). source [m, 2 k], attr [E, d], weight [2 k, d]."""
    width = key.size(1)
    if _fuses(conv, reduce) and attr is not None and weight is not None and not streaming.large(graph, 2 * width, key):
        (query, value), (gate_e, value_e) = source.chunk(2, dim=1), dense(attr, weight).chunk(2, dim=1)
        options = {"act": "sigmoid", "act2": "identity", "reduce": reduce}
        return edge_messages(graph, key, query, gate_e, None, value, value_e, **options)

    act = conv.act

    def message(own: Tensor, other: Tensor, edge: Tensor | None = None) -> Tensor:
        sums = other if edge is None or weight is None else plus_dense(other, edge, weight)
        query, value = sums.split(width, dim=1)
        result: Tensor = act(own + query) * value
        return result

    acts = [act]
    (out,), how = streaming.reduced(
        graph,
        message,
        key,
        source,
        attr,
        (reduce,),
        width=2 * width,
        parameters=[*([] if weight is None else [weight]), *streaming.parameters_of(acts)],
        modules=acts,
        steady=streaming.row_by_row(acts, random=True),
    )
    note(conv, f"node-side Linears, gates {how}", builds=how.builds)
    return out


def fast_crystal(conv: Conv, x: Any, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
    """What CGConv.forward computes: x_i + sum of sigmoid(lin_f z) softplus(lin_s z) with z = [x_i, x_j, e]."""
    edge_index, edge_attr, _ = edges.unpacked(conv, edge_index, edge_attr)
    x_src, x_dst = edges.both_ends(x)
    graph = (edges.graph_between if edge_attr is None else edges.plain_graph)(conv, edge_index, x_src, x_dst)
    attr = None if edge_attr is None else edges.one_per_edge(graph, edge_attr, x_src)
    if attr is not None and attr.dim() != 2:
        raise Decline("edge_attr is not a matrix")
    root = x_dst
    if not edges.no_infinity(x_src, None if x_dst is x_src else x_dst, attr):
        x_dst, x_src = _only_read(graph, x_src, x_dst)
    gates = (conv.lin_f, conv.lin_s)
    widths = (x_dst.size(1), x_src.size(1), 0 if attr is None else attr.size(1))
    parts = [edges.split_weight(gate, x_src, *widths) for gate in gates]
    if any(gate.weight.size(0) != x_dst.size(1) for gate in gates):
        raise Decline("the weights do not fit the layer")
    biases = (None, None) if all(g.bias is None for g in gates) else tuple(map(edges.bias_of, gates))
    out, rooted = _crystal(conv, graph, x_src, x_dst, attr, parts, biases)
    out = out if conv.bn is None else conv.bn(out)
    return out if rooted else out + root


def _crystal(
    conv: Conv, graph: Graph, x_src: Tensor, x_dst: Tensor, attr: Tensor | None, parts: Any, biases: Any
) -> tuple[Tensor, bool]:
    """The sum of gated messages, and whether it has the root in it already."""
    reduce = edges.reduction(conv)
    if reduce not in ("sum", "mean") or (attr is not None and streaming.large(graph, 2 * x_dst.size(1), x_dst)):
        return _crystal_from_edges(conv, graph, x_src, x_dst, attr, parts, biases, reduce), False
    note(conv, "node-side Linears, gate and sum in one pass")
    if reduce == "sum" and x_dst is x_src:
        made = None if attr is None else _crystal_as_one_step(conv, graph, x_src, attr, biases)
        if made is not None:
            return made, conv.bn is None
        return _crystal_at_once(graph, x_src, attr, parts, biases), False
    terms = [  # each gate's terms by themselves: halves of one product would have to be copied apart
        (dense(x_dst, target, bias), dense(x_src, source), None if attr is None else dense(attr, edge))
        for (target, source, edge), bias in zip(parts, biases, strict=True)
    ]
    return edge_messages(graph, *terms[0], *terms[1], act="sigmoid", act2="softplus", reduce=reduce), False


def _crystal_from_edges(
    conv: Conv, graph: Graph, x_src: Tensor, x_dst: Tensor, attr: Tensor | None, parts: Any, biases: Any, reduce: str
) -> Tensor:
    """What messages come to that are made on edges. -> [n, k]."""
    target, source, edge = (torch.cat([f, s]) for f, s in zip(*parts, strict=True))
    ends = (dense(x_dst, target, None if biases[0] is None else torch.cat(biases)), dense(x_src, source))

    def message(own: Tensor, other: Tensor, features: Tensor | None = None) -> Tensor:
        z = own + other
        gate, core = (z if features is None else plus_dense(z, features, edge)).chunk(2, dim=1)
        return gate.sigmoid() * torch.nn.functional.softplus(core)

    (out,), how = streaming.reduced(
        graph, message, *ends, attr, (reduce,), width=2 * x_dst.size(1), parameters=[edge], steady=True
    )
    note(conv, f"node-side Linears, gates {how}", builds=how.builds)
    return out


def _crystal_as_one_step(conv: Conv, graph: Graph, x: Tensor, attr: Tensor, biases: Any) -> Tensor | None:
    """The whole layer but its BatchNorm as one step, where it is small; else None."""
    chain = chain_of(conv.lin_f, conv.lin_s)
    if chain is None or not takes(graph, x, attr, chain):
        return None
    weights = (conv.lin_f.weight, conv.lin_s.weight)
    root = 1.0 if conv.bn is None else None
    return gated_layer(graph, x, attr, weights, () if biases[0] is None else biases, root)


def _crystal_at_once(graph: Graph, x: Tensor, attr: Tensor | None, parts: Any, biases: Any) -> Tensor:
    """One product of all nodes with the four parts of both weights, one of all edges with theirs, and the gated sum."""
    (own, other, edge), (own2, other2, edge2) = parts
    bias = None if biases[0] is None else torch.cat(biases)
    weight = torch.cat([own, own2, other, other2])
    if attr is None:
        bias = None if bias is None else torch.cat([bias, torch.zeros_like(bias)])
        return gated_messages(graph, dense(x, weight, bias), act="sigmoid", act2="softplus")
    found = None if bias is None else features_of(graph, attr, shared=False)
    if found is None:
        features = dense(attr, torch.cat([edge, edge2]), bias)
    else:
        features = linear_of_data(found.data, torch.cat([edge, edge2]), bias)
    return gated_messages(graph, dense(x, weight), features, act="sigmoid", act2="softplus")


def _only_read(graph: Graph, x_src: Tensor, x_dst: Tensor) -> tuple[Tensor, Tensor]:
    """What Linears of x_dst and x_src act on, where one of them is not finite."""
    return edges.only_read(graph, x_dst, target=True), edges.only_read(graph, x_src, target=False)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


RESIDUAL = Layer(pyg.ResGatedGraphConv, fast_residual, aggr=SIMPLE, message=as_wide_as_result)
CRYSTAL = Layer(pyg.CGConv, fast_crystal, aggr=SIMPLE, message=as_wide_as_result)
