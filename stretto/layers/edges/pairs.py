"""Edges that come in both directions with the same features (a bond and its length): what a network makes of features
is made once for each pair, on half the edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.graph.derived import lasting
from stretto.kernels import Csr, native, on_host, pairs
from stretto.kernels.looks import settled
from stretto.layers import adjacency
from stretto.ops.edge_packed import Pairs

MANY = 1 << 9  # edges from which on looking for pairs costs less than it saves


@dataclass
class Features:
    """Features of edges, or of pairs of edges: [E or P, d] each."""

    pairs: Pairs | None
    attr: Tensor
    length: Tensor | None
    unsearched: bool = False  # whether pairs were not looked for, since that would cost more than one use saves
    kept: dict[Any, Any] = field(default_factory=dict)  # what a layer derives from them

    @property
    def data(self) -> Tensor:
        """The features with one more column of ones."""
        if "data" not in self.kept:
            with lasting():  # what an evaluation makes, training saves for backward
                self.kept["data"] = torch.cat([self.attr, self.attr.new_ones(self.attr.size(0), 1)], dim=1)
        result: Tensor = self.kept["data"]
        return result


def features_of(graph: Graph, attr: Tensor, length: Tensor | None = None, *, shared: bool = True) -> Features | None:
    """What a network on edges is to see: one row a pair where both directions of every edge are alike; kept while attr
    and length stay the same, since all layers of a model get the same. shared: whether the network treats each row by
    itself. None where gradients flow to the features: each edge then has its own.

    Where edges are sorted, as datasets of molecules have them, pairs are found at once; else they are sorted, when the
    same features come a second time.
    """
    learned = [t for t in (attr, length) if t is not None and settled(t) is None and t.requires_grad]
    if learned and torch.is_grad_enabled():
        return None
    look = shared and graph.num_edges >= MANY and graph.num_rows == graph.num_cols

    def make() -> Features:
        quickly = look and _in_place(graph)
        result = _shared(graph, attr, length, _pairs_in_place) if quickly else None
        if result is not None:
            return result
        # Aliases: what is kept goes when the tensor does.
        return Features(None, attr.detach(), None if length is None else length.detach(), look and not quickly)

    if length is None:
        kept: Features = adjacency.kept_for(graph, ("features", look), attr, make)
    else:
        inner: Any = adjacency.kept_for(graph, ("features by length", look), attr, _Holder)
        kept = adjacency.kept_for(inner, "length", length, make)
    if not kept.unsearched:
        return kept
    if "seen" not in kept.kept:
        kept.kept["seen"] = True
        return kept
    kept.unsearched = False
    with lasting(), torch.no_grad():
        better = _shared(graph, attr, length, _pairs)
    if better is not None:
        kept.pairs, kept.attr, kept.length, kept.kept = better.pairs, better.attr, better.length, {}
    return kept


def _shared(graph: Graph, attr: Tensor, length: Tensor | None, search: Any) -> Features | None:
    """Features of pairs, if there are pairs and their two edges are alike."""
    result: Any = graph.derived(("pairs", search), lambda: search(graph))
    if result is None:
        return None
    first, second, ways = result
    if not on_host(attr) or native.library() is None:
        mine, far = attr[first], None if length is None else length[first]
        alike = torch.equal(mine, attr[second]) and (far is None or torch.equal(far, length[second]))  # type: ignore[index]
        return Features(ways, mine, far) if alike else None
    far = None if length is None else pairs.alike(length.detach(), first, second)
    if length is not None and far is None:
        return None
    same = pairs.alike(attr.detach(), first, second)
    return None if same is None else Features(ways, same, far)


def _in_place(graph: Graph) -> bool:
    """Whether the graph and its transpose have their entries in the same places, on the CPU."""
    return on_host(graph.csr.rowptr) and native.library() is not None and _mirror(graph).rowptr is graph.csr.rowptr


def _mirror(graph: Graph) -> Csr:
    """The transpose's arrays; those that came with a mini-batch without a Graph around them, which costs as much."""
    return graph.T.csr if graph._transposed is None else graph._transposed


def _pairs_in_place(graph: Graph) -> tuple[Tensor, Tensor, Pairs] | None:
    """_pairs() where the entries of the transpose stand where those of their reverses do."""
    csr, came = graph.edge_csr, graph._transposed
    reverse = graph.T.edge_csr.edge_id if came is None else came.edge_id
    if csr.col is None or reverse is None:
        return None
    number, first, second, ends = pairs.find(csr, reverse)
    return first, second, Pairs(graph, number, ends, symmetric=True)


class _Holder:
    """What is kept for one tensor, by another."""

    def __init__(self) -> None:
        self._derived: dict[Any, Any] = {}


def _pairs(graph: Graph) -> tuple[Tensor, Tensor, Pairs] | None:
    """(an edge, its reverse) of every pair, and the pairs; None unless each edge has exactly one reverse."""
    source, target = graph.edge_index
    n = max(graph.num_rows, 1)
    key, back = source * n + target, target * n + source
    ordered, place = key.sort()
    if bool((ordered[1:] == ordered[:-1]).any()):
        return None
    at = torch.searchsorted(ordered, back).clamp(max=ordered.numel() - 1)
    if not torch.equal(ordered[at], back):
        return None
    reverse = place[at]
    first = (source <= target).nonzero().view(-1)
    number = torch.empty_like(source)
    number[first] = torch.arange(first.numel(), device=first.device)
    second = reverse[first]
    number[second] = number[first]
    return first, second, Pairs(graph, number, graph.edge_index[:, first])
