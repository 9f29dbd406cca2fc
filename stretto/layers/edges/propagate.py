"""propagate() of a layer whose message() is a network on edges (network.py): a user's own, or PointNetConv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.layers import adjacency
from stretto.layers.base import Decline, note
from stretto.layers.edges import tracing
from stretto.layers.edges.left import EDGE, SOURCE, TARGET, Value
from stretto.layers.edges.network import check_value, network
from stretto.layers.edges.trace import traced
from stretto.layers.layer import Conv


def why_not(function: Any) -> str | None:
    """Why no call of this function is a network on edges, or None. All its arguments are taken to be given."""
    code = getattr(function, "__code__", None)
    count = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
    found = traced(function, () if code is None else code.co_varnames[1:count], frozenset())
    if isinstance(found, str):
        return found
    return None if any(node.op == "call_module" for node in found.calls) else "it calls no network"


def propagated(conv: Conv, edge_index: Any, given: dict[str, Any], reduce: str) -> Tensor:
    """What conv.propagate(edge_index, **given) computes where message() is a network on edges, or Decline."""
    names = tuple(conv.inspector.get_param_names("message"))
    if any(name in tracing.SPECIAL for name in names) or any(_origin(name) not in given for name in names):
        raise Decline("message() takes special arguments or defaults")
    values, sizes = _lifted(conv, edge_index, names, given)
    trace = traced(type(conv).message, names, frozenset(n for n, value in values.items() if value is None))
    if isinstance(trace, str):
        raise Decline(f"message() reads self: {trace}")
    source, target = sizes
    try:
        graph = adjacency.graph_of(conv, edge_index, source, target, adjacency.PASSING_EDGEWISE)
    except StrettoError as error:  # an edge out of range, say: stock has its own words for it
        raise Decline(str(error)) from error
    leaves = {trace.arguments[name]: value for name, value in values.items() if value is not None}
    made = network(trace, trace.calls, trace.output, conv, leaves, graph)
    if len(made.shape) != 1:
        raise Decline("message() gives a number an edge, not a row")
    out, how = made.run(graph, reduce)
    note(conv, how.text, builds=how.builds)
    return out


def _origin(name: str) -> str:
    return name[:-2] if name.endswith(("_i", "_j")) else name


def _lifted(
    conv: Conv, edge_index: Any, names: Sequence[str], given: dict[str, Any]
) -> tuple[dict[str, Value | None], tuple[int, int]]:
    """message()'s arguments before they are gathered, and how many nodes send and receive, as PyG infers it."""
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided or edge_index.shape[:1] != (2,):
        raise Decline("edge_index is no plain [2, E]")
    sender = 0 if conv.flow == "source_to_target" else 1
    sizes = [None, None] if given.get("size") is None else list(given["size"])
    values = {name: _value(name, given[_origin(name)], sender, sizes) for name in names}
    present = {name: value for name, value in values.items() if value is not None}
    for name, value in present.items():
        check_value(name, value, next(iter(present.values())).tensor, edge_index.size(1))
    source, target = sizes[sender], sizes[1 - sender]
    source, target = target if source is None else source, source if target is None else target
    if source is None or target is None:
        raise Decline("message() reads no node")
    return values, (int(source), int(target))


def _value(name: str, data: Any, sender: int, sizes: list[int | None]) -> Value | None:
    """An argument of message(), and where it lives; what it tells of the number of nodes goes into `sizes`."""
    if not name.endswith(("_i", "_j")):
        return None if data is None else Value(EDGE, data)
    at = sender if name.endswith("_j") else 1 - sender
    if isinstance(data, (tuple, list)):
        if len(data) != 2 or sender == 1:  # PyG itself reads such a pair in two ways
            raise Decline("two ends with flow target_to_source")
        _note_size(sizes, 1 - at, data[1 - at])
        data = data[at]
    _note_size(sizes, at, data)
    return None if data is None else Value(SOURCE if at == sender else TARGET, data)


def _note_size(sizes: list[int | None], at: int, data: Any) -> None:
    if isinstance(data, Tensor) and data.dim():
        if sizes[at] not in (None, data.size(0)):
            raise Decline("size and x disagree")
        sizes[at] = data.size(0)
