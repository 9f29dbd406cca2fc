"""edge_mlp: any function of an edge and its two ends, reduced by destination, in memory bounded by a block of edges.

For messages that no algebra moves to the nodes (an MLP of several layers, an attention of the user's own). Edges are
taken in blocks in the order of their destinations: whole rows, and pieces of a row that is longer than a block.
Backward computes each block again, as torch's checkpointing does. Several reductions of the same messages (PNAConv)
share one pass.
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
from stretto.ops.extremum import shares, with_own
from stretto.ops.replay import Replay
from stretto.ops.spread import Spread, spread_of

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
    found = _edge_mlp(graph, function, block, names, places, own, *(t for _, t in ends), *parameters)
    return found[0] if isinstance(reduce, str) else found


def listed(ends: Ends) -> Sequence[Tensor]:
    """The tensors at one end: none, one or several."""
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, Tensor) else ends


@dataclass(eq=False)
class _Block:
    """Edges of a few whole rows, or a piece of one row: their destinations, sources and numbers, and their graph.

    opens, closes: whether the first edge of its rows is here, and the last.
    """

    first: int
    last: int
    opens: bool
    closes: bool
    rows: Tensor
    columns: Tensor
    ids: Tensor
    graph: Graph

    @property
    def whole(self) -> bool:
        return self.opens and self.closes

    def where(self, place: int) -> Tensor:
        """The index of the block's edges at their destination (0), at their source (1), or of themselves (2)."""
        return (self.rows, self.columns, self.ids)[place]


def _blocks(graph: Graph, block: int) -> Iterator[_Block]:
    """The edges of a graph, at most `block` at a time; made anew each time, since kept they would double the graph."""
    csr = graph.edge_csr
    bounds = graph.derived(("edge_mlp", block), lambda: _bounds(csr.rowptr, block))
    for first, last, begin, end, opens, closes in bounds:
        rowptr = csr.rowptr[first : last + 1].clamp(begin, end) - begin
        rows = torch.repeat_interleave(rowptr.diff(), output_size=end - begin) + first
        part = slice(begin, end)
        columns = torch.arange(begin, end, device=csr.device) if csr.col is None else csr.col[part].long()
        ids = torch.arange(begin, end, device=csr.device) if csr.edge_id is None else csr.edge_id[part].long()
        inner = Csr(rowptr, None, None, last - first, end - begin, end - begin)
        yield _Block(first, last, opens, closes, rows, columns, ids, Graph(inner))


def _bounds(rowptr: Tensor, block: int) -> list[tuple[int, int, int, int, bool, bool]]:
    """(first row, row after the last, first edge, edge after the last, opens, closes) of every block."""
    pointers, num_rows = rowptr.cpu(), rowptr.numel() - 1
    found: list[tuple[int, int, int, int, bool, bool]] = []
    first = 0
    while first < num_rows or not found:
        begin = int(pointers[first])
        last = int(torch.searchsorted(pointers, begin + block, right=True)) - 1
        if last > first or not num_rows:
            found.append((first, last, begin, int(pointers[last]), True, True))
            first = last
            continue
        stop = int(pointers[first + 1])  # one row has more edges than a block
        for start in range(begin, stop, block):
            end = min(start + block, stop)
            found.append((first, first + 1, start, end, start == begin, end == stop))
        first += 1
    return found


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
        outs: list[Tensor] = []
        ties: list[Tensor | None] = []
        pieces: list[Any] = [None] * len(names)  # of the row that is being put together
        for part in _blocks(graph, block):
            message = _message(function, names, part, _taken(part, tensors, places))
            if not outs:
                sizes = [graph.num_edges if name == "each" else graph.num_rows for name in names]
                outs = [message.new_zeros(size, *message.shape[1:]) for size in sizes]
                counts = kernels.accumulate_type(message.dtype)  # fp16 ends at 65504
                ties = [
                    torch.zeros_like(out, dtype=counts) if name in ("max", "min") else None
                    for name, out in zip(names, outs, strict=True)
                ]
            here = slice(part.first, part.last)
            for at, (name, out, tie) in enumerate(zip(names, outs, ties, strict=True)):
                if name == "each":
                    out.index_copy_(0, part.ids, message)
                    continue
                found = _reduced(graph, part, message, name)
                if not part.opens:
                    found = _merged(name, pieces[at], found)
                pieces[at] = None if part.closes else found
                if part.closes:
                    out[here] = found[0].to(out.dtype)
                    if tie is not None and found[1] is not None:
                        tie[here] = found[1]
        results = [out if tie is None else with_own(graph, out, own) for out, tie in zip(outs, ties, strict=True)]
        every = zip(results, outs, ties, strict=True)
        kept = [t for out, most, tie in every if tie is not None for t in (out, None if most is out else most, tie)]
        ctx.save_for_backward(own, *tensors, *kept)
        ctx.num_inputs = len(tensors)
        return tuple(results)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        own, *saved = ctx.saved_tensors
        tensors, kept = tuple(saved[: ctx.num_inputs]), iter(saved[ctx.num_inputs :])
        need_own, *needs = ctx.needs_input_grad[5:]
        if torch.is_grad_enabled():  # to be differentiated again: through plain PyTorch, all edges at once

            def again(own: Any, *ends: Any) -> list[Tensor]:
                with ctx.replay:
                    return _plain(ctx.graph, ctx.function, ctx.block, ctx.names, own, ctx.places, ends)

            captured = len(tensors) - len(ctx.places)
            wanted = twice.gradients(again, grads, (own, *tensors), (need_own, *needs), captured)
            return None, None, None, None, None, *wanted
        down = None
        flows = []  # (gradient per row or edge, name, extremum or None)
        for name, grad in zip(ctx.names, grads, strict=True):
            extremum = None
            if name in ("max", "min"):
                out, most, ties = next(kept), next(kept), next(kept)
                grad, extremum = shares(out, out if most is None else most, ties, grad)
                if need_own:
                    down = grad * ties if down is None else down + grad * ties
                grad = torch.where(extremum == extremum, grad, extremum)  # no message equals a NaN, but it goes to all
            elif name in ("mean", "square"):
                grad = grad * _mean_scale(ctx.graph, grad)
            flows.append((2 * grad if name == "square" else grad, name, extremum))
        types = [_sum_type(t, at, ctx.places) for at, t in enumerate(tensors)]
        found: list[Any] = [
            torch.zeros_like(t, dtype=kind) if need else None
            for t, kind, need in zip(tensors, types, needs, strict=True)
        ]
        count = len(ctx.places)
        sources = [at for at, place in enumerate(ctx.places) if place == 1 and needs[at]]
        spread = spread_of(ctx.graph) if sources else None
        apart = {} if spread is None else dict.fromkeys(sources, spread)
        for at, places in apart.items():
            found[at] = tensors[at].new_zeros(places.num_places, *tensors[at].shape[1:], dtype=types[at])
        learning = [t for t, need in zip(tensors[count:], needs[count:], strict=True) if need]
        with ctx.replay, _as_in_forward(learning):
            for part in _blocks(ctx.graph, ctx.block):
                _block_gradients(ctx, part, tensors, needs, flows, found, spread)
        for at, places in apart.items():
            found[at] = places.collected(found[at])
        made = [None if d is None else d.to(t.dtype) for d, t in zip(found, tensors, strict=True)]
        return None, None, None, None, None, None if down is None else down.to(own.dtype), *made


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


def _taken(part: _Block, tensors: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """The rows of a function's terms that a block's edges read."""
    return [_read(part, t, at) for t, at in zip(tensors, places, strict=False)]


def _read(part: _Block, tensor: Tensor, place: int) -> Tensor:
    return tensor if place == WHOLE else tensor.index_select(0, part.where(place))


def _message(function: Any, names: Sequence[str], part: _Block, ends: Sequence[Tensor]) -> Tensor:
    message: Tensor = function(part.graph, *ends) if names == ("function",) else function(*ends)
    return message


def _sum_type(tensor: Tensor, at: int, places: Sequence[int]) -> torch.dtype:
    """The type in which a tensor's gradient is collected: an edge's comes once, a node's is a sum over its edges, that
    of a parameter one over all blocks."""
    if at >= len(places) or places[at] == WHOLE:
        return torch.float64
    return tensor.dtype if places[at] == 2 else kernels.accumulate_type(tensor.dtype)


def _block_gradients(
    ctx: Any, part: _Block, tensors: Any, needs: Any, flows: Any, found: list[Any], spread: Spread | None
) -> None:
    """Compute a block's messages again and add their gradients to `found`."""
    places, count = ctx.places, len(ctx.places)
    with torch.enable_grad():
        leaves = [
            _read(part, t.detach(), at).requires_grad_(need)
            for t, at, need in zip(tensors, places, needs, strict=False)
        ]
        message = _message(ctx.function, ctx.names, part, leaves)
    wanted = [t for t, need in zip((*leaves, *tensors[count:]), needs, strict=True) if need]
    if not message.requires_grad or not wanted:
        return
    value, total = message.detach(), None
    for grad, name, extremum in flows:
        if name == "function":
            flow = grad[part.first : part.last]
        else:
            flow = grad.index_select(0, part.ids if name == "each" else part.rows)
        if name == "square":
            flow = flow.mul_(value)
        elif extremum is not None:
            flow = flow.mul_(value == extremum.index_select(0, part.rows))
        total = flow if total is None else total.add_(flow)
    assert total is not None
    gradients = iter(torch.autograd.grad(message, wanted, total.to(message.dtype), allow_unused=True))
    for i, into in enumerate(found):
        if into is None:
            continue
        d = next(gradients)
        if d is None:
            continue
        at = places[i] if i < count else None
        if at == 0:  # the block's own rows; those of a cut row meet in later blocks again
            here, flat = into[part.first : part.last], d.reshape(d.size(0), math.prod(d.shape[1:])).to(into.dtype)
            here += kernels.backend(d.device).spmm(part.graph.csr, flat)[0].view(here.shape)
        elif at == 2:  # each edge is met here and nowhere else
            into.index_copy_(0, part.ids, d)
        elif at == 1:
            where = part.columns if spread is None else spread.places(part.columns, part.ids)
            into.index_add_(0, where, d.to(into.dtype))
        else:
            into += d


def _reduced(graph: Graph, part: _Block, message: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
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


def _merged(name: str, before: Any, found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """A row's reduction from those of its pieces so far and of the next one."""
    (old, old_count), (new, count) = before, found
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
    parts = list(_blocks(graph, block))
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
