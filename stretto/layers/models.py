"""PyG's GCN, GraphSAGE and GAT in inference: what follows a layer, a BatchNorm or a Linear, is folded into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stretto.layers import folds, gat, relations, sage
from stretto.layers.base import LINEAR, Decline, Quiet, hooked, note_path
from stretto.layers.sage import Summands
from stretto.loader import trim


def fast_basic(model: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What the forward of a BasicGNN computes, where something can be folded or left out."""
    if not args and kwargs.get("num_sampled_nodes_per_hop") is not None:
        return _by_hops(model, x, edge_index, kwargs)
    if model.training or not isinstance(x, Tensor) or not folds.pays(x.size(0), model.hidden_channels):
        raise Quiet("training, or small")
    if args or any(value is not None for name, value in kwargs.items() if name != "edge_weight"):
        raise Quiet("further arguments")
    given = kwargs if model.supports_edge_weight else {}
    normed = [folds.fixed_norm(norm) and (model.act is None or not model.act_first) for norm in model.norms]
    last = len(model.convs) - 1
    ends = _ends_linear(model)
    if not any(normed) and not ends:
        raise Quiet("nothing to fold")
    every = []
    for i, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
        inner = i < last or model.jk_mode is not None
        of = relations.summands(conv, (x, edge_index), given) if inner and (normed[i] or (ends and i == last)) else None
        attended = attended_of(conv, norm, x, edge_index) if of is None and inner and normed[i] else None
        if attended is not None:
            x = attended
        elif of is None:
            x = conv(x, edge_index, **given)
            x = x if not inner else norm(x, None, None) if model.supports_norm_batch else norm(x)
        else:
            x = evaluated(conv, of, norm if normed[i] else None, model.lin if ends and i == last else None)
            if ends and i == last:
                return x
        if inner:
            x = model.dropout(x if model.act is None else model.act(x))
            every.append(x)
    x = model.jk(every) if hasattr(model, "jk") else x
    return model.lin(x) if hasattr(model, "lin") else x


def attended_of(conv: Any, norm: Any, x: Tensor, edge_index: Any) -> Tensor | None:
    """norm(conv(x)) of a GATConv with the norm folded into it, or None where that cannot be."""
    if not gat.takes_norm(conv, norm):
        return None
    try:
        out = gat.fast(conv, x, edge_index, norm=norm)
    except Decline:
        return None
    note_path(conv, None).plan += "; BatchNorm folded into the weights"
    return out


def _by_hops(model: Any, x: Any, edge_index: Any, kwargs: dict[str, Any]) -> Tensor:
    """With PyG's trim_to_layer on a loader's batch: no layer computes the nodes that are dropped right after it."""
    nodes, edges = (kwargs.pop(f"num_sampled_{what}_per_hop", None) for what in ("nodes", "edges"))
    plain = isinstance(x, Tensor) and type(edge_index) is Tensor and isinstance(nodes, list) and isinstance(edges, list)
    if not plain or any(value is not None for value in kwargs.values()):
        raise Quiet("further arguments")
    out = trim.run_by_hops(model, x, edge_index, nodes, edges)
    if out is None:
        raise Quiet("not as a loader gave it")
    return out


def _ends_linear(model: Any) -> bool:
    """Whether the last layer, or its norm, is followed by a Linear and nothing else, and that makes it narrower."""
    if model.jk_mode != "last" or model.act is not None or type(model.lin) not in LINEAR or hooked(model.lin):
        return False
    norm, dropout = model.norms[-1], model.dropout
    if type(dropout) is not torch.nn.Dropout or (dropout.training and dropout.p > 0) or hooked(norm, dropout):
        return False
    plain = folds.fixed_norm(norm) or type(norm) is torch.nn.Identity
    return plain and not hasattr(model, "jk") and model.lin.weight.size(0) <= model.lin.weight.size(1)


def evaluated(conv: Any, of: Summands, norm: Any, linear: Any) -> Tensor:
    """linear(norm(what a layer adds up)) with both folded into its weights; None: there is no such module."""
    weights = [of.weight] if of.root_weight is None else [of.weight, of.root_weight]
    bias, told = of.bias, []
    if norm is not None:
        weights, bias = folds.normalised(norm, weights, bias)
        told.append("BatchNorm")
    if linear is not None:
        weights, bias = folds.followed(linear, weights, bias)
        told.append("Linear")
    root = None if of.root_weight is None else weights[1]
    x = sage.evaluated(conv, replace(of, weight=weights[0], root_weight=root, bias=bias))
    note_path(conv, None).plan += f"; {' and '.join(told)} folded into the weights"
    return x
