"""Networks on edges that users write themselves: net(cat([x_i, x_j - x_i, e])) and what stands around it.

The first Linear acts on what comes from a node once a node, not once an edge: W [x_i, x_j, e] is u_i + v_j + W_e e. The
rest is computed on edges, in blocks once they are many (streaming.py), so that no array of all edges is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn.models import MLP

from stretto.graph import Graph
from stretto.kernels import autocasts
from stretto.layers import edges
from stretto.layers.base import LAZY, Decline, hooked
from stretto.layers.edges import norms, streaming
from stretto.layers.edges.norms import in_order
from stretto.layers.edges.streaming import How
from stretto.layers.edges.trace import Shape, Trace, kind_of, name_of, shape_of
from stretto.layers.gin import LINEAR, first_linear
from stretto.ops.dense import dense, plus_dense
from stretto.ops.edge_mlp import Ends
from stretto.ops.projections import projections

TARGET, SOURCE, EDGE = range(3)  # where a value lives: at the node that receives, at the one that sends, on the edge
# Channels from which on W (x_i - x_j) is taken as W x_i - W x_j. Narrower ones are coordinates: of two points close to
# each other and far from the origin, the difference has digits that the two products have lost.
WIDE = 8
FEW = 1024  # nodes on which a Linear costs nothing, however few the edges
ARRAYS = 4  # of about the same width that a network of two Linears keeps
PATIENCE = 4  # of networks with nothing to move: blocks then only add the work of making messages twice


@dataclass(frozen=True)
class Value:
    """A tensor [nodes or edges, ...] and where it lives."""

    place: int
    tensor: Tensor


@dataclass(eq=False)
class Moved:
    """A Linear of a concatenation, taken apart: weights of what nodes give, and of what edges give."""

    linear: Any
    rest: Callable[[Tensor], Tensor]
    copied: bool  # whether what follows would edit the sum in place where the sum is but one term
    nodes: dict[fx.Node, Tensor] = field(default_factory=dict)
    read: dict[fx.Node, Tensor] = field(default_factory=dict)  # what these weights act on
    given: list[tuple[fx.Node, Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class Network:
    """A function of edges, ready to run: its terms at each place, what it computes, and how much that keeps."""

    terms: tuple[list[Tensor], list[Tensor], list[Tensor]]
    function: Callable[..., Tensor]
    stage: norms.Stage
    modules: list[Any]  # all that it runs
    inner: list[Any]  # those that act on edges, one after the other; none where somebody watches
    shape: Shape
    kept: int  # channels an edge of all arrays together
    parameters: list[Tensor]
    steady: bool  # whether blocks of edges give what all edges at once give
    moved: bool  # whether a Linear acts on nodes

    def check(self, graph: Graph) -> int:
        """streaming's patience with this network, or Decline where it would be stock's work."""
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
        function, steady = self.function, self.steady
        shared: list[Tensor] = []
        if self.in_passes(graph):
            learned = self.parameters
            function, edge, shared = norms.with_statistics(graph, self.stage, self.inner, learned, row, col, edge)
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
            modules=self.modules,
            shared=shared,
            steady=steady,
            patience=patience,
        )
        what = "first Linear on nodes, the rest" if self.moved else "network"
        return out, How(f"{what} on edges, {how}", how.builds)


def check_value(name: str, value: Value, like: Tensor, num_edges: int) -> None:
    """Decline what is no plain matrix of nodes, or no vector or matrix of edges, of one type."""
    tensor = value.tensor
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
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
    modules = {name: getattr(owner, name, None) for name in sorted(trace.read)}
    for name, module in modules.items():
        if not isinstance(module, torch.nn.Module):
            raise Decline(f"self.{name} is a {type(module).__name__}, not a module")
    if not above(output, leaves) >= set(calls):
        raise Decline("it computes something that it does not return")
    shapes: dict[fx.Node, Shape | None] = {node: tuple(v.tensor.shape[1:]) for node, v in leaves.items()}
    moved: dict[fx.Node, Moved] = {}
    kept, steady = 0, True
    for node in calls:
        if node.op != "call_module":
            shapes[node] = shape_of(node, shapes)
            if shapes[node] is None:
                raise Decline(f"{name_of(node)}() of it may see more than one edge at a time")
        else:
            module, given = modules[str(node.target)], shapes[node.all_input_nodes[0]]
            if given is None or len(given) != 1:  # a Linear or a norm of [E] would see all edges
                raise Decline(f"self.{node.target} is given a number an edge, not a row")
            chain = in_order(module)
            shapes[node], width = _through(chain, given)
            kept, steady = kept + width, steady and _by_rows(module, chain)
            if (found := _apart(node, module, leaves, shapes, graph)) is not None:
                moved[node] = found
            elif _edits(chain):
                raise Decline(f"self.{node.target} edits its input in place")
    shape = shapes.get(output)
    assert shape is not None
    return _assembled(calls, output, modules, leaves, moved, shapes, shape, kept, steady)


def above(output: fx.Node, leaves: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """Every node that `output` is computed from, down to the leaves."""
    found: set[fx.Node] = set()
    frontier = [output]
    while frontier:
        node = frontier.pop()
        if node not in found:
            found.add(node)
            frontier += [] if node in leaves else node.all_input_nodes
    return found


def _through(chain: Sequence[Any], shape: Shape) -> tuple[Shape, int]:
    """The shape of a row after a chain of modules, and the channels of all arrays on the way."""
    total = 0
    for module in chain:
        if type(module) in LINEAR:
            if isinstance(module.weight, torch.nn.parameter.UninitializedParameter):
                raise Decline(LAZY)
            shape = (module.weight.size(0),)
        elif type(module) not in (*streaming.ROW_BY_ROW, *streaming.IN_EVAL, streaming.BatchNorm, streaming.LayerNorm):
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
    made = Moved(linear, rest, _edits(in_order(module)[1:]))
    for part, signs, weight in zip(parts, combined, weights, strict=True):
        if not signs:
            made.given.append((part, weight))
        for leaf, sign in signs.items():
            signed = weight if sign > 0 else -weight
            made.nodes[leaf] = made.nodes[leaf] + signed if leaf in made.nodes else signed
    made.read = {leaf: leaves[leaf].tensor for leaf in made.nodes}
    if not edges.no_infinity(*{id(t): t for t in made.read.values()}.values()):
        targets = {leaf: leaves[leaf].place == TARGET for leaf in made.nodes}
        made.read = {leaf: edges.only_read(graph, t, target=targets[leaf]) for leaf, t in made.read.items()}
    return made


def _combination(node: fx.Node, leaves: Mapping[fx.Node, Value], num_edges: int) -> dict[fx.Node, int]:
    """The rows of nodes that a part of the input is, or is the sum or difference of; nothing: it is made on edges.

    Many nodes, and more than edges, stay: a product an edge is then less work.
    """
    if node in leaves:
        found = leaves[node]
        return {node: 1} if found.place != EDGE and found.tensor.size(0) <= max(num_edges, FEW) else {}
    sign = {"add": 1, "sub": -1}.get(name_of(node), 0)
    ends: Any = node.args
    if not sign or len(ends) != 2 or not all(isinstance(end, fx.Node) and end in leaves for end in ends):
        return {}
    one, other = (_combination(end, leaves, num_edges) for end in ends)
    shapes = {tuple(leaves[end].tensor.shape[1:]) for end in ends}
    if not one or not other or ends[0] is ends[1] or len(shapes) != 1 or shapes.pop()[0] < WIDE:
        return {}
    return {ends[0]: 1, ends[1]: sign}


def _assembled(
    calls: Sequence[fx.Node],
    output: fx.Node,
    modules: Mapping[str, Any],
    leaves: Mapping[fx.Node, Value],
    moved: Mapping[fx.Node, Moved],
    shapes: Mapping[fx.Node, Shape | None],
    shape: Shape,
    kept: int,
    steady: bool,
) -> Network:
    """The calls that are left to edges, over what they read there."""
    needed, frontier = set[fx.Node](), [output]
    while frontier:
        node = frontier.pop()
        if node not in needed:
            needed.add(node)
            if node in moved:
                frontier += [part for part, _ in moved[node].given]
            elif node not in leaves:
                frontier += node.all_input_nodes
    terms: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    keys: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for node in (n for n in leaves if n in needed):
        terms[leaves[node].place].append(leaves[node].tensor)
        keys[leaves[node].place].append(node)
    steps = [node for node in calls if node in needed]
    chains = [(n, in_order(modules[str(n.target)])) for n in steps if n.op == "call_module"]
    parameters = streaming.parameters_of(m for n, chain in chains for m in (chain[1:] if n in moved else chain))
    sums: dict[fx.Node, list[Any]] = {}
    for node in (n for n in steps if n in moved):
        sums[node] = []
        for place, term in _node_terms(moved[node], leaves):
            terms[place].append(term)
            keys[place].append((node, place))
            sums[node].append((node, place))
        parameters += [weight for _, weight in moved[node].given]
    names = [*keys[TARGET], *keys[SOURCE], *keys[EDGE]]
    widths = [row for n in steps if n.op != "call_module" and (row := shapes[n])]
    kept += sum(t.size(1) if t.dim() > 1 else 1 for group in terms[:EDGE] for t in group) + sum(w[0] for w in widths)

    def function(*ends: Tensor) -> Tensor:
        known: dict[Any, Any] = dict(zip(names, ends, strict=True))
        for node in steps:
            if node in moved:
                total = _total(moved[node], [known[key] for key in sums[node]], known)
                known[node] = moved[node].rest(total)
                continue
            known[node] = execute(node, known, modules)
        return known[output]

    inner = {node: chain[1:] if node in moved else chain for node, chain in chains}

    def stage(until: Any, statistics: norms.Known) -> Callable[..., Tensor]:
        def part(*ends: Tensor) -> Tensor:
            known: dict[Any, Any] = dict(zip(names, ends, strict=True))
            for node in steps:
                if node not in inner:
                    known[node] = execute(node, known, modules)
                    continue
                given = (
                    _total(moved[node], [known[key] for key in sums[node]], known)
                    if node in moved
                    else known[node.args[0]]
                )
                known[node] = norms.run(inner[node], given, until, statistics)
                if any(module is until for module in inner[node]):
                    return known[node]
            return known[output]

        return part

    watched = any(norms.watched(modules[str(node.target)]) for node in inner)
    flat = [] if watched else [module for node in steps if node in inner for module in inner[node]]
    parameters = [p for p in parameters if p.requires_grad]
    return Network(terms, function, stage, list(modules.values()), flat, shape, kept, parameters, steady, bool(moved))


def execute(node: fx.Node, known: Mapping[Any, Any], modules: Mapping[str, Any]) -> Any:
    """What a call gives for values that are known."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    if node.op == "call_module":
        return modules[str(node.target)](*args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _node_terms(moved: Moved, leaves: Mapping[fx.Node, Value]) -> list[tuple[int, Tensor]]:
    """u at the nodes that receive and v at those that send, as far as there are such; the bias is in the first.

    Both from one pass over x, where x is all that either is made of.
    """
    maps: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # place -> id of x -> (x, weight)
    for node, weight in moved.nodes.items():
        x = moved.read[node]
        here = maps.setdefault(leaves[node].place, {})
        known = here.get(id(x))
        here[id(x)] = (x, weight if known is None else known[1] + weight)
    places = sorted(maps)
    first = [next(iter(maps[place].values())) for place in places]
    biases = [moved.linear.bias if at == 0 else None for at in range(len(places))]
    if all(len(maps[place]) == 1 for place in places) and len({id(x) for x, _ in first}) == 1:
        made = projections(first[0][0], [(weight, bias) for (_, weight), bias in zip(first, biases, strict=True)])
        return list(zip(places, made, strict=True))
    found = []
    for place, bias in zip(places, biases, strict=True):
        (x, weight), *others = maps[place].values()
        term = dense(x, weight, bias)
        for other, further in others:
            term = plus_dense(term, other, further)
        found.append((place, term))
    return found


def _total(moved: Moved, terms: Sequence[Tensor], known: Mapping[Any, Any]) -> Tensor:
    """u_i + v_j + e W_e', ready for what follows the Linear. -> [B, k]"""
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    for part, weight in moved.given:
        total = plus_dense(total, known[part], weight)
    alone = len(terms) == 1 and not moved.given
    return total.clone() if alone and moved.copied else total
