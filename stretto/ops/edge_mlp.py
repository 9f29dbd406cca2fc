"""edge_mlp: any function of an edge and its two ends, reduced by destination, in memory bounded by a block of edges.

For messages that no algebra moves to the nodes (an MLP of several layers, an attention of the user's own). Edges are
taken in blocks in the order of their destinations: whole rows, and pieces of a row that is longer than a block.
Backward computes each block again, as torch's checkpointing does. Several reductions of the same messages (PNAConv)
share one pass. Stock's GENConv on rmat:17 needs more than 24 GB; NNConv on rmat:12 trains 14 times as fast as stock in
a tenth of the memory (benchmarks/results/layers.csv).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import expect
from stretto.graph import Graph
from stretto.kernels import reference
from stretto.kernels.csr import Csr
from stretto.ops import twice
from stretto.ops.batched import one_by_one
from stretto.ops.edge_blocks import Block, blocks
from stretto.ops.extremum import shares, with_own
from stretto.ops.replay import Replay
from stretto.ops.spread import spread_of

BLOCK = 1 << 14  # edges: at 256 channels of fp32 a block's array takes 16 MiB, about what a core's caches hold
REDUCTIONS = ("sum", "mean", "max", "min", "square", "each", "function")
Ends = Tensor | Sequence[Tensor] | None  # what a function reads at one end of an edge, or on it
WHOLE = 3  # the place of what is not read by row: after destination, source and edge


def edge_mlp(
    graph: Graph,
    function: Callable[..., Tensor],
    row: Ends,
    col: Ends,
    edge: Ends = None,
    *,
    shared: Sequence[Tensor] = (),
    parameters: Sequence[Tensor] | None = None,
    reduce: str | Sequence[str] = "sum",
    block: int = BLOCK,
    own: Tensor | None = None,
) -> Any:
    """Reduce function(row_i, col_j[, edge]) over neighbours: sum, mean, max, min, or square (the mean of squares).

    graph [n, m], row [n, ...], col [m, ...], edge [E, ...] in the order of edge_index, or several of each -> [n, k]; a
    tuple of them where `reduce` is a sequence. "each": no reduction, the messages themselves [E, k] in that order.
    "function": it is handed the block's Graph [r, B] first and sums by itself, to [r, ...]; a row's pieces are added.
    function maps blocks [B, ...] to [B, k], row by row (no batch statistics); absent terms are not handed to it.
    parameters: what it uses that needs gradients; by default those of the module it is.
    shared: what every edge reads as a whole, handed to it last. It may depend on the rest, as parameters may not.
    own [n, k]: added to max and min (not to the others), as if every message of a row had it.
    Random numbers inside (dropout) are the same in backward. No block has more than `block` edges.
    """
    names = (reduce,) if isinstance(reduce, str) else tuple(reduce)
    for name in names:
        expect(name in REDUCTIONS, f"edge_mlp: 'reduce' is {name!r}, wanted {', '.join(REDUCTIONS)}")
    expect("function" not in names or len(names) == 1, f"edge_mlp: 'reduce' is {names}, wanted 'function' by itself")
    expect(block >= 1, f"edge_mlp: 'block' is {block}, wanted at least 1")
    sizes = (("row", row, graph.num_rows), ("col", col, graph.num_cols), ("edge", edge, graph.num_edges))
    ends: list[tuple[int, Tensor]] = []
    for at, (name, given, size) in enumerate(sizes):
        for tensor in listed(given):
            expect(tensor.size(0) == size, f"edge_mlp: '{name}' has {tensor.size(0)} rows, wanted {size}")
            ends.append((at, tensor))
    ends += [(WHOLE, tensor) for tensor in shared]
    if parameters is None:
        parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    places = tuple(at for at, _ in ends)
    result = _edge_mlp(graph, function, block, names, places, own, *(t for _, t in ends), *parameters)
    return result[0] if isinstance(reduce, str) else result


def listed(ends: Ends) -> Sequence[Tensor]:
    """The tensors at one end: none, one or several."""
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, Tensor) else ends


@dataclass(frozen=True)
class _Flow:
    """The gradient of one reduction, per row or edge, and the extremum that messages are compared with."""

    name: str
    grad: Tensor
    extremum: Tensor | None


class _EdgeMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graph: Graph,
        function: Any,
        block: int,
        names: tuple[str, ...],
        places: tuple[int, ...],
        own: Any,
        *tensors: Any,
    ) -> Any:
        ctx.graph, ctx.function, ctx.block, ctx.names, ctx.places = graph, function, block, names, places
        ctx.replay = Replay(tensors)
        sums: _Reductions | None = None
        for part in blocks(graph, block):
            message = _message(function, names, part, _taken(part, tensors, places))
            sums = _Reductions(graph, names, message) if sums is None else sums
            sums.add(part, message)
        assert sums is not None
        pairs = list(zip(sums.outs, sums.ties, strict=True))
        results = [out if tie is None else with_own(graph, out, own) for out, tie in pairs]
        every = zip(results, pairs, strict=True)
        kept = [t for out, (most, tie) in every if tie is not None for t in (out, None if most is out else most, tie)]
        ctx.save_for_backward(own, *tensors, *kept)
        ctx.num_inputs = len(tensors)
        return tuple(results)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        own, *saved = ctx.saved_tensors
        tensors, kept = tuple(saved[: ctx.num_inputs]), saved[ctx.num_inputs :]
        need_own, *needs = ctx.needs_input_grad[5:]
        if torch.is_grad_enabled():  # to be differentiated again: through plain PyTorch, all edges at once

            def again(own: Any, *ends: Any) -> list[Tensor]:
                with ctx.replay:
                    return _plain(ctx.graph, ctx.function, ctx.block, ctx.names, own, ctx.places, ends)

            captured = len(tensors) - len(ctx.places)
            wanted = twice.gradients(again, grads, (own, *tensors), (need_own, *needs), captured)
            return None, None, None, None, None, *wanted
        flows, down = _flows(ctx, grads, kept, need_own)
        gradients = _Gradients(ctx, tensors, needs, flows)
        learning = [t for t, need in zip(tensors[len(ctx.places) :], needs[len(ctx.places) :], strict=True) if need]
        with ctx.replay, _as_in_forward(learning):
            for part in blocks(ctx.graph, ctx.block):
                gradients.add(part)
        return None, None, None, None, None, None if down is None else down.to(own.dtype), *gradients.collected()


def _flows(ctx: Any, grads: Sequence[Tensor], kept: Sequence[Any], need_own: bool) -> tuple[list[_Flow], Tensor | None]:
    """What flows back into each reduction; and of the extrema, what flows into a row's own term."""
    flows, saved = list[_Flow](), iter(kept)
    down: Tensor | None = None
    for name, grad in zip(ctx.names, grads, strict=True):
        extremum = None
        if name in ("max", "min"):
            out, most, ties = next(saved), next(saved), next(saved)
            grad, extremum = shares(out, out if most is None else most, ties, grad)
            if need_own:
                down = grad * ties if down is None else down + grad * ties
            grad = torch.where(extremum == extremum, grad, extremum)  # no message equals a NaN, but it goes to all
        elif name in ("mean", "square"):
            grad = grad * _mean_scale(ctx.graph, grad)
        flows.append(_Flow(name, 2 * grad if name == "square" else grad, extremum))
    return flows, down


_edge_mlp: Any = _EdgeMlp.apply


@contextmanager
def _as_in_forward(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Parameters learn as they did in forward, though they may be frozen by now; and their hooks are not called for
    each block: autograd calls them afterwards, for the whole gradient."""
    leaves = [(p, p.requires_grad, p._backward_hooks) for p in parameters if p.is_leaf]
    changed = [kept for kept in leaves if kept[2] or not kept[1]]
    for parameter, _, _ in changed:
        parameter._backward_hooks = None
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, learns, hooks in changed:
            parameter.requires_grad_(learns)
            parameter._backward_hooks = hooks


def _taken(part: Block, tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """The rows of a function's terms that a block's edges read."""
    return [_read(part, t, at) for t, at in zip(tensors, places, strict=False)]


def _read(part: Block, tensor: Tensor, place: int) -> Tensor:
    return tensor if place == WHOLE else tensor.index_select(0, part.where(place))


def _message(function: Any, names: Sequence[str], part: Block, ends: Sequence[Tensor]) -> Tensor:
    message: Tensor = function(part.graph, *ends) if names == ("function",) else function(*ends)
    return message


def _sum_type(tensor: Tensor, at: int, places: Sequence[int]) -> torch.dtype:
    """The type in which a tensor's gradient is collected: an edge's comes once, a node's is a sum over its edges, that
    of a parameter one over all blocks."""
    if at >= len(places) or places[at] == WHOLE:
        return torch.float64
    return tensor.dtype if places[at] == 2 else kernels.accumulate_type(tensor.dtype)


class _Gradients:
    """Gradients of everything a function reads, as blocks come whose messages are computed again."""

    def __init__(self, ctx: Any, tensors: tuple[Tensor, ...], needs: Sequence[bool], flows: list[_Flow]) -> None:
        self.ctx, self.tensors, self.needs, self.flows = ctx, tensors, needs, flows
        self.places: tuple[int, ...] = ctx.places
        self.sources = [at for at, place in enumerate(self.places) if place == 1 and needs[at]]
        self.spread = spread_of(ctx.graph) if self.sources else None
        self.sums = [self._empty(at) if need else None for at, need in enumerate(needs)]

    def _empty(self, at: int) -> Tensor:
        """Room for a gradient: a source of many edges has several places."""
        tensor, kind = self.tensors[at], _sum_type(self.tensors[at], at, self.places)
        if self.spread is None or at not in self.sources:
            return torch.zeros_like(tensor, dtype=kind)
        return tensor.new_zeros(self.spread.num_places, *tensor.shape[1:], dtype=kind)

    def add(self, part: Block) -> None:
        """Compute a block's messages again and add their gradients."""
        ctx, tensors, needs = self.ctx, self.tensors, self.needs
        with torch.enable_grad():
            leaves = [
                _read(part, t.detach(), at).requires_grad_(need)
                for t, at, need in zip(tensors, self.places, needs, strict=False)
            ]
            message = _message(ctx.function, ctx.names, part, leaves)
        wanted = [t for t, need in zip((*leaves, *tensors[len(leaves) :]), needs, strict=True) if need]
        if not message.requires_grad or not wanted:
            return
        total = self._of_messages(part, message.detach())
        gradients = iter(torch.autograd.grad(message, wanted, total.to(message.dtype), allow_unused=True))
        for at, into in enumerate(self.sums):
            gradient = None if into is None else next(gradients)
            if into is not None and gradient is not None:
                self._collect(part, at, into, gradient)

    def _of_messages(self, part: Block, value: Tensor) -> Tensor:
        """The gradient of a block's messages, from that of every reduction."""
        total: Tensor | None = None
        for flow in self.flows:
            if flow.name == "function":
                grad = flow.grad[part.first : part.last]
            else:
                grad = flow.grad.index_select(0, part.ids if flow.name == "each" else part.rows)
            if flow.name == "square":
                grad = grad.mul_(value)
            elif flow.extremum is not None:
                grad = grad.mul_(value == flow.extremum.index_select(0, part.rows))
            total = grad if total is None else total.add_(grad)
        assert total is not None
        return total

    def _collect(self, part: Block, at: int, into: Tensor, gradient: Tensor) -> None:
        """Add a block's gradient of one tensor to the whole."""
        place = self.places[at] if at < len(self.places) else WHOLE
        if place == 0:  # the block's own rows; those of a cut row meet in later blocks again
            flat = gradient.reshape(gradient.size(0), math.prod(gradient.shape[1:])).to(into.dtype)
            here = into[part.first : part.last]
            here += kernels.backend(gradient.device).spmm(part.graph.csr, flat)[0].view(here.shape)
        elif place == 2:  # each edge is met here and nowhere else
            into.index_copy_(0, part.ids, gradient)
        elif place == 1:
            where = part.columns if self.spread is None else self.spread.places(part.columns, part.ids)
            into.index_add_(0, where, gradient.to(into.dtype))
        else:
            into += gradient

    def collected(self) -> list[Tensor | None]:
        """All of them, in the types of the tensors."""
        whole: list[Tensor | None] = list(self.sums)
        for at in self.sources if self.spread is not None else ():
            several = self.sums[at]
            assert several is not None
            assert self.spread is not None
            whole[at] = self.spread.collected(several)
        return [None if d is None else d.to(t.dtype) for d, t in zip(whole, self.tensors, strict=True)]


class _Reductions:
    """All reductions of the messages, as blocks of them come; the pieces of a row wait until it is whole."""

    def __init__(self, graph: Graph, names: tuple[str, ...], message: Tensor) -> None:
        self.graph, self.names = graph, names
        sizes = [graph.num_edges if name == "each" else graph.num_rows for name in names]
        self.outs = [message.new_zeros(size, *message.shape[1:]) for size in sizes]
        counts = kernels.accumulate_type(message.dtype)  # fp16 ends at 65504
        self.ties = [
            torch.zeros_like(out, dtype=counts) if name in ("max", "min") else None
            for name, out in zip(names, self.outs, strict=True)
        ]
        self.pieces: list[Any] = [None] * len(names)  # of the row that is being put together

    def add(self, part: Block, message: Tensor) -> None:
        """Reduce a block's messages."""
        here = slice(part.first, part.last)
        for at, (name, out, tie) in enumerate(zip(self.names, self.outs, self.ties, strict=True)):
            if name == "each":
                out.index_copy_(0, part.ids, message)
                continue
            value, count = _reduced(self.graph, part, message, name)
            if not part.opens:
                value, count = _merged(name, self.pieces[at], (value, count))
            self.pieces[at] = None if part.closes else (value, count)
            if part.closes:
                out[here] = value.to(out.dtype)
                if tie is not None and count is not None:
                    tie[here] = count


def _reduced(graph: Graph, part: Block, message: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """One reduction of a block's messages. [B, ...] -> [rows, ...], and how many attain an extremum.

    Pieces of a row are reduced in the type of sums, and rounded once they are together.
    """
    if not part.whole:
        message = message.to(kernels.accumulate_type(message.dtype))
    if name == "function":
        return message, None
    backend, csr = kernels.backend(message.device), part.graph.csr
    flat = message.reshape(message.size(0), math.prod(message.shape[1:]))
    shape = (part.last - part.first, *message.shape[1:])
    count = None
    if name in ("max", "min"):
        out, count = backend.spmm(csr, flat, reduce=name, count_ties=True)
    elif name == "sum":
        out = backend.spmm(csr, flat)[0]
    else:
        scale = graph.mean_scale(kernels.accumulate_type(flat.dtype))[part.first : part.last]
        out = backend.spmm(csr, flat * flat if name == "square" else flat, row_scale=scale)[0]
    return out.reshape(shape), None if count is None else count.reshape(shape)


def _merged(name: str, before: Any, piece: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """A row's reduction from those of its pieces so far and of the next one."""
    (old, old_count), (new, count) = before, piece
    if count is None:
        return old + new, None
    most = (torch.maximum if name == "max" else torch.minimum)(old, new)
    return most, old_count * (old == most) + count * (new == most)


def _mean_scale(graph: Graph, like: Tensor) -> Tensor:
    scale = graph.mean_scale(kernels.accumulate_type(like.dtype)).to(like.dtype)
    return scale.view(-1, *([1] * (like.dim() - 1)))


def _plain(
    graph: Graph,
    function: Any,
    block: int,
    names: tuple[str, ...],
    own: Any,
    places: Sequence[int],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """All reductions in plain, differentiable PyTorch; messages block by block, so that random numbers are the same."""
    parts = list(blocks(graph, block))
    made = [_message(function, names, part, _taken(part, tensors, places)) for part in parts]
    if names == ("function",):
        zeros = made[0].new_zeros(graph.num_rows, *made[0].shape[1:])
        where = torch.cat([torch.arange(part.first, part.last, device=graph.device) for part in parts])
        return [zeros.index_add(0, where, torch.cat(made))]
    message, csr = torch.cat(made), graph.edge_csr
    inner = Csr(csr.rowptr, None, None, csr.num_rows, csr.num_edges, csr.num_edges)
    outs = []
    for name in names:
        if name in ("max", "min"):
            rows = csr.rows()
            index = rows.view(-1, *([1] * (message.dim() - 1))).expand_as(message)
            zeros = message.new_zeros(graph.num_rows, *message.shape[1:])
            whole = message if own is None else message + own[rows]
            outs.append(zeros.scatter_reduce(0, index, whole, f"a{name}", include_self=False))
        elif name == "each":
            ids = torch.cat([part.ids for part in parts])
            outs.append(torch.zeros_like(message).index_copy(0, ids, message))
        else:
            out = reference.spmm(inner, message * message if name == "square" else message)[0]
            outs.append(out if name == "sum" else out * _mean_scale(graph, out))
    return outs
