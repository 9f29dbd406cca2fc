"""MetaLayer: an edge_model net(cat([src, dst, e, u[batch]])) and a node_model that scatters another, read by a trace.

What edge_model returns is an array of edges by definition; the arrays inside of it need not be, and its first Linear
acts on nodes. The messages that node_model scatters are never all there; what else it computes runs as it is written.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn.models import MetaLayer

from stretto.errors import StrettoError
from stretto.graph import Graph
from stretto.layers import adjacency
from stretto.layers.base import Decline, check_input, hooked, note
from stretto.layers.edges.left import EDGE, SOURCE, TARGET, Value, execute
from stretto.layers.edges.network import Network, above, check_value, network
from stretto.layers.edges.streaming import How
from stretto.layers.edges.trace import REDUCTIONS, Trace, scatter, traced
from stretto.layers.layer import Layer

Result = tuple[Tensor, Tensor | None, Tensor | None]


def fast(
    meta: Any,
    x: Tensor,
    edge_index: Any,
    edge_attr: Tensor | None = None,
    u: Tensor | None = None,
    batch: Tensor | None = None,
) -> Result:
    """What MetaLayer.forward computes."""
    check_input(x)
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided or edge_index.shape[:1] != (2,):
        raise Decline("edge_index is no plain [2, E]")
    done: list[How] = []
    if meta.edge_model is not None:
        try:
            graph, made = _edge_network(meta, x, edge_index, edge_attr, u, batch)
        except Decline as decline:
            raise Decline(f"edge_model: {decline.reason}") from decline
        edge_attr, how = made.run(graph, "each")
        done.append(How(f"edge_model: {how}", how.builds))
    x, how = _nodes(meta, x, edge_index, edge_attr, u, batch)
    done.append(How(f"node_model: {how}", how.builds))
    if meta.global_model is not None:
        u = meta.global_model(x, edge_index, edge_attr, u, batch)
    note(meta, ", ".join(how.text for how in done), builds=any(how.builds for how in done))
    return x, edge_attr, u


def _nodes(meta: Any, x: Tensor, edge_index: Tensor, edge_attr: Any, u: Any, batch: Any) -> tuple[Tensor, How]:
    """The new features of nodes, and how they were made; Decline where nothing of the layer would be ours."""
    if meta.node_model is None:
        if meta.edge_model is None:
            raise Decline("neither edge_model nor node_model")
        return x, How("none", False)
    try:
        return _node_model(meta, x, edge_index, edge_attr, u, batch)
    except Decline as decline:
        if meta.edge_model is None:
            raise Decline(f"node_model: {decline.reason}") from decline
        return meta.node_model(x, edge_index, edge_attr, u, batch), How(f"as stock ({decline.reason})", False)


def _traced(model: Any, inputs: tuple[Any, ...]) -> tuple[Trace, list[fx.Node]]:
    """What a model's forward does with its five arguments, and these, or Decline."""
    function = type(model).forward if isinstance(model, torch.nn.Module) else None
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount != 6 or code.co_kwonlyargcount or "forward" in model.__dict__:
        raise Decline("its forward is no plain function of five arguments")
    if hooked(model) or type(model).__call__ is not torch.nn.Module.__call__:
        raise Decline("a hook is registered, or it is called in its own way")
    names = code.co_varnames[1:6]
    absent = frozenset(name for name, value in zip(names, inputs, strict=True) if value is None)
    trace = traced(function, names, absent)
    if isinstance(trace, str):
        raise Decline(trace)
    return trace, [trace.arguments[name] for name in names]


def _graph(meta: Any, x: Tensor, edge_index: Tensor, flow: str = "source_to_target") -> Graph:
    try:
        return adjacency.graph_of(meta, edge_index, x.size(0), x.size(0), adjacency.PASSING_EDGEWISE, flow=flow)
    except StrettoError as error:  # an edge out of range, say: stock has its own words for it
        raise Decline(str(error)) from error


def _check(x: Tensor, edge_index: Tensor, edge_attr: Any, u: Any, batch: Any) -> None:
    """Decline what is no plain tensor, or does not fit x."""
    check_value("x", Value(SOURCE, x), x, edge_index.size(1))
    if edge_attr is not None:
        check_value("edge_attr", Value(EDGE, edge_attr), x, edge_index.size(1))
    if u is not None:
        check_value("u", Value(SOURCE, u), x, edge_index.size(1))
    if batch is not None and (type(batch) is not Tensor or batch.dtype != torch.int64 or batch.shape != x.shape[:1]):
        raise Decline("batch is no vector of integers, one a node")


def _edge_network(
    meta: Any, x: Tensor, edge_index: Tensor, edge_attr: Any, u: Any, batch: Any
) -> tuple[Graph, Network]:
    """edge_model(x[row], x[col], edge_attr, u, batch[row]) as a network on edges."""
    trace, (source, target, attr, of_all, at) = _traced(meta.edge_model, (x, x, edge_attr, u, batch))
    _check(x, edge_index, edge_attr, u, batch)
    leaves = {source: Value(SOURCE, x), target: Value(TARGET, x)}
    if edge_attr is not None:
        leaves[attr] = Value(EDGE, edge_attr)
    spread = [node for node in trace.calls if _is_item(node, of_all, at)]
    if spread:
        leaves |= dict.fromkeys(spread, Value(SOURCE, u[batch]))
    graph = _graph(meta, x, edge_index)
    calls = [node for node in trace.calls if node not in leaves]
    made = network(trace, calls, trace.output, meta.edge_model, leaves, graph)
    made.check(graph)
    return graph, made


def _node_model(meta: Any, x: Tensor, edge_index: Tensor, edge_attr: Any, u: Any, batch: Any) -> tuple[Tensor, How]:
    """node_model(x, edge_index, edge_attr, u, batch), its scattered messages made as a network on edges."""
    model, inputs = meta.node_model, (x, edge_index, edge_attr, u, batch)
    trace, symbols = _traced(model, inputs)
    _check(x, edge_index, edge_attr, u, batch)
    node, src, side, reduce = _scattered(trace, symbols)
    leaves = _leaves(trace, symbols, inputs, side)
    inside = above(src, leaves)
    calls = [call for call in trace.calls if call in inside and call not in leaves]
    outside = above(trace.output, {node: None})
    if any(call in outside for call in calls):
        raise Decline("it uses the messages elsewhere, too")
    if any(call.op == "call_module" and call not in inside | outside for call in trace.calls):
        raise Decline("it computes something that it does not return")
    graph = _graph(meta, x, edge_index, "source_to_target" if side == 1 else "target_to_source")
    made = network(trace, calls, src, model, leaves, graph)
    if not (made.steady or made.in_passes(graph)) or len(made.shape) != 1:
        raise Decline("its messages come from random numbers or statistics of all edges, or are no rows")
    total, how = made.run(graph, reduce)
    known: dict[Any, Any] = dict(zip(trace.arguments.values(), inputs, strict=True))
    known[node] = total
    modules = {name: getattr(model, name) for name in trace.read}
    for call in trace.calls:
        if call in outside and call is not node:
            known[call] = execute(call, known, modules)
    return known[trace.output], how


def _scattered(trace: Trace, symbols: list[fx.Node]) -> tuple[fx.Node, fx.Node, int, str]:
    """The one scatter of a trace, what it scatters, by which end of the edges, and how it reduces; or Decline."""
    scatters = [node for node in trace.calls if node.target is scatter]
    if len(scatters) != 1:
        raise Decline(f"it scatters {len(scatters)} times")
    of_nodes, index, *_ = symbols
    src, where, dim, size, reduce = scatters[0].args
    side = _side(where, index)
    if not isinstance(src, fx.Node) or side is None or dim not in (0, -2) or reduce not in REDUCTIONS:
        raise Decline("it scatters in another way than by an end of the edges")
    if not _is_count(size, of_nodes):
        raise Decline("it scatters into another number of rows than x has")
    return scatters[0], src, side, REDUCTIONS[str(reduce)]


def _leaves(trace: Trace, symbols: list[fx.Node], inputs: tuple[Any, ...], side: int) -> dict[fx.Node, Value]:
    """What messages are made of: what an end of the edges gathers, and edge_attr. side: the end that receives."""
    (of_nodes, index, attr, of_all, at), (x, _, edge_attr, u, batch) = symbols, inputs
    leaves: dict[fx.Node, Value] = {} if edge_attr is None else {attr: Value(EDGE, edge_attr)}
    values = {of_nodes: x}
    for node in trace.calls:
        what, end = _gathered(node, index, of_nodes, of_all, at)
        if what is not None and end is not None:
            if what is of_all and what not in values:
                values[what] = u[batch]
            leaves[node] = Value(TARGET if end == side else SOURCE, values[what])
    return leaves


def _is_item(node: Any, of: Any, at: Any) -> bool:
    """Whether a node is of[at]."""
    return isinstance(node, fx.Node) and node.target is operator.getitem and node.args == (of, at)


def _side(node: Any, index: fx.Node) -> int | None:
    """0 or 1, where a node is edge_index[0] or edge_index[1]."""
    return next((side for side in (0, 1) if _is_item(node, index, side)), None)


def _is_count(node: Any, of_nodes: fx.Node) -> bool:
    """Whether a node is x.size(0) or x.shape[0]."""
    if not isinstance(node, fx.Node):
        return False
    if node.target == "size" and node.args == (of_nodes, 0) and not node.kwargs:
        return True
    shape = node.args[0] if node.args and _is_item(node, node.args[0], 0) else None
    return isinstance(shape, fx.Node) and shape.target is getattr and shape.args == (of_nodes, "shape")


def _gathered(
    node: fx.Node, index: fx.Node, of_nodes: fx.Node, of_all: fx.Node, at: fx.Node
) -> tuple[fx.Node | None, int | None]:
    """(x, end) of x[row] or x[col], (u, end) of u[batch][row] or u[batch[row]], else nothing. end: 0 or 1."""
    if node.target is not operator.getitem or len(node.args) != 2:
        return None, None
    what, where = node.args
    if what is of_nodes:
        return of_nodes, _side(where, index)
    if _is_item(what, of_all, at):
        return of_all, _side(where, index)
    if what is of_all and isinstance(where, fx.Node) and where.target is operator.getitem and where.args[0] is at:
        return of_all, _side(where.args[1], index)
    return None, None


LAYER = Layer(MetaLayer, fast)
