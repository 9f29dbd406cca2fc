"""Several products that make up one result, as one plan: sum_r A_r X_r W_r' + X V' + b.

Each product keeps the order of evaluation that is best for it alone; what they share is computed once (an X they have
in common, G' X for every weight that acts on X), and sums are accumulated by the kernels that make their terms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from stretto.compile.adjacency import Adjacency
from stretto.compile.choose import CHOOSER, signature
from stretto.compile.constants import keeper
from stretto.compile.execute import Call
from stretto.compile.expr import Add, Diagonal, Leaf, Node, Sparse, Term, Transpose, mapped
from stretto.compile.layer import run
from stretto.compile.plan import Plan, Request, plans, with_kept

A, X, W = Sparse("A", "n", "m"), Leaf("X", "m", "i"), Leaf("W", "o", "i")
PRODUCT = (Term((A, X, Transpose(W))),)
ROOT = (Term((Leaf("X", "n", "i"), Transpose(W))),)


@dataclass(frozen=True)
class Product:
    """adj x weight', or x weight' where there is no adj. x [m, i], weight [o, i] -> [n, o]."""

    x: Tensor
    weight: Tensor
    adj: Adjacency | None = None


def joint(products: Sequence[Product], bias: Tensor | None = None) -> tuple[Tensor, str]:
    """The sum of all products, plus bias in every row; and how it reads. -> [n, o]."""
    chosen, tensors, sparse = [], {}, {}
    sources: dict[int, str] = {}
    for number, product in enumerate(products):
        place = sources.setdefault(id(product.x), str(len(sources)))
        tensors["X" + place], tensors[f"W{number}"] = product.x, product.weight
        if product.adj is not None:
            sparse[f"A{number}"] = product.adj
        chosen.append((_alone(product), place))
    plan = _combined(tuple(chosen))
    names, arguments = tuple(tensors), tuple(tensors.values())
    if bias is not None:
        names, arguments = (*names, "bias"), (*arguments, bias)
    keep = keeper(tensors, sparse, {}) if plan.hoisted else None
    return run(Call(plan, names, sparse, keep=keep), arguments), plan.name


def _alone(product: Product) -> Plan:
    """The best plan of one product by itself."""
    tensors = {"X": product.x, "W": product.weight}
    if product.adj is None:
        wanted = tuple(name for name, t in tensors.items() if t.requires_grad)
        return plans(Request(ROOT, wanted))[0]
    key, request, sizes = signature(PRODUCT, tensors, {"A": product.adj})
    plan, decision = CHOOSER.pick(key, request, sizes, product.x)
    return decision.candidates[0] if decision.trying else plan


@functools.lru_cache(maxsize=1024)
def _combined(chosen: tuple[tuple[Plan, str], ...]) -> Plan:
    """Plans of single products, told apart by number (weights, adjacencies) and by what they read, as one plan."""
    terms: list[Node] = []
    gradients: dict[str, list[Node]] = {}
    hoisted: list[Node] = []
    for number, (plan, place) in enumerate(chosen):
        names = {"A": f"A{number}", "S": f"S{number}", "T": f"T{number}", "W": f"W{number}", "X": "X" + place}
        terms.append(_renamed(plan.forward, names))
        hoisted += [_renamed(node, names) for node in plan.hoisted]
        for leaf, node in plan.gradients:
            gradients.setdefault(names[leaf], []).append(_renamed(node, names))
    summed = tuple((leaf, _sum(nodes)) for leaf, nodes in gradients.items())
    return with_kept(Plan(_sum(terms), summed, hoisted=tuple(dict.fromkeys(hoisted))))


def _sum(nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else Add(tuple(nodes))


def _renamed(part: Any, names: dict[str, str]) -> Any:
    """A node with other names for its leaves and matrices; sizes are named after the leaf they belong to."""
    if isinstance(part, (Leaf, Sparse, Diagonal)):
        return replace(part, name=names.get(part.name, part.name))
    return mapped(part, lambda inner: _renamed(inner, names))
