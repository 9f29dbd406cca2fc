"""edge_layer: a whole layer with edge features as one step of autograd.

    before(x_j) and edge(attr)  ->  messages, summed  ->  after

before, edge and after are chains of Linears and activations. On mini-batches of small graphs the calls between a
layer's products cost as much as the products; here a layer is one call forward and one backward, nothing is checked in
between, and what is made on the way is overwritten in place once it has been used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.kernels import backend, cpu_chain, cpu_edge, reference_chain, reference_edge
from stretto.kernels.cpu_chain import Stage
from stretto.memory import pool
from stretto.ops import library
from stretto.ops.edge_packed import Pairs, _apart, _of
from stretto.ops.kernel import differentiable, through

COUNTS = {"dense": 1, "relu": 0, "softplus": 0, "scale": 1}  # tensors of a stage, but for a Linear's bias
MOST = 1 << 23  # values in an array from which on memory decides: messages are then made in blocks


@dataclass(frozen=True)
class Chain:
    """Linears and activations one after the other, as kernels/cpu_chain.py takes them. tensors: their parameters."""

    stages: tuple[Stage, ...] = ()
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Form:
    """How messages are made of before(x) and edge(attr): act(x_j + e), x_j * e ("product"), or gates ("gate").

    root: how often x_i is added to the sum. pairs: attr has one row for both directions of an edge.
    """

    act: str = "identity"
    root: float | None = None
    pairs: Pairs | None = None


def takes(graph: Graph, x: Tensor, attr: Tensor, *chains: Chain) -> bool:
    """Whether such a call is small and plain enough to be one step."""
    widths = [t.size(0) for chain in chains for t in chain.tensors if t.dim() == 2]
    widest = max(*widths, x.size(1), attr.size(1))
    if widest > cpu_chain.WIDEST or max(x.size(0), attr.size(0)) * widest >= MOST:
        return False
    if x.dtype not in (torch.float32, torch.float64) or attr.dtype != x.dtype or not x.numel() or not attr.numel():
        return False
    if library.traced(x) or library.traced(attr) or not backend(graph.device).native:
        return False
    return all(
        t.dtype == x.dtype and t.device == x.device and t.is_contiguous() for chain in chains for t in chain.tensors
    )


def width_after(chain: Chain, width: int) -> int | None:
    """Width of what a chain makes of rows of this width; None: one of its Linears does not take what comes."""
    at = 0
    for name, has_bias in chain.stages:
        if name == "dense":
            weight = chain.tensors[at]
            if weight.dim() != 2 or weight.size(1) != width:
                return None
            if has_bias and chain.tensors[at + 1].shape != weight.shape[:1]:
                return None
            width = weight.size(0)
        at += COUNTS[name] + (name == "dense" and has_bias)
    return width


def edge_layer(graph: Graph, x: Tensor, attr: Tensor, before: Chain, edge: Chain, after: Chain, form: Form) -> Tensor:
    """after(sum of messages). x [n, i], attr [E or P, d] -> [n, o], where `takes` agrees."""
    plan = (graph, (before.stages, edge.stages, after.stages), form)
    tensors = (x, attr, *before.tensors, *edge.tensors, *after.tensors)
    out: Tensor = _edge_layer(plan, *tensors)
    return out


def gated_layer(
    graph: Graph,
    x: Tensor,
    attr: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor, ...],
    root: float | None,
) -> Tensor:
    """Sum of sigmoid(F [x_i, x_j, e]) * softplus(S [x_i, x_j, e]) + root * x_i. Both weights [k, 2 i + d]; biases: of
    both, or none. x [n, i], attr [E, d] -> [n, k], where `takes` agrees."""
    plan = (graph, ((("dense", 0),), (("dense", int(bool(biases))),), ()), Form("gate", root))
    tensors = (x, attr, *weights, *biases)
    out: Tensor = _edge_layer(plan, *tensors)
    return out


def _packed(plan: Any, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors as the chains want them: of gates one weight for nodes (own ends, then others) and one for edges."""
    if plan[2].act != "gate":
        return tensors
    x, attr, first, second, *biases = tensors
    i = x.size(1)
    ends = [w[:, at : at + i] for at in (0, i) for w in (first, second)]
    joined = [torch.cat(biases)] if biases else []
    return x, attr, torch.cat(ends), torch.cat([first[:, 2 * i :], second[:, 2 * i :]]), *joined


def _unpacked(plan: Any, gradients: Sequence[Any]) -> Sequence[Any]:
    """Gradients of the tensors from those of the packed ones."""
    if plan[2].act != "gate":
        return gradients
    dx, dattr, nodes, edges, *joined = gradients
    weights: Any = (None, None)
    if nodes is not None:
        own, own2, other, other2 = nodes.chunk(4)
        edge, edge2 = edges.chunk(2)
        weights = torch.cat([own, other, edge], dim=1), torch.cat([own2, other2, edge2], dim=1)
    biases: Any = () if not joined else (None, None) if joined[0] is None else joined[0].chunk(2)
    return dx, dattr, *weights, *biases


def _packed_needs(plan: Any, needs: Sequence[bool]) -> Sequence[bool]:
    if plan[2].act != "gate":
        return needs
    some = any(needs[2:4])
    return *needs[:2], some, some, *([any(needs[4:])] if len(needs) > 4 else [])


def _parts(plan: Any, parameters: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The parameters (or their gradients) of each chain."""
    at = 0
    for stages in plan[1]:
        count = sum(COUNTS[name] + (name == "dense" and detail) for name, detail in stages)
        yield parameters[at : at + count]
        at += count


# ---- messages ----


def _terms(form: Form, h: Tensor, e: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[str, str]]:
    """The six terms of edge_messages, and its two activations."""
    if form.act == "gate":
        return _apart(h, e), ("sigmoid", "softplus")
    if form.act == "product":
        return _of(h, None, e), ("identity", "identity")
    return _of(h, e, None), (form.act, "one")


def _forward(plan: Any, tensors: Sequence[Tensor], kept: list[Tensor]) -> Tensor:
    """The result; `kept` gets before(x), edge(attr), and what the three chains keep."""
    graph, (before, edge, after), form = plan
    x, attr, *parameters = tensors
    parts = list(_parts(plan, parameters))
    chains: list[Tensor] = []
    h = cpu_chain.chain(before, x, parts[0], chains).contiguous()
    e = cpu_chain.chain(edge, attr, parts[1], chains)
    terms, acts = _terms(form, h, e)
    csr = graph.edge_csr if form.pairs is None else form.pairs.csr
    root = None if form.root is None else (x.contiguous() if form.act == "gate" else h, form.root)
    out = cpu_edge.edge_messages(csr, terms, acts, root=root)
    out = cpu_chain.chain(after, out, parts[2], chains)
    kept += [h, e, *chains]
    return out


def _backward(plan: Any, tensors: Sequence[Tensor], kept: Sequence[Tensor], grad: Tensor, needs: Any) -> Any:
    graph, (before, edge, after), form = plan
    parts, wanted = list(_parts(plan, tensors[2:])), list(_parts(plan, needs[2:]))
    h, e, *chains = kept
    cuts = len(before), len(before) + len(edge)
    need_h, need_e = needs[0] or any(wanted[0]), needs[1] or any(wanted[1])
    dx = dattr = None
    of_before: Any = [None] * len(parts[0])
    of_edge: Any = [None] * len(parts[1])
    g, of_after = cpu_chain.chain_grad(after, chains[cuts[1] :], parts[2], grad, wanted[2], need_h or need_e)
    if g is not None:
        g = g.contiguous()
        dh, de = _messages_back(graph, form, h, e, g, need_h, need_e)
        if de is not None:
            dattr, of_edge = cpu_chain.chain_grad(edge, chains[cuts[0] : cuts[1]], parts[1], de, wanted[1], needs[1])
        if dh is not None:
            dx, of_before = cpu_chain.chain_grad(before, chains[: cuts[0]], parts[0], dh, wanted[0], needs[0])
        if dx is not None and form.act == "gate" and form.root is not None:
            dx = dx.add_(g, alpha=form.root)
    return dx, dattr, *of_before, *of_edge, *of_after


def _messages_back(
    graph: Graph, form: Form, h: Tensor, e: Tensor, g: Tensor, need_h: bool, need_e: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of before(x) and edge(attr). A gated form always gives both, since each is made from the other."""
    terms, acts = _terms(form, h, e)
    csrs = (graph.edge_csr, graph.T.edge_csr) if form.pairs is None else (form.pairs.csr, form.pairs.csr_t)
    if form.act == "gate":
        dh, de = pool.empty(h.shape, h.dtype), pool.empty(e.shape, e.dtype)
        cpu_edge.edge_messages_grad(*csrs, terms, acts, g, (True,) * 6, into=_apart(dh, de))
        return dh, de
    first = form.act != "product"
    result = cpu_edge.edge_messages_grad(
        *csrs,
        terms,
        acts,
        g,
        (False, need_h, need_e and first, False, False, need_e and not first),
        root=None if form.root is None else (h, form.root),
        pairs=None if form.pairs is None else form.pairs.ends,
    )
    return result[1], result[2] if first else result[5]


def _reference(plan: Any, tensors: Sequence[Tensor]) -> Tensor:
    """The layer in plain PyTorch, for second derivatives."""
    graph, (before, edge, after), form = plan
    x, attr, *parameters = tensors
    parts = list(_parts(plan, parameters))
    h, e = reference_chain.chain(before, x, parts[0]), reference_chain.chain(edge, attr, parts[1])
    e = e if form.pairs is None else e[form.pairs.number]
    out = reference_edge.edge_messages(graph.edge_csr, *_terms(form, h, e))
    if form.root is not None:
        out = out + form.root * (x if form.act == "gate" else h)
    return reference_chain.chain(after, out, parts[2])


def _run(plan: Any, *tensors: Tensor) -> tuple[Any, ...]:
    """The result, what it was packed from where it was, and what is kept for backward."""
    packed, kept = _packed(plan, tensors), list[Tensor]()
    out = _forward(plan, packed, kept)
    return out, packed if packed is not tensors else (), kept


def _gradients(plan: Any, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool]) -> tuple[Any, ...]:
    given = len(needs)
    made = len(_packed_needs(plan, needs)) if plan[2].act == "gate" else 0
    packed, kept = saved[given : given + made] if made else saved[:given], saved[given + made :]
    result = _backward(plan, packed, kept, grads[0], _packed_needs(plan, needs))
    return tuple(g if need else None for g, need in zip(_unpacked(plan, result), needs, strict=True))


_edge_layer = differentiable(
    "EdgeLayer",
    _run,
    _gradients,
    again=through(lambda plan, *tensors: _reference(plan, _packed(plan, tensors))),
    saves=lambda tensors, results, needs: (*tensors, *results[1], *results[2]),
)
