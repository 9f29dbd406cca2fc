"""Networks on edges that users write themselves: net(cat([x_i, x_j - x_i, e])) and what stands around it.

The first Linear acts on what comes from a node once a node, not once an edge: W [x_i, x_j, e] is u_i + v_j + W_e e. The
rest is computed on edges, in blocks once they are many (streaming.py), so that no array of all edges is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch_geometric.nn.models import MLP
from torch_geometric.nn.norm import BatchNorm, LayerNorm

from stretto.graph import Graph
from stretto.kernels import autocasts
from stretto.layers import edges
from stretto.layers.base import LAZY, LINEAR, Decline, hooked
from stretto.layers.edges import norms, streaming
from stretto.layers.edges.left import EDGE, TARGET, Moved, Program, Value
from stretto.layers.edges.norms import in_order
from stretto.layers.edges.streaming import How
from stretto.layers.edges.trace import Shape, Trace, kind_of, name_of, shape_of
from stretto.layers.gin import first_linear
from stretto.ops.edge_mlp import Ends

# Channels from which on W (x_i - x_j) is taken as W x_i - W x_j. Narrower ones are coordinates: of two points close to
# each other and far from the origin, the difference has digits that the two products have lost.
WIDE = 8
FEW = 1024  # nodes on which a Linear costs nothing, however few the edges
ARRAYS = 4  # of about the same width that a network of two Linears keeps
PATIENCE = 4  # of networks with nothing to move: blocks then only add the work of making messages twice


@dataclass(eq=False)
class Network:
    """A function of edges, ready to run."""

    program: Program
    shape: Shape
    kept: int  # channels an edge of all arrays together
    steady: bool  # whether blocks of edges give what all edges at once give

    def __post_init__(self) -> None:
        self.terms, self.moved = self.program.terms, bool(self.program.moved)  # whether a Linear acts on nodes
        self.inner, self.parameters = self.program.in_turn(), self.program.parameters()

    def check(self, graph: Graph) -> int:
        """Return streaming's patience with this network, or Decline where it would be stock's work."""
        like = next(t for group in self.terms for t in group)
        if not self.moved and not (self.steady and streaming.large(graph, self.kept, like, PATIENCE)):
            raise Decline("no Linear of it acts on more edges than there are nodes, and blocks of them would not pay")
        return 1 if self.moved else PATIENCE

    def in_passes(self, graph: Graph) -> bool:
        """Whether only a BatchNorm sees all edges, and they are so many that its statistics are a pass of their own."""
        like = next(t for group in self.terms for t in group)
        return not self.steady and norms.takes(graph, self.inner, max(self.kept // ARRAYS, 1), like)

    def run(self, graph: Graph, reduce: str) -> tuple[Tensor, How]:
        """One reduction (or "each") of all messages, and how it was made, or Decline."""
        patience = self.check(graph)
        row, col, on_edges = self.terms
        edge: Ends = on_edges
        function: Callable[..., Tensor] = self.program.function
        steady = self.steady
        shared: list[Tensor] = []
        if self.in_passes(graph):
            learned = self.parameters
            function, edge, shared = norms.with_statistics(
                graph, self.program.stage, self.inner, learned, row, col, edge
            )
            steady = True
        (out,), how = streaming.reduced(
            graph,
            function,
            row,
            col,
            edge,
            (reduce,),
            width=self.kept,
            parameters=self.parameters,
            modules=list(self.program.modules.values()),
            shared=shared,
            steady=steady,
            patience=patience,
        )
        what = "first Linear on nodes, the rest" if self.moved else "network"
        return out, How(f"{what} on edges, {how}", how.builds)


def check_value(name: str, value: Value, like: Tensor, num_edges: int) -> None:
    """Decline what is no plain matrix of nodes, or no vector or matrix of edges, of one type."""
    tensor = value.tensor
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise Decline(f"{name} is no plain tensor")
    if not tensor.is_floating_point() or tensor.dtype != like.dtype or tensor.device != like.device:
        raise Decline(f"{name} is {tensor.dtype} on {tensor.device}")
    if autocasts(tensor):
        raise Decline("autocast is on")
    if value.place == EDGE and (tensor.dim() not in (1, 2) or tensor.size(0) != num_edges):
        raise Decline(f"{name} has shape {list(tensor.shape)} for {num_edges} edges")
    if value.place != EDGE and tensor.dim() != 2:
        raise Decline(f"{name} has {tensor.dim()} dimensions before it is gathered")


def network(
    trace: Trace, calls: Sequence[fx.Node], output: fx.Node, owner: Any, leaves: Mapping[fx.Node, Value], graph: Graph
) -> Network:
    """The calls that lead from `leaves` to `output`, the first Linear of a network moved to the nodes, or Decline."""
    modules = _modules(owner, trace)
    if not above(output, leaves) >= set(calls):
        raise Decline("it computes something that it does not return")
    shapes: dict[fx.Node, Shape | None] = {node: tuple(v.tensor.shape[1:]) for node, v in leaves.items()}
    moved: dict[fx.Node, Moved] = {}
    kept, steady = 0, True
    for node in calls:
        if node.op == "call_module":
            module = modules[str(node.target)]
            chain = in_order(module)
            shapes[node], width = _through(chain, _row(node, shapes))
            kept, steady = kept + width, steady and _by_rows(module, chain)
            if (apart := _apart(node, module, leaves, shapes, graph)) is not None:
                moved[node] = apart
            elif _edits(chain):
                raise Decline(f"self.{node.target} edits its input in place")
        else:
            shapes[node] = shape_of(node, shapes)
            if shapes[node] is None:
                raise Decline(f"{name_of(node)}() of it may see more than one edge at a time")
    shape = shapes.get(output)
    assert shape is not None
    program = Program(calls, output, modules, leaves, moved)
    widths = [row for n in program.steps if n.op != "call_module" and (row := shapes[n])]
    return Network(program, shape, kept + program.width_of_nodes() + sum(width[0] for width in widths), steady)


def _modules(owner: Any, trace: Trace) -> dict[str, nn.Module]:
    """What the trace has taken for modules of its owner, or Decline."""
    modules = {}
    for name in sorted(trace.read):
        module = getattr(owner, name, None)
        if not isinstance(module, nn.Module):
            raise Decline(f"self.{name} is a {type(module).__name__}, not a module")
        modules[name] = module
    return modules


def _row(node: fx.Node, shapes: Mapping[fx.Node, Shape | None]) -> Shape:
    """The shape of a row that a module is given, or Decline."""
    shape = shapes[node.all_input_nodes[0]]
    if shape is None or len(shape) != 1:  # a Linear or a norm of [E] would see all edges
        raise Decline(f"self.{node.target} is given a number an edge, not a row")
    return shape


def above(output: fx.Node, leaves: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """Every node that `output` is computed from, down to the leaves."""
    result: set[fx.Node] = set()
    frontier = [output]
    while frontier:
        node = frontier.pop()
        if node not in result:
            result.add(node)
            frontier += [] if node in leaves else node.all_input_nodes
    return result


def _through(chain: Sequence[Any], shape: Shape) -> tuple[Shape, int]:
    """The shape of a row after a chain of modules, and the channels of all arrays on the way."""
    total = 0
    for module in chain:
        if type(module) in LINEAR:
            if isinstance(module.weight, nn.parameter.UninitializedParameter):
                raise Decline(LAZY)
            shape = (module.weight.size(0),)
        elif type(module) not in (*streaming.ROW_BY_ROW, *streaming.IN_EVAL, BatchNorm, LayerNorm):
            raise Decline(f"its network holds a {type(module).__name__}")
        total += shape[0]
    return shape, total


def _by_rows(module: Any, chain: Sequence[Any]) -> bool:
    """Whether a module may see edges in blocks. chain: what it runs."""
    if type(module) is MLP:
        return streaming.row_by_row(chain, random=True) and not hooked(module)
    return streaming.row_by_row([module], random=True)


def _edits(chain: Iterable[Any]) -> bool:
    """Whether a chain edits what it is given: something in place stands before the first Linear."""
    for module in chain:
        if type(module) in LINEAR:
            return False
        if getattr(module, "inplace", False):
            return True
    return False


def _apart(
    node: fx.Node, module: Any, leaves: Mapping[fx.Node, Value], shapes: Mapping[fx.Node, Shape | None], graph: Graph
) -> Moved | None:
    """The first Linear of a network whose input holds rows of nodes, taken apart; None where there is none."""
    linear, rest = first_linear(module)
    inner = node.args[0]
    assert isinstance(inner, fx.Node)
    parts: Any = inner.args[0] if inner not in leaves and kind_of(inner) == "cat" else [inner]
    widths = [shapes[part] for part in parts]
    combined = [_combination(part, leaves, graph.num_edges) for part in parts]
    if linear is None or not any(combined) or any(width is None or len(width) != 1 for width in widths):
        return None
    like = next(iter(leaves.values())).tensor
    weights = edges.split_weight(linear, like, *(width[0] for width in widths if width))
    moved = Moved(linear, rest, _edits(in_order(module)[1:]))
    for part, signs, weight in zip(parts, combined, weights, strict=True):
        if not signs:
            moved.given.append((part, weight))
        for leaf, sign in signs.items():
            signed = weight if sign > 0 else -weight
            moved.nodes[leaf] = moved.nodes[leaf] + signed if leaf in moved.nodes else signed
    moved.read = _read({leaf: leaves[leaf] for leaf in moved.nodes}, graph)
    return moved


def _read(ends: Mapping[fx.Node, Value], graph: Graph) -> dict[fx.Node, Tensor]:
    """What weights act on at the nodes: rows that no edge reads are 0 where one holds a NaN."""
    tensors = {leaf: end.tensor for leaf, end in ends.items()}
    if edges.no_infinity(*{id(t): t for t in tensors.values()}.values()):
        return tensors
    return {leaf: edges.only_read(graph, t, target=ends[leaf].place == TARGET) for leaf, t in tensors.items()}


def _combination(node: fx.Node, leaves: Mapping[fx.Node, Value], num_edges: int) -> dict[fx.Node, int]:
    """The rows of nodes that a part of the input is, or is the sum or difference of; nothing: it is made on edges.

    Many nodes, and more than edges, stay: a product an edge is then less work.
    """
    if node in leaves:
        value = leaves[node]
        return {node: 1} if value.place != EDGE and value.tensor.size(0) <= max(num_edges, FEW) else {}
    sign = {"add": 1, "sub": -1}.get(name_of(node), 0)
    ends: Any = node.args
    if not sign or len(ends) != 2 or not all(isinstance(end, fx.Node) and end in leaves for end in ends):
        return {}
    one, other = (_combination(end, leaves, num_edges) for end in ends)
    shapes = {tuple(leaves[end].tensor.shape[1:]) for end in ends}
    if not one or not other or ends[0] is ends[1] or len(shapes) != 1 or shapes.pop()[0] < WIDE:
        return {}
    return {ends[0]: 1, ends[1]: sign}
