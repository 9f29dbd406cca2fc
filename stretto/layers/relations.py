"""HeteroConv: the relations that end in one type of nodes side by side.

The sum over relations of A_r X_r W_r' + b_r + X V_r' is evaluated as one plan: X V' with V = sum V_r is one product
instead of one per relation (three with its gradients), and each aggregation adds onto the sum of those before it, so
that no stack of results is made. Layers that are no such sum run in turn, as they would anyway.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.hetero_conv import group

from stretto import settings
from stretto.compile import Product, joint
from stretto.kernels import autocasts
from stretto.layers.base import Decline, hooked, messages, note, note_fast, record_of
from stretto.layers.layer import Conv, Layer, Summands
from stretto.layers.watched import why_stock

Part = tuple[Any, Summands]  # a layer and what it adds up
Call = tuple[str, Any, list[Any], dict[str, Any]]  # type of the destination, layer, arguments, keywords


def fast(conv: Conv, *args_dict: Any, **kwargs_dict: Any) -> dict[str, Tensor | None]:
    """What HeteroConv.forward computes."""
    if settings.get("STRETTO_PLAN") == "stock":
        raise Decline("relations in turn, as stock has them")
    calls = list(_calls(conv, args_dict, kwargs_dict))
    joined = _side_by_side(calls)
    results: dict[str, list[Tensor]] = {target: [] for target, *_ in calls}
    counts = Counter(target for target, *_ in calls)
    for i, (target, layer, args, kwargs) in enumerate(calls):
        if i not in joined.get(target, ()):
            results[target].append(layer(*args, **kwargs))
    for target, parts in joined.items():
        share = 1.0 if conv.aggr == "sum" else 1.0 / counts[target]
        out = total(list(parts.values()), share)
        for other in results[target]:
            out = torch.add(out, other, alpha=share)
        results[target] = [out]
    layers = [layer for parts in joined.values() for layer, _ in parts.values()]
    avoided = sum(record_of(layer).way.avoided for layer in layers)
    note(conv, f"{len(layers)} of {len(calls)} relations side by side", avoided=avoided)
    return {target: group(outs, conv.aggr) for target, outs in results.items()}


def _side_by_side(calls: list[Call]) -> dict[str, dict[int, Part]]:
    """Of each target, its relations that can be added up, by their place among the calls, where there are several."""
    of_target: dict[str, dict[int, Part]] = {}
    for i, (target, layer, args, kwargs) in enumerate(calls):
        of = summands(layer, args, kwargs)
        if of is not None:
            of_target.setdefault(target, {})[i] = (layer, of)
    joined = {target: parts for target, parts in of_target.items() if len(parts) > 1}
    if not joined:
        raise Decline("relations in turn: no two of them end in one type and can be added up")
    for target, parts in joined.items():
        if not alike([of for _, of in parts.values()]):
            raise Decline(f"relations in turn: those into {target} differ in shape or type")
    return joined


def _calls(conv: Conv, args_dict: Any, kwargs_dict: Any) -> Iterator[Call]:
    """The call of every relation that has a value of its own."""
    if any(not name.endswith("_dict") for name in kwargs_dict):
        raise Decline("a keyword does not end with _dict")
    for kind, layer in conv.convs.items():
        source, _, target = kind
        has_edges = False
        given: list[tuple[str | None, Any]] = []
        for name, values in [*((None, v) for v in args_dict), *kwargs_dict.items()]:
            if kind in values:
                has_edges = True
                given.append((name, values[kind]))
            elif source == target and source in values:
                given.append((name, values[source]))
            elif source in values or target in values:
                given.append((name, (values.get(source), values.get(target))))
        if has_edges:
            keywords = {name[: -len("_dict")]: value for name, value in given if name is not None}
            yield target, layer, [value for name, value in given if name is None], keywords


def known(layer: Any) -> Layer | None:
    """What is known of the class of a layer that is a sum of products, else None."""
    from stretto.layers import layer_of  # whose table has this file's layer

    kind = layer_of(type(layer))
    return None if kind is None or kind.summands is None else kind


def summands(layer: Any, args: Any, kwargs: Any) -> Summands | None:
    """What a layer would add up for this input, or None where it is not a plain sum of products."""
    kind = known(layer)
    if kind is None or kind.summands is None or why_stock(layer) or kind.why_declined(layer) or hooked(layer):
        return None
    if torch.nn.modules.module._has_any_global_hook():
        return None
    try:
        found = kind.summands(layer, *args, **kwargs)
    except Decline:
        return None
    if autocasts(found.x):
        return None
    return found if found.is_linear else None


def alike(parts: list[Summands]) -> bool:
    """Whether what several layers add up has one shape and type."""
    return len({(of.adj.graph.num_rows, of.weight.size(0), of.x.dtype, of.x.device) for of in parts}) <= 1


def total(parts: list[Part], share: float = 1.0) -> Tensor:
    """A share of the sum of what all layers add up. -> [n, o]."""
    products = [Product(of.x, _scaled(of.weight, share), of.adj) for _, of in parts]
    roots: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for _, of in parts:
        if of.root is not None and of.root_weight is not None:
            roots.setdefault(id(of.root), (of.root, []))[1].append(of.root_weight)
    products += [Product(root, _scaled(_sum(weights), share)) for root, weights in roots.values()]
    biases = [of.bias for _, of in parts if of.bias is not None]
    out, plan = joint(products, _scaled(_sum(biases), share) if biases else None)
    for layer, of in parts:
        note_fast(layer)
        note(layer, f"side by side: {plan}", avoided=_avoided(layer, of))
    return out


def _avoided(layer: Any, of: Summands) -> int:
    """Bytes of the messages that stock builds for this layer."""
    kind = known(layer)
    if kind is None or kind.message is None:
        return 0
    return messages(of.adj.graph.num_edges, kind.message(layer, of.x.size(1), of.weight.size(0)), of.x)


def _sum(tensors: list[Tensor]) -> Tensor:
    """One by one: the gradients of a stack that is summed are views of one tensor, and autograd would hand that same
    memory to every parameter as its .grad, where the next backward adds to it once for each of them."""
    return functools.reduce(torch.add, tensors)


def _scaled(tensor: Tensor, share: float) -> Tensor:
    return tensor if share == 1.0 else tensor * share


LAYER = Layer(
    pyg.HeteroConv,
    fast,
    declines=(lambda c: None if c.aggr in ("sum", "mean") else f"relations in turn: they are combined by {c.aggr}",),
)
