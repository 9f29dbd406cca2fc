"""What the tests feed to layers: node features, edges in every format, weights, attributes, types; and how they read
the results and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from tests.graphs import ZOO
from tests.layers.spec import DIM, IN, RELATIONS, Spec


@dataclass(frozen=True)
class Data:
    """The arguments of one call: positional (a list of tensors, pairs and what else), keywords, and what is learned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    learned: tuple[int, ...] = (0,)

    def to(self, dtype: torch.dtype) -> Data:
        def convert(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(convert, value))
            if isinstance(value, dict):
                return {key: convert(part) for key, part in value.items()}
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return replace(self, args=tuple(map(convert, self.args)))


def gradients_of(conv: Any, data: Data) -> list[Tensor]:
    """The result (or results) and the gradients of the learned arguments and of every parameter."""
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(leaf, value))
        if isinstance(value, dict):
            return {key: leaf(part) for key, part in value.items()}
        if isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided:
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1]
        return value

    args = [leaf(a) if i in data.learned else a for i, a in enumerate(data.args)]
    found = conv(*args, **data.kwargs)
    results = [t for t in flat(found) if t.is_floating_point()]
    leaves += [p for p in conv.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(3)
    total = sum((r * torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype)).sum() for r in results)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)  # type: ignore[arg-type]
    zeros = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, grads, strict=True)]
    return [r.detach() for r in results] + zeros


def flat(found: Any) -> list[Tensor]:
    """The tensors of a layer's result."""
    if isinstance(found, Tensor):
        return [found] if found.layout == torch.strided else [found.to_dense()]
    parts = found.values() if isinstance(found, dict) else found
    return [t for part in parts if part is not None for t in flat(part)]


def _features(n: int, dtype: torch.dtype, width: int = IN, seed: int = 0) -> Tensor:
    """One row is all zeros: what becomes of it ties with the zero that torch's scatter starts from. Not two: whether
    the messages of equal rows are equal to the last bit is for the matrix product to say."""
    values = torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    values[1:2] = 0
    return values


def _third(edge: str, edge_index: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """What stands behind edge_index: nothing, attributes or types."""
    e = edge_index.size(1)
    if edge == "attr":
        return (_features(e, dtype, DIM, 5),)
    if edge == "type":
        return (torch.randint(RELATIONS, (e,), generator=torch.Generator().manual_seed(6)),)
    return ()


def _call(graph: str, spec: Spec, dtype: torch.dtype, change: Callable[[Tensor, int, int], Any] | None = None) -> Data:
    edge_index, (m, n) = ZOO[graph]()
    edges = edge_index if change is None else change(edge_index, m, n)
    third = _third(spec.edge, edge_index, dtype)
    learned = (0, 2) if spec.edge == "attr" else (0,)
    if spec.initial:
        return Data((_features(m, dtype), _features(m, dtype, IN, 8), edges, *third), {}, (0, 1))
    return Data((_features(m, dtype, spec.width), edges, *third), {}, learned)


def plain(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return _call(graph, spec, dtype)


def edge_index_class(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return _call(graph, spec, dtype, lambda e, m, n: EdgeIndex(e, sparse_size=(m, n)))


def _coalesced(edge_index: Tensor) -> Tensor:
    """Sorted by destination, no duplicates: what a sparse matrix can hold."""
    return edge_index.flip(0).unique(dim=1).flip(0) if edge_index.numel() else edge_index


def _coo(edge_index: Tensor, m: int, n: int, values: Tensor | None, dtype: torch.dtype) -> Tensor:
    pairs = _coalesced(edge_index)
    weights = torch.ones(pairs.size(1), dtype=dtype) if values is None else values[: pairs.size(1)]
    return torch.sparse_coo_tensor(pairs.flip(0), weights, (n, m)).coalesce()


def _weights(e: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(e, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype) + 0.1


def _sparse(values: bool, csr: bool) -> Callable[[str, Spec, torch.dtype], Data]:
    def make(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
        def change(edge_index: Tensor, m: int, n: int) -> Tensor:
            adj = _coo(edge_index, m, n, _weights(edge_index.size(1), dtype) if values else None, dtype)
            return adj.to_sparse_csr() if csr else adj

        return _call(graph, replace(spec, edge=""), dtype, change)

    return make


def weight(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    data = _call(graph, replace(spec, edge=""), dtype)
    return replace(data, args=(*data.args, _weights(ZOO[graph]()[0].size(1), dtype)))


def weight_grad(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    data = weight(graph, spec, dtype)
    return replace(data, learned=(*data.learned, len(data.args) - 1))


def pair(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    data = _call(graph, spec, dtype)
    n = ZOO[graph]()[1][1]
    return replace(data, args=((data.args[0], _features(n, dtype, spec.pair_width, 7)), *data.args[1:]))


def pair_none(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    data = _call(graph, spec, dtype)
    return replace(data, args=((data.args[0], None), *data.args[1:]))


def size(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return replace(pair_none(graph, spec, dtype), kwargs={"size": ZOO[graph]()[1]})


def typed(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return _call(graph, replace(spec, edge="type"), dtype)


def numbers(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """Nodes as rows of an embedding instead of features."""
    data = _call(graph, spec, dtype)
    rows = torch.randint(IN, (data.args[0].size(0),), generator=torch.Generator().manual_seed(9))
    return replace(data, args=(rows, *data.args[1:]))


def no_numbers(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """x is None: as many nodes as input channels."""
    data = _call(graph, spec, dtype)
    return replace(data, args=(None, data.args[1] % IN, *data.args[2:]))


def weight_hyper(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    edge_index, _ = ZOO[graph]()
    count = int(edge_index[1].max()) + 1 if edge_index.numel() else 0
    data = _call(graph, spec, dtype)
    return replace(data, args=(*data.args, _weights(count, dtype)), learned=(0, 2))


def hyper_attr(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """No weights, but features of hyperedges."""
    edge_index, _ = ZOO[graph]()
    count = int(edge_index[1].max()) + 1 if edge_index.numel() else 0
    data = _call(graph, spec, dtype)
    return replace(data, args=(*data.args, None, _features(count, dtype, IN, 5)), learned=(0, 3))


def no_attr(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return _call(graph, replace(spec, edge=""), dtype)


def attr_vector(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """One attribute per edge, as a vector."""
    return weight_grad(graph, replace(spec, edge=""), dtype)


def weights_wanted(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return replace(_call(graph, spec, dtype), kwargs={"return_attention_weights": True})


def meta(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """Features of nodes, of edges and of two graphs, and which graph a node is of."""
    data = _call(graph, replace(spec, edge="attr"), dtype)
    batch = torch.arange(data.args[0].size(0)) % 2
    return replace(data, args=(*data.args, _features(2, dtype, 4, 8), batch), learned=(0, 2, 3))


def hetero(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """Two types of nodes, three relations between them."""
    edge_index, (m, n) = ZOO[graph]()
    x = {"a": _features(m, dtype), "b": _features(n, dtype, 3, 7)}
    relations = {("a", "to", "b"): edge_index, ("b", "back", "a"): edge_index.flip(0)}
    relations["b", "among", "b"] = edge_index % max(n, 1) if n else edge_index[:, :0]
    if spec.takes[-1] == "hetero_twice":
        relations["a", "again", "b"] = edge_index.clone()
    return Data((x, relations), {}, (0,))


def hetero_twice(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """Relations by keyword, and one whose edges are missing."""
    data = hetero(graph, spec, dtype)
    relations = {kind: edges for kind, edges in data.args[1].items() if kind[1] != "back"}
    return replace(data, args=data.args[:1], kwargs={"edge_index_dict": relations})


def hetero_one_way(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """One relation only: the other type receives nothing."""
    data = hetero(graph, spec, dtype)
    return replace(data, args=(data.args[0], {("a", "to", "b"): data.args[1]["a", "to", "b"]}))


def semantic(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return replace(hetero(graph, spec, dtype), kwargs={"return_semantic_attention_weights": True})


def lengths(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    """A length for each edge, the same in both directions, and features made of it."""
    data = _call(graph, replace(spec, edge=""), dtype)
    low, high = data.args[1].sort(dim=0).values
    length = (1 + torch.sin(3.0 * low + 7.0 * high)).to(dtype)
    attr = torch.sin(length.view(-1, 1) * torch.arange(1, DIM + 1, dtype=dtype))
    return replace(data, args=(*data.args, length, attr))


def lengths_grad(graph: str, spec: Spec, dtype: torch.dtype) -> Data:
    return replace(lengths(graph, spec, dtype), learned=(0, 2, 3))


INPUTS: dict[str, Callable[[str, Spec, torch.dtype], Data]] = {
    "plain": plain,
    "edge_index_class": edge_index_class,
    "coo": _sparse(False, False),
    "csr": _sparse(False, True),
    "coo_values": _sparse(True, False),
    "csr_values": _sparse(True, True),
    "weight": weight,
    "weight_grad": weight_grad,
    "pair": pair,
    "pair_none": pair_none,
    "size": size,
    "typed": typed,
    "numbers": numbers,
    "no_numbers": no_numbers,
    "weight_hyper": weight_hyper,
    "hyper_attr": hyper_attr,
    "no_attr": no_attr,
    "attr_vector": attr_vector,
    "weights_wanted": weights_wanted,
    "lengths": lengths,
    "lengths_grad": lengths_grad,
    "meta": meta,
    "hetero": hetero,
    "hetero_one_way": hetero_one_way,
    "hetero_twice": hetero_twice,
    "semantic": semantic,
}
