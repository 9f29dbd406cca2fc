"""edge_mlp: any function of an edge and its two ends, reduced by destination, in memory bounded by a block of edges.

For messages that no algebra moves to the nodes (an MLP of several layers, an attention of the user's own). Edges are
taken in blocks of whole rows in the order of their destinations; backward computes each block again, as torch's
checkpointing does. Several reductions of the same messages (PNAConv) share one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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

BLOCK = 1 << 14  # edges: at 256 channels of fp32 a block's array takes 16 MiB, about what a core's caches hold
REDUCTIONS = ("sum", "mean", "max", "min", "square", "each")
Ends = Tensor | Sequence[Tensor] | None  # what a function reads at one end of an edge, or on it


def edge_mlp(
    graph: Graph,
    function: Callable[..., Tensor],
    row: Ends,
    col: Ends,
    edge: Ends = None,
    *,
    parameters: Sequence[Tensor] | None = None,
    reduce: str | Sequence[str] = "sum",
    block: int = BLOCK,
    own: Tensor | None = None,
) -> Any:
    """Reduce function(row_i, col_j[, edge]) over neighbours: sum, mean, max, min, or square (the mean of squares).

    graph [n, m], row [n, ...], col [m, ...], edge [E, ...] in the order of edge_index, or several of each -> [n, k]; a
    tuple of them where `reduce` is a sequence. "each": no reduction, the messages themselves [E, k] in that order.
    function maps blocks [B, ...] to [B, k], row by row (no batch statistics); absent terms are not handed to it.
    parameters: what it uses that needs gradients; by default those of the module it is.
    own [n, k]: added to max and min (not to the others), as if every message of a row had it.
    Random numbers inside (dropout) are the same in backward. A row longer than `block` makes a block of its own.
    """
    names = (reduce,) if isinstance(reduce, str) else tuple(reduce)
    for name in names:
        expect(name in REDUCTIONS, f"edge_mlp: 'reduce' is {name!r}, wanted {', '.join(REDUCTIONS)}")
    expect(block >= 1, f"edge_mlp: 'block' is {block}, wanted at least 1")
    sizes = (("row", row, graph.num_rows), ("col", col, graph.num_cols), ("edge", edge, graph.num_edges))
    ends: list[tuple[int, Tensor]] = []
    for at, (name, given, size) in enumerate(sizes):
        for tensor in listed(given):
            expect(tensor.size(0) == size, f"edge_mlp: '{name}' has {tensor.size(0)} rows, wanted {size}")
            ends.append((at, tensor))
    if parameters is None:
        parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    places = tuple(at for at, _ in ends)
    found = _EdgeMlp.apply(graph, function, block, names, places, own, *(t for _, t in ends), *parameters)
    return found[0] if isinstance(reduce, str) else found


def listed(ends: Ends) -> Sequence[Tensor]:
    """The tensors at one end: none, one or several."""
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, Tensor) else ends


@dataclass(eq=False)
class _Block:
    """Whole rows of a graph: their edges' destinations, sources and numbers, and the matrix that reduces them."""

    first: int
    last: int
    rows: Tensor
    columns: Tensor
    ids: Tensor
    csr: Csr

    def where(self, place: int) -> Tensor:
        """The index of the block's edges at their destination (0), at their source (1), or of themselves (2)."""
        return (self.rows, self.columns, self.ids)[place]


def _blocks(graph: Graph, block: int) -> Iterator[_Block]:
    """The edges of a graph in blocks of about `block`; made anew each time, since kept they would double the graph."""
    csr = graph.edge_csr
    begin = 0
    bounds = graph.derived(("edge_mlp", block), lambda: _bounds(csr.rowptr, block))
    for first, last, end in bounds:
        counts = csr.rowptr[first : last + 1].diff()
        rows = torch.repeat_interleave(counts, output_size=end - begin) + first
        part = slice(begin, end)
        columns = torch.arange(begin, end, device=csr.device) if csr.col is None else csr.col[part].long()
        ids = torch.arange(begin, end, device=csr.device) if csr.edge_id is None else csr.edge_id[part].long()
        inner = Csr(csr.rowptr[first : last + 1] - begin, None, None, last - first, end - begin, end - begin)
        yield _Block(first, last, rows, columns, ids, Graph(inner).csr)
        begin = end


def _bounds(rowptr: Tensor, block: int) -> list[tuple[int, int, int]]:
    """(first row, row after the last, edge after the last) of every block."""
    pointers, num_rows = rowptr.cpu(), rowptr.numel() - 1
    found: list[tuple[int, int, int]] = []
    first = begin = 0
    while first < num_rows or not found:
        last = int(torch.searchsorted(pointers, begin + block, right=True)) - 1
        last = min(max(last, first + 1), num_rows)
        begin = int(pointers[last]) if num_rows else 0
        found.append((first, last, begin))
        first = last
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
        ctx.random = torch.get_rng_state()
        outs: list[Tensor] = []
        ties: list[Tensor | None] = []
        for part in _blocks(graph, block):
            message = function(*(t.index_select(0, part.where(at)) for t, at in zip(tensors, places, strict=False)))
            if not outs:
                counts = [graph.num_edges if name == "each" else graph.num_rows for name in names]
                outs = [message.new_zeros(count, *message.shape[1:]) for count in counts]
                ties = [
                    torch.zeros_like(out) if name in ("max", "min") else None
                    for name, out in zip(names, outs, strict=True)
                ]
            flat = message.reshape(message.size(0), math.prod(message.shape[1:]))
            here = slice(part.first, part.last)
            for name, out, tie in zip(names, outs, ties, strict=True):
                if name == "each":
                    out.index_copy_(0, part.ids, message)
                    continue
                values, count = _reduced(graph, part, flat, name)
                out[here] = values.reshape(out[here].shape)
                if tie is not None and count is not None:
                    tie[here] = count.reshape(tie[here].shape).to(tie.dtype)
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
            outs = _plain(ctx.graph, ctx.function, ctx.names, own, ctx.places, tensors)
            return None, None, None, None, None, *twice.gradients(outs, grads, (own, *tensors), (need_own, *needs))
        down = None
        flows = []  # (gradient per row or edge, name, extremum or None)
        for name, grad in zip(ctx.names, grads, strict=True):
            extremum = None
            if name in ("max", "min"):
                out, most, ties = next(kept), next(kept), next(kept)
                grad, extremum = shares(out, out if most is None else most, ties, grad)
                if need_own:
                    down = grad * ties if down is None else down + grad * ties
            elif name in ("mean", "square"):
                grad = grad * _mean_scale(ctx.graph, grad)
            flows.append((2 * grad if name == "square" else grad, name, extremum))
        found = [torch.zeros_like(t) if need else None for t, need in zip(tensors, needs, strict=True)]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.random)
            for part in _blocks(ctx.graph, ctx.block):
                _block_gradients(ctx, part, tensors, needs, flows, found)
        return None, None, None, None, None, down, *found


def _block_gradients(ctx: Any, part: _Block, tensors: Any, needs: Any, flows: Any, found: list[Any]) -> None:
    """Compute a block's messages again and add their gradients to `found`."""
    places, count = ctx.places, len(ctx.places)
    with torch.enable_grad():
        leaves = [
            t.detach().index_select(0, part.where(at)).requires_grad_(need)
            for t, at, need in zip(tensors, places, needs, strict=False)
        ]
        message = ctx.function(*leaves)
    wanted = [t for t, need in zip((*leaves, *tensors[count:]), needs, strict=True) if need]
    if not message.requires_grad or not wanted:
        return
    value, total = message.detach(), None
    for grad, name, extremum in flows:
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
        if at == 0 and d.dim() == 2:  # the block's own rows, each met here and nowhere else
            into[part.first : part.last] = kernels.backend(d.device).spmm(part.csr, d)[0]
        elif at == 2:  # each edge too
            into.index_copy_(0, part.ids, d)
        elif at is not None:
            into.index_add_(0, part.where(at), d)
        else:
            into += d


def _reduced(graph: Graph, part: _Block, flat: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """One reduction of a block's messages. flat [B, k] -> [rows, k], and how many attain an extremum."""
    backend = kernels.backend(flat.device)
    if name in ("max", "min"):
        return backend.spmm(part.csr, flat, reduce=name, count_ties=True)
    if name == "sum":
        return backend.spmm(part.csr, flat)[0], None
    scale = graph.mean_scale(kernels.accumulate_type(flat.dtype))[part.first : part.last]
    return backend.spmm(part.csr, flat * flat if name == "square" else flat, row_scale=scale)[0], None


def _mean_scale(graph: Graph, like: Tensor) -> Tensor:
    scale = graph.mean_scale(kernels.accumulate_type(like.dtype)).to(like.dtype)
    return scale.view(-1, *([1] * (like.dim() - 1)))


def _plain(
    graph: Graph, function: Any, names: tuple[str, ...], own: Any, places: tuple[int, ...], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """All reductions in plain, differentiable PyTorch."""
    csr = graph.edge_csr
    where = (csr.rows(), csr.columns(), csr.edge_id if csr.edge_id is None else csr.edge_id.long())
    ends = [t if where[at] is None else t[where[at]] for t, at in zip(tensors, places, strict=False)]
    message = function(*ends)
    inner = Csr(csr.rowptr, None, None, csr.num_rows, csr.num_edges, csr.num_edges)
    outs = []
    for name in names:
        if name == "each":
            ids = where[2]
            outs.append(message if ids is None else torch.zeros_like(message).index_copy(0, ids, message))
            continue
        if name in ("max", "min"):
            index = where[0].view(-1, *([1] * (message.dim() - 1))).expand_as(message)
            zeros = message.new_zeros(graph.num_rows, *message.shape[1:])
            whole = message if own is None else message + own[where[0]]
            outs.append(zeros.scatter_reduce(0, index, whole, f"a{name}", include_self=False))
            continue
        value = message * message if name == "square" else message
        out = reference.spmm(inner, value)[0]
        outs.append(out if name == "sum" else out * _mean_scale(graph, out))
    return outs
