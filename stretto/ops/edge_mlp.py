"""edge_mlp: any function of an edge and its two ends, summed by destination, in memory bounded by a block of edges.

For messages that no algebra moves to the nodes (an MLP of several layers, an attention of the user's own). Edges are
taken in blocks in the order of their destinations; backward computes each block again, as torch's checkpointing does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto import kernels
from stretto.errors import expect
from stretto.graph import Graph

BLOCK = 1 << 16  # edges: at 256 channels of fp32 a block's array takes 64 MiB


def edge_mlp(
    graph: Graph,
    function: Callable[..., Tensor],
    row: Tensor,
    col: Tensor,
    edge: Tensor | None = None,
    *,
    parameters: Sequence[Tensor] | None = None,
    reduce: str = "sum",
    block: int = BLOCK,
) -> Tensor:
    """sum, mean or max over neighbours of function(row_i, col_j[, edge]).

    graph [n, m], row [n, ...], col [m, ...], edge [E, ...] -> [n, ...]. function maps blocks [B, ...] to [B, ...], row
    by row (no batch statistics). parameters: what it uses that needs gradients; by default those of the module it is.
    Random numbers inside (dropout) are the same in backward.
    """
    expect(reduce in ("sum", "mean", "max"), f"edge_mlp: 'reduce' is {reduce!r}, wanted sum, mean or max")
    expect(block >= 1, f"edge_mlp: 'block' is {block}, wanted at least 1")
    sizes = (("row", row, graph.num_rows), ("col", col, graph.num_cols), ("edge", edge, graph.num_edges))
    for name, tensor, size in sizes:
        if tensor is not None:
            expect(tensor.size(0) == size, f"edge_mlp: '{name}' has {tensor.size(0)} rows, wanted {size}")
    if parameters is None:
        parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    how = "max" if reduce == "max" else "sum"
    out = _EdgeMlp.apply(graph, function, block, how, row, col, edge, *parameters)
    if reduce == "mean":
        scale = graph.mean_scale(kernels.accumulate_type(out.dtype))
        out = (out * scale.view(-1, *([1] * (out.dim() - 1)))).to(out.dtype)
    return out


class _Blocks:
    """The edges of a graph in blocks: destinations, sources and the user's numbers."""

    def __init__(self, graph: Graph, block: int) -> None:
        csr = graph.edge_csr
        self.rows, self.columns, self.block = csr.rows(), csr.columns(), block
        self.ids = torch.arange(csr.num_edges, device=csr.device) if csr.edge_id is None else csr.edge_id.long()

    def __iter__(self) -> Any:
        for begin in range(0, max(self.rows.numel(), 1), self.block):
            part = slice(begin, begin + self.block)
            yield self.rows[part], self.columns[part], self.ids[part]


def _take(tensors: tuple[Any, ...], where: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    return [t[index] for t, index in zip(tensors, where, strict=True) if t is not None]


def _spread(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *([1] * (like.dim() - 1))).expand_as(like)


class _EdgeMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, function: Any, block: int, how: str, *tensors: Any) -> Tensor:
        ctx.graph, ctx.function, ctx.block, ctx.how = graph, function, block, how
        ctx.random = torch.get_rng_state()
        out: Tensor | None = None
        for where in _Blocks(graph, block):
            message = function(*_take(tensors[:3], where))
            if out is None:
                out = message.new_zeros(graph.num_rows, *message.shape[1:])
                seen = torch.zeros(graph.num_rows, dtype=torch.bool, device=message.device)
            if how == "sum":
                out.index_add_(0, where[0], message)
            else:
                # Rows met for the first time start from this block, the others from what they have.
                part = torch.zeros_like(out)
                part.scatter_reduce_(0, _spread(where[0], message), message, "amax", include_self=False)
                here = torch.zeros_like(seen).index_fill_(0, where[0], True)
                better = here & ~seen
                shape = (-1, *([1] * (out.dim() - 1)))
                both = torch.where((here & seen).view(shape), torch.maximum(out, part), out)
                out = torch.where(better.view(shape), part, both)
                seen |= here
        assert out is not None
        ctx.save_for_backward(*tensors, out if how == "max" else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, out = ctx.saved_tensors
        ends, parameters = tensors[:3], tensors[3:]
        needs = ctx.needs_input_grad[4:]
        grad = grads[0]
        if ctx.how == "max":
            grad = grad / _ties(ctx, tuple(ends), out).clamp(min=1)
        found = [
            torch.zeros_like(t) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)
        ]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.random)
            for where in _Blocks(ctx.graph, ctx.block):
                with torch.enable_grad():
                    parts = [
                        None if t is None else t.detach()[index].requires_grad_(need)
                        for t, index, need in zip(ends, where, needs[:3], strict=True)
                    ]
                    message = ctx.function(*[p for p in parts if p is not None])
                flow = grad[where[0]]
                if ctx.how == "max":
                    flow = flow * (message.detach() == out[where[0]])
                wanted = [p for p in parts if p is not None and p.requires_grad]
                wanted += [p for p, need in zip(parameters, needs[3:], strict=True) if need]
                if not message.requires_grad or not wanted:
                    continue
                gradients = iter(torch.autograd.grad(message, wanted, flow.to(message.dtype), allow_unused=True))
                for at, total in enumerate(found):
                    if total is None:
                        continue
                    d = next(gradients)
                    if d is not None and at < 3:
                        total.index_add_(0, where[at], d)
                    elif d is not None:
                        total += d
        return None, None, None, None, *found


def _ties(ctx: Any, ends: tuple[Any, ...], out: Tensor) -> Tensor:
    """How many messages attain each maximum: the gradient is shared among them, as torch's scatter_reduce does."""
    count = torch.zeros_like(out)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(ctx.random)
        for where in _Blocks(ctx.graph, ctx.block):
            message = ctx.function(*_take(ends, where))
            count.index_add_(0, where[0], (message == out[where[0]]).to(out.dtype))
    return count
