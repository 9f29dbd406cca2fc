"""CFConv, SchNet's interaction: x_j times a filter made from the edge's length. Both directions of a bond have one
length: where edges come in such pairs, the network that makes filters runs once for each pair, on half the edges."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.models.schnet import CFConv, ShiftedSoftplus

from stretto.graph import Graph
from stretto.graph.derived import lasting
from stretto.layers import edges
from stretto.layers.base import LINEAR, Decline, hooked, note, weight_of
from stretto.layers.edges import streaming
from stretto.layers.edges.chains import chain_of
from stretto.layers.edges.pairs import Features, features_of
from stretto.layers.layer import SUM, Conv, Layer
from stretto.ops.edge_layer import Chain, Form, edge_layer, takes, width_after
from stretto.ops.edge_packed import linear_of_data, product_messages, shifted_softplus


def fast(conv: Conv, x: Tensor, edge_index: Any, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
    """What CFConv.forward computes."""
    x, _, _ = edges.ends(x)
    graph = edges.plain_graph(conv, edge_index, x, x)
    attr = edges.one_per_edge(graph, edge_attr, x)
    length = edges.one_per_edge(graph, edge_weight, x, "edge_weight")
    if attr.dim() != 2 or length.dim() != 1:
        raise Decline("edge_attr is not a matrix, or edge_weight not a vector")
    plain = type(conv.nn) is torch.nn.Sequential and not hooked(conv.nn)
    if plain and len(conv.nn) and type(conv.nn[0]) in LINEAR and streaming.large(graph, _widest(conv), x):
        made = _in_blocks(conv, graph, x, attr, length)
        if made is not None:
            return made
    shared = plain and streaming.row_by_row(conv.nn)
    found = features_of(graph, attr, length, shared=shared)
    pairs = None if found is None else found.pairs
    note(conv, "sum of W_e X_j, one pass" + ("; one filter for both directions" if pairs else ""))
    if found is None:
        filters = _run(conv.nn, plain, attr) * _window(conv.cutoff, length)
    else:
        made = _at_once(conv, graph, x, found)
        if made is not None:
            return made
        filters = _filters(conv, plain, found)
    result: Tensor = conv.lin2(product_messages(graph, conv.lin1(x), filters, pairs))
    return result


def _widest(conv: Conv) -> int:
    """Of the arrays that a layer with a Sequential makes for each edge."""
    result: int = max([conv.lin2.weight.size(1), *(m.weight.size(0) for m in conv.nn if type(m) in LINEAR)])
    return result


def _in_blocks(conv: Conv, graph: Graph, x: Tensor, attr: Tensor, length: Tensor) -> Tensor | None:
    """The layer with filters made in blocks of edges, and made again in backward; None where they must see all."""
    if not streaming.row_by_row(conv.nn, random=True):
        return None

    network, cutoff = conv.nn, conv.cutoff

    def message(other: Tensor, features: Tensor, far: Tensor) -> Tensor:
        return other * (_run(network, True, features) * _window(cutoff, far))

    (out,), how = streaming.reduced(
        graph,
        message,
        None,
        conv.lin1(x),
        (attr, length),
        ("sum",),
        width=_widest(conv),
        parameters=streaming.parameters_of(conv.nn),
        modules=conv.nn,
        steady=True,
    )
    note(conv, f"sum of W_e X_j, filters {how}", builds=how.builds)
    result: Tensor | None = conv.lin2(out)
    return result


def _at_once(conv: Conv, graph: Graph, x: Tensor, found: Features) -> Tensor | None:
    """The whole layer as one step, where it is small and its networks are Linears and known activations; else None."""
    chains = chain_of(conv.lin1), chain_of(conv.nn), chain_of(conv.lin2)
    before, edge, after = chains
    if before is None or edge is None or after is None or not takes(graph, x, found.attr, before, edge, after):
        return None
    width = width_after(before, x.size(1))
    if width is None or width_after(edge, found.attr.size(1)) != width or width_after(after, width) is None:
        return None
    window = _kept_window(conv, found).view(-1)
    edge = Chain((*edge.stages, ("scale", None)), (*edge.tensors, window))
    return edge_layer(graph, x, found.attr, before, edge, after, Form("product", None, found.pairs))


def _kept_window(conv: Conv, found: Features) -> Tensor:
    assert found.length is not None
    key = ("window", conv.cutoff)
    if key not in found.kept:
        with lasting():  # what an evaluation makes, training saves for backward
            found.kept[key] = _window(conv.cutoff, found.length)
    result: Tensor = found.kept[key]
    return result


def _filters(conv: Conv, plain: bool, found: Features) -> Tensor:
    """W of every edge or pair of edges. [E or P, filters]."""
    window = _kept_window(conv, found)
    first = conv.nn[0] if plain and len(conv.nn) else None
    if first is None or type(first) not in LINEAR or hooked(first):
        return _run(conv.nn, plain, found.attr) * window
    made = linear_of_data(found.data, weight_of(first, found.attr, bias=True), first.bias)
    return _run(list(conv.nn)[1:], True, made) * window


def _window(cutoff: float, length: Tensor) -> Tensor:
    """What makes filters end at the cutoff, as stock computes it. [E, 1]."""
    return (0.5 * (torch.cos(length * math.pi / cutoff) + 1.0)).view(-1, 1)


def _run(network: Any, plain: bool, rows: Tensor) -> Tensor:
    """The network that makes filters, or what is left of it; plain: it is a chain nobody watches."""
    for module in network if plain else [network]:
        if type(module) is ShiftedSoftplus and not hooked(module):
            rows = shifted_softplus(rows, module.shift)
        else:
            rows = module(rows)
    return rows


LAYER = Layer(CFConv, fast, aggr=SUM, message=lambda c, i, o: c.lin1.weight.size(0))
