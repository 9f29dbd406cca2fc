"""propagate() of a layer whose message() is x_j or w * x_j, a user's own: one sparse product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr as stock_aggr

from stretto.errors import StrettoError
from stretto.graph import Graph
from stretto.kernels import autocasts
from stretto.layers import adjacency, edges
from stretto.layers.base import Decline, check_input, messages, note
from stretto.layers.edges import tracing
from stretto.layers.layer import Conv
from stretto.layers.watched import hooked
from stretto.ops import spmm
from stretto.ops.edge_messages import edge_messages

KNOWN = {
    stock_aggr.SumAggregation: "sum",
    stock_aggr.MeanAggregation: "mean",
    stock_aggr.MaxAggregation: "max",
    stock_aggr.MinAggregation: "min",
}


def product(conv: Conv, edge_index: Any, given: dict[str, Any]) -> Tensor:
    """What conv.propagate(edge_index, **given) computes, or Decline."""
    values = dict(given)
    size = values.pop("size", None)
    message = _message(conv, values)
    reduce = reduction(conv)
    x, graph = _ends(conv, edge_index, values[message.source[:-2]], size)
    weight = None if message.weight is None else values[message.weight]
    text = f"{reduce}(A, X)"
    if weight is None:
        out = spmm(graph, x, reduce=reduce)
    elif _one_each(message, weight, graph.num_edges, x):
        text, out = f"{reduce}(A, w X)", spmm(graph, x, weight.reshape(-1), reduce=reduce)
    elif not message.column and weight.shape == (graph.num_edges, x.size(1)) and reduce in ("sum", "mean"):
        text = f"{reduce} of W_e X_j, one pass"
        out = edge_messages(graph, None, x, None, None, None, weight, act="identity", act2="identity", reduce=reduce)
    else:
        raise Decline(f"{message.weight} has shape {list(weight.shape)}")
    note(conv, text, avoided=messages(graph.num_edges, x.size(1), x))
    return out


def _message(conv: Conv, values: dict[str, Any]) -> tracing.Message:
    """What conv.message() makes of these arguments of propagate(), or Decline."""
    names = tuple(conv.inspector.get_param_names("message"))
    needed = [name[:-2] if name.endswith(("_i", "_j")) else name for name in names]
    if any(name in tracing.SPECIAL for name in names) or any(name not in values for name in needed):
        raise Decline("message() takes special arguments or defaults")
    if sum(name.endswith(("_i", "_j")) for name in conv._user_args) != 1:
        raise Decline("message() reads more than one end")
    absent = frozenset(n for n, key in zip(names, needed, strict=True) if values[key] is None)
    message = tracing.message_of(type(conv).message, names, absent)
    if isinstance(message, str):
        raise Decline(message)
    return message


def _one_each(message: tracing.Message, weight: Any, count: int, x: Tensor) -> bool:
    """Whether a message's weight is one number an edge, as it is written; Decline where it is no plain tensor."""
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.layout != torch.strided or weight.dtype != x.dtype:
        raise Decline(f"{message.weight} is no plain tensor of the input's type")
    if weight.shape == (count,):
        return bool(message.column)
    return weight.shape == (count, 1) and message.column in ("", "view")


def reduction(conv: Conv) -> str:
    """The name of the layer's aggregation, or Decline."""
    reduce = next((name for kind, name in KNOWN.items() if edges.is_stock(conv.aggr_module, kind)), None)
    if reduce is None or hooked(conv.aggr_module):
        raise Decline(f"the aggregation is {conv.aggr}")
    return reduce


def _ends(conv: Conv, edge_index: Any, data: Any, size: Any) -> tuple[Tensor, Graph]:
    """The features of the sending nodes and the graph, as PyG infers its sizes, or Decline."""
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided or edge_index.shape[:1] != (2,):
        raise Decline("edge_index is no plain [2, E]")
    sender = 0 if conv.flow == "source_to_target" else 1
    sizes = [None, None] if size is None else list(size)
    pair = data if isinstance(data, (tuple, list)) else None
    if pair is not None and (len(pair) != 2 or sender == 1):  # PyG itself reads such a pair in two ways
        raise Decline("two ends with flow target_to_source")
    x = data if pair is None else pair[sender]
    other = None if pair is None else pair[1 - sender]
    check_input(x, *([] if other is None else [other]))
    if autocasts(x):
        raise Decline("autocast is on")
    for at, tensor in ((sender, x), (1 - sender, other)):
        if tensor is not None:
            if sizes[at] not in (None, tensor.size(0)):
                raise Decline("size and x disagree")
            sizes[at] = tensor.size(0)
    receivers = sizes[1 - sender] if sizes[1 - sender] is not None else sizes[sender]
    assert receivers is not None
    try:
        return x, adjacency.graph_of(conv, edge_index, x.size(0), int(receivers))
    except StrettoError as error:  # an edge out of range, say: stock has its own words for it
        raise Decline(str(error)) from error
