"""plan: the cheapest order of evaluation of a layer, forward and gradients together.

The forward order and the order of each gradient are chosen independently but priced together: what the forward pass
computes anyway is free to the gradients (at the price of keeping it).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stretto.compile import cost, normalise, powers
from stretto.compile.cost import Work
from stretto.compile.expr import (
    Expression,
    Leaf,
    MatMul,
    Node,
    Sizes,
    Sparse,
    Step,
    Transpose,
    children,
    gradient,
    shape,
)
from stretto.compile.normalise import Scales
from stretto.compile.rules import Alike, alike, combinations, forms
from stretto.compile.together import Groups, same_left, same_right
from stretto.machine.rates import Profile

MOST_PLANS = 32  # combinations of gradient orders; beyond it, gradients of equal shape take the same orientation


@dataclass(frozen=True)
class Request:
    """What is asked of a layer: the expression, whose gradients are wanted, which products are kept from earlier steps.

    hoisted: nodes already known (A X of constant X): free. scales: which sparse leaves are normalised, and fuses:
    whether the kernels apply that themselves. formed: of how many hops a power of A may be multiplied out; 0: none.
    """

    expression: Expression
    wanted: tuple[str, ...] = ()
    hoisted: tuple[Node, ...] = ()
    scales: Scales = ()
    fuses: bool = True
    formed: int = 0


@dataclass(frozen=True)
class Plan:
    """forward: the node to compute; gradients: leaf name -> node; kept: forward nodes that gradients read again."""

    forward: Node
    gradients: tuple[tuple[str, Node], ...] = ()
    kept: tuple[Node, ...] = ()
    hoisted: tuple[Node, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """How the plan reads, for report() and explain()."""
        text = str(self.forward)
        return text + "".join(f"; d{leaf} = {node}" for leaf, node in self.gradients)

    @functools.cached_property
    def together(self) -> Groups:
        """Forward products that share their left operand, by each of them."""
        return same_left(_computed((self.forward,), self.hoisted), self.forward)

    @functools.cached_property
    def gradients_together(self) -> Groups:
        """Gradients that share their right operand, by each of them."""
        return same_right(self.gradients)

    @functools.cached_property
    def read(self) -> frozenset[str]:
        """The leaves that gradients read, first ones or those of gradients themselves, where nothing is kept."""
        return frozenset(
            node.name for node in _computed(tuple(node for _, node in self.gradients), ()) if isinstance(node, Leaf)
        )

    @functools.cached_property
    def hoisted_forward(self) -> tuple[Node, ...]:
        """The hoisted nodes that the forward pass reads."""
        return _met((self.forward,), self.hoisted)

    @functools.cached_property
    def hoisted_backward(self) -> tuple[Node, ...]:
        """The hoisted nodes that the gradients read."""
        return _met(tuple(node for _, node in self.gradients), self.hoisted)

    def works(self, sizes: Sizes, value_bytes: int = 4) -> list[Work]:
        """Every kernel call of the plan, forward then gradients."""
        return cost.works_of(self.nodes(), sizes, value_bytes)

    def nodes(self) -> dict[Node, None]:
        """All nodes computed, each once."""
        return self._nodes

    @functools.cached_property
    def _nodes(self) -> dict[Node, None]:
        return _computed((self.forward, *(node for _, node in self.gradients)), self.hoisted)

    def seconds(self, prices: cost.Prices) -> float:
        """Predicted time."""
        return prices.of(self.nodes())

    def kept_bytes(self, sizes: Sizes, value_bytes: int = 4) -> int:
        """Bytes of intermediate values held from forward to backward."""
        return sum(sizes[r] * sizes[c] * value_bytes for r, c in (shape(node) for node in self.kept))


def _computed(roots: tuple[Node, ...], hoisted: tuple[Node, ...]) -> dict[Node, None]:
    """All nodes that the roots take to compute, each once, when the hoisted ones are known."""
    result: dict[Node, None] = {}
    for root in roots:
        result.update(_needed(root, hoisted))
    return result


@functools.lru_cache(maxsize=4096)
def _needed(root: Node, hoisted: tuple[Node, ...]) -> dict[Node, None]:
    """_computed of one root, which many plans share; not to be edited."""
    seen = cost.closure(root, dict.fromkeys(hoisted))
    for node in hoisted:
        seen.pop(node)
    return seen


def _met(roots: tuple[Node, ...], hoisted: tuple[Node, ...]) -> tuple[Node, ...]:
    """The hoisted nodes among the roots and the operands of what is computed for them."""
    read = {child for node in _computed(roots, hoisted) for child in children(node)}
    return tuple(node for node in hoisted if node in read or node in roots)


@functools.cache
def plans(request: Request) -> tuple[Plan, ...]:
    """All plans for a request, without those that can never be the best whatever the sizes."""
    wanted = [gradient(request.expression, leaf) for leaf in request.wanted]
    gradients = [(leaf, forms(each)) for leaf, each in zip(request.wanted, wanted, strict=True)]
    choices = _choices([options for _, options in gradients], [alike(each) for each in wanted])
    result: dict[Plan, None] = {}
    for forward in forms(request.expression):
        for chosen in choices:
            picked = tuple((leaf, node) for (leaf, _), node in zip(gradients, chosen, strict=True))
            result[Plan(forward, picked, hoisted=request.hoisted)] = None
    best = _undominated(tuple(result))
    as_powers = [_as_power(plan, request.formed) for plan in best] if request.formed else []
    hows = ways(request.fuses) if request.scales else (normalise.FUSED,)
    if hows != (normalise.FUSED,):
        normalised = [p for plan in best for how in hows for p in _lowered(plan, how, request)]
        best = _undominated(tuple(dict.fromkeys(normalised)))
    return tuple(map(with_kept, dict.fromkeys((*best, *as_powers))))


def _as_power(plan: Plan, hops: int) -> Plan:
    """The plan with the power of A multiplied out: what that saves is for its edges to tell, so none is dropped."""
    gradients = tuple((leaf, powers.formed(node, hops)) for leaf, node in plan.gradients)
    return Plan(powers.formed(plan.forward, hops), gradients, hoisted=plan.hoisted)


def _lowered(plan: Plan, how: str, request: Request) -> Iterator[Plan]:
    """The plan with its sparse leaves normalised in one way, for every placement of the scalings."""
    leaves = [leaf for leaf, _ in plan.gradients]
    roots = (plan.forward, *(node for _, node in plan.gradients))
    for forward, *gradients in normalise.lowered(roots, how, request.scales, plan.hoisted):
        yield Plan(forward, tuple(zip(leaves, gradients, strict=True)), hoisted=plan.hoisted)


@functools.cache
def ways(fuses: bool) -> tuple[str, ...]:
    """The ways to normalise that can be best on some input: by kernels that fuse it, where they do; else the others."""
    request = Request((), scales=(("A", True, True),))
    hop = Plan(MatMul(Sparse("A", "n", "m"), Leaf("X", "m", "i")))
    hows = (normalise.FUSED,) * fuses + (normalise.PRECOMPUTED, normalise.DYNAMIC)
    result = {plan: how for how in hows for plan in _lowered(hop, how, request)}
    return tuple(result[plan] for plan in _undominated(tuple(result)))


def _choices(options: list[tuple[Node, ...]], kinds: list[Alike]) -> list[tuple[Node, ...]]:
    result = combinations(options, kinds)
    if len(result) <= MOST_PLANS:
        return result
    groups = sorted({shape(o[0]) for o in options})
    return [
        tuple(o[ends[groups.index(shape(o[0]))]] for o in options)
        for ends in itertools.product((0, -1), repeat=len(groups))
    ]


def with_kept(plan: Plan) -> Plan:
    """The plan with the forward nodes its gradients read again."""
    forward = _computed((plan.forward,), plan.hoisted)
    backward = _computed(tuple(root for _, root in plan.gradients), plan.hoisted)
    needed = [node for node in backward if node in forward and not isinstance(node, (Leaf, Transpose))]
    inner: dict[Node, None] = {}
    for child in dict.fromkeys(child for node in needed for child in children(node)):
        cost.closure(child, inner)
    # Read by a gradient itself, not only as part of something that is kept.
    read = {child for parent in backward if parent not in forward for child in children(parent)}
    kept = tuple(node for node in needed if node not in inner or node in read)
    return Plan(plan.forward, plan.gradients, kept, plan.hoisted)


def _undominated(candidates: tuple[Plan, ...]) -> tuple[Plan, ...]:
    """Drop a plan whose work contains all of another's and more: no input can make it the better one."""
    bags = [_bag(plan) for plan in candidates]
    kept = []
    for i, plan in enumerate(candidates):
        worse = any(
            j != i and _contains(bags[i], bags[j]) and (bags[i] != bags[j] or j < i) for j in range(len(candidates))
        )
        if not worse:
            kept.append(plan)
    return tuple(kept)


def _bag(plan: Plan) -> dict[tuple[str, ...], int]:
    """How often each kind of product, by symbolic sizes, occurs."""
    bag: dict[tuple[str, ...], int] = {}
    for kind, nodes in Counter(map(cost.kind_of, plan.nodes())).items():
        for key, count in _counted(kind):
            bag[key] = bag.get(key, 0) + nodes * count
    return bag


@functools.cache
def _counted(kind: cost.Kind) -> tuple[tuple[tuple[str, ...], int], ...]:
    """What a node of a kind counts for."""
    if kind.type in (Leaf, Transpose):
        return ()
    values = ((("values", *kind.shape), 1),) if kind.form == "edges" else ()
    if kind.type is MatMul:
        if kind.inner:
            return ((("gemm", *sorted((*kind.shape, kind.inner))), 1),)
        return ((("scale" if kind.form is None else "spmm", *kind.shape), 1), *values)
    if kind.type is Step:
        return ((("spmm", *kind.shape), 1), (("Step", *kind.shape), 1), *values)
    return (((kind.type.__name__, *kind.shape), len(kind.added) or 1), *values)


def _contains(bag: dict[tuple[str, ...], int], other: dict[tuple[str, ...], int]) -> bool:
    return all(bag.get(key, 0) >= count for key, count in other.items())


@dataclass
class Ranking:
    """Plans, or orders (orders.py), with predicted seconds, cheapest first, and what was measured of them since."""

    predicted: list[tuple[float, Any]]
    measured: dict[Any, float] = field(default_factory=dict)

    @property
    def best(self) -> Any:
        return self.predicted[0][1]


def rank(request: Request, sizes: Sizes, value_bytes: int, profile: Profile) -> Ranking:
    """The plans of a request by predicted time on an input of these sizes."""
    prices = cost.Prices(sizes, value_bytes, profile)
    priced = [(plan.seconds(prices), plan) for plan in plans(request)]
    return Ranking(sorted(priced, key=lambda pair: pair[0]))
