"""What edges are left with once Linears have moved to the nodes (network.py): terms of both ends and their function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from stretto.layers.edges import norms, streaming
from stretto.layers.edges.norms import in_order
from stretto.ops.dense import dense, plus_dense
from stretto.ops.projections import projections

TARGET, SOURCE, EDGE = range(3)  # where a value lives: at the node that receives, at the one that sends, on the edge


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


class Program:
    """The calls that are left to edges, over what they read there: terms of nodes and edges, by place."""

    def __init__(
        self,
        calls: Sequence[fx.Node],
        output: fx.Node,
        modules: Mapping[str, Any],
        leaves: Mapping[fx.Node, Value],
        moved: Mapping[fx.Node, Moved],
    ) -> None:
        needed = _needed(output, leaves, moved)
        self.output, self.modules, self.moved = output, modules, moved
        self.steps = [node for node in calls if node in needed]
        self.terms: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        keys: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for node in (n for n in leaves if n in needed):
            self.terms[leaves[node].place].append(leaves[node].tensor)
            keys[leaves[node].place].append(node)
        self.sums: dict[fx.Node, list[Any]] = {}
        for node in (n for n in self.steps if n in moved):
            self.sums[node] = []
            for place, term in _node_terms(moved[node], leaves):
                self.terms[place].append(term)
                keys[place].append((node, place))
                self.sums[node].append((node, place))
        self.names = [*keys[TARGET], *keys[SOURCE], *keys[EDGE]]
        chains = {n: in_order(modules[str(n.target)]) for n in self.steps if n.op == "call_module"}
        self.inner = {n: chain[1:] if n in moved else chain for n, chain in chains.items()}

    def width_of_nodes(self) -> int:
        """Channels of all terms of nodes together."""
        return sum(t.size(1) if t.dim() > 1 else 1 for terms in self.terms[:EDGE] for t in terms)

    def given(self, node: fx.Node, known: dict[Any, Any]) -> Any:
        """What the modules of a call act on: the moved Linear's result, or the call's input."""
        if node not in self.moved:
            return known[node.args[0]]
        return _total(self.moved[node], [known[key] for key in self.sums[node]], known)

    def function(self, *ends: Tensor) -> Tensor:
        """The messages of these ends."""
        known: dict[Any, Any] = dict(zip(self.names, ends, strict=True))
        for node in self.steps:
            if node in self.moved:
                known[node] = self.moved[node].rest(self.given(node, known))
            else:
                known[node] = execute(node, known, self.modules)
        result: Tensor = known[self.output]
        return result

    def stage(self, until: Any, statistics: norms.Known) -> Callable[..., Tensor]:
        """The function up to a norm, with the statistics of those before it."""

        def part(*ends: Tensor) -> Any:
            known: dict[Any, Any] = dict(zip(self.names, ends, strict=True))
            for node in self.steps:
                if node not in self.inner:
                    known[node] = execute(node, known, self.modules)
                    continue
                known[node] = norms.run(self.inner[node], self.given(node, known), until, statistics)
                if any(module is until for module in self.inner[node]):
                    return known[node]
            return known[self.output]

        return part

    def parameters(self) -> list[Tensor]:
        """What the function has gradients for."""
        learned = streaming.parameters_of(module for chain in self.inner.values() for module in chain)
        learned += [weight for node in self.sums for _, weight in self.moved[node].given]
        return [p for p in learned if p.requires_grad]

    def in_turn(self) -> list[Any]:
        """The modules that act on edges, one after the other; none where somebody watches."""
        if any(norms.watched(self.modules[str(node.target)]) for node in self.inner):
            return []
        return [module for chain in self.inner.values() for module in chain]


def _needed(output: fx.Node, leaves: Mapping[fx.Node, Value], moved: Mapping[fx.Node, Moved]) -> set[fx.Node]:
    """The calls and leaves that edges read, with some Linears moved to the nodes."""
    needed, frontier = set[fx.Node](), [output]
    while frontier:
        node = frontier.pop()
        if node not in needed:
            needed.add(node)
            if node in moved:
                frontier += [part for part, _ in moved[node].given]
            elif node not in leaves:
                frontier += node.all_input_nodes
    return needed


def execute(node: fx.Node, known: Mapping[Any, Any], modules: Mapping[str, Any]) -> Any:
    """What a call gives for values that are known."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    if node.op == "call_module":
        return modules[str(node.target)](*args)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _node_terms(moved: Moved, leaves: Mapping[fx.Node, Value]) -> list[tuple[int, Tensor]]:
    """Terms u at the nodes that receive and v at those that send, as far as there are such; the bias is in the first.

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
    result = []
    for place, bias in zip(places, biases, strict=True):
        (x, weight), *others = maps[place].values()
        term = dense(x, weight, bias)
        for other, further in others:
            term = plus_dense(term, other, further)
        result.append((place, term))
    return result


def _total(moved: Moved, terms: Sequence[Tensor], known: Mapping[Any, Any]) -> Tensor:
    """u_i + v_j + e W_e', ready for what follows the Linear. -> [B, k]."""
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    for part, weight in moved.given:
        total = plus_dense(total, known[part], weight)
    alone = len(terms) == 1 and not moved.given
    return total.clone() if alone and moved.copied else total
