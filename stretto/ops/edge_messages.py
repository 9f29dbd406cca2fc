"""edge_messages: messages made on the fly from both ends of an edge and its features, and summed by destination.

sum over neighbours of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2), channel by channel:

    GINEConv           act="relu", col=x, edge=e
    CFConv (SchNet)    act="identity", col=x; act2="identity", edge2=filter
    ResGatedGraphConv  act="sigmoid", row=key, col=query, edge=e; act2="identity", col2=value
    CGConv             act="sigmoid", act2="softplus", both Linear layers of [x_i, x_j, e] split into their three parts
    MLP([x_i, x_j, e]) act="relu" with the first Linear split likewise; the second one follows the sum
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import expect, fail
from stretto.graph import Graph
from stretto.kernels import backend, reference_edge
from stretto.ops import library, twice
from stretto.ops.batched import one_by_one
from stretto.ops.checks import check_values
from stretto.ops.op import Op, Sample
from stretto.ops.rows import run_sum

_NAMES = ("row", "col", "edge", "row2", "col2", "edge2")


def edge_messages(
    graph: Graph,
    row: Tensor | None = None,
    col: Tensor | None = None,
    edge: Tensor | None = None,
    row2: Tensor | None = None,
    col2: Tensor | None = None,
    edge2: Tensor | None = None,
    *,
    act: str = "identity",
    act2: str = "one",
    reduce: str = "sum",
) -> Tensor:
    """sum (or mean) over neighbours of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2); absent terms are 0.

    graph [n, m], row and row2 [n, k], col and col2 [m, k], edge and edge2 [E, k] in the order of edge_index -> [n, k].
    act, act2: identity, relu, sigmoid, softplus, silu, or one (act2 only): no second factor.
    """
    tensors: tuple[Tensor | None, ...] = (row, col, edge, row2, col2, edge2)
    for name, tensor in zip(_NAMES, tensors, strict=True):
        if tensor is not None:
            check_values("edge_messages", name, tensor, graph.device)
    tensors = _promoted(tensors)
    _check(graph, tensors, act, act2, reduce)
    found = [t for t in tensors if t is not None]
    if any(library.traced(t) for t in found):
        out = torch.ops.stretto.edge_messages(graph.handle, *tensors, act, act2, graph.num_rows)
    elif torch.is_grad_enabled() and any(t.requires_grad for t in found):
        out = _EdgeMessages.apply(graph, (act, act2), *tensors)
    else:
        out = run(graph, tensors, (act, act2))
    if reduce == "mean":
        scale = library.mean_scale(graph, kernels.accumulate_type(out.dtype))
        out = (out * scale.unsqueeze(1)).to(out.dtype)
    return out


def run(graph: Graph, tensors: tuple[Tensor | None, ...], acts: tuple[str, str]) -> Tensor:
    """No autograd."""
    return backend(graph.device).edge_messages(graph.edge_csr, tensors, acts)


def run_grad(
    graph: Graph, tensors: tuple[Tensor | None, ...], acts: tuple[str, str], grad: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """No autograd: the gradient of every tensor that needs one.

    A row term's gradient is that of its edge term, summed: where the latter is made anyway, no activation is computed
    a second time.
    """
    module = backend(grad.device)
    sums = [needs[s] and needs[s + 2] and tensors[s + 2] is not None for s in (0, 3)]
    if module.native or not any(sums):
        return module.edge_messages_grad(graph.edge_csr, graph.T.edge_csr, tensors, acts, grad, needs)
    fewer = (needs[0] and not sums[0], *needs[1:3], needs[3] and not sums[1], *needs[4:])
    found = list(module.edge_messages_grad(graph.edge_csr, graph.T.edge_csr, tensors, acts, grad, fewer))
    for term, wanted in zip((0, 3), sums, strict=True):
        if wanted:
            found[term] = run_sum(graph.segments, found[term + 2])
    return tuple(found)


class _EdgeMessages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, acts: tuple[str, str], *tensors: Any) -> Tensor:
        ctx.graph, ctx.acts = graph, acts
        ctx.save_for_backward(*tensors)
        return run(graph, tensors, acts)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors, needs = ctx.saved_tensors, tuple(ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # to be differentiated again: through plain PyTorch

            def again(*terms: Tensor | None) -> list[Tensor]:
                return [reference_edge.edge_messages(ctx.graph.edge_csr, terms, ctx.acts)]

            return None, None, *twice.gradients(again, grads, tensors, needs)
        return None, None, *run_grad(ctx.graph, tensors, ctx.acts, grads[0], needs)


def _promoted(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    types = {t.dtype for t in tensors if t is not None}
    if len(types) <= 1:
        return tensors
    wide = torch.float64 if torch.float64 in types else torch.float32
    return tuple(None if t is None else t.to(wide) for t in tensors)


def _check(graph: Graph, tensors: tuple[Tensor | None, ...], act: str, act2: str, reduce: str) -> None:
    acts = reference_edge.ACTS
    expect(act in acts[1:], f"edge_messages: 'act' is {act!r}, wanted one of {', '.join(acts[1:])}")
    expect(act2 in acts, f"edge_messages: 'act2' is {act2!r}, wanted one of {', '.join(acts)}")
    expect(reduce in ("sum", "mean"), f"edge_messages: 'reduce' is {reduce!r}, wanted sum or mean")
    expect(any(t is not None for t in tensors[:3]), "edge_messages: one of 'row', 'col', 'edge' is needed")
    second = any(t is not None for t in tensors[3:])
    expect(second == (act2 != "one"), "edge_messages: 'row2', 'col2', 'edge2' and 'act2' come together")
    width = next(t.size(-1) if t.dim() else 0 for t in tensors if t is not None)
    sizes = (graph.num_rows, graph.num_cols, graph.num_edges) * 2
    for name, tensor, size in zip(_NAMES, tensors, sizes, strict=True):
        if tensor is None:
            continue
        if tuple(tensor.shape) != (size, width):
            fail(f"edge_messages: '{name}' has shape {list(tensor.shape)}, wanted {[size, width]}")


def reference(
    graph: Graph, *given: Tensor | None, act: str = "identity", act2: str = "one", reduce: str = "sum"
) -> Tensor:
    """edge_messages in plain PyTorch."""
    tensors = (*given, *([None] * (6 - len(given))))
    out = reference_edge.edge_messages(graph.edge_csr, tensors, (act, act2))
    if reduce == "mean":
        out = (out * graph.mean_scale(kernels.accumulate_type(out.dtype)).unsqueeze(1)).to(out.dtype)
    return out


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Every activation, every set of terms that a conv of PyG has."""
    n, m, e = graph.num_rows, graph.num_cols, graph.num_edges

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    yield Sample((graph, None, values(m, 5), values(e, 5)), {"act": "relu"})
    yield Sample((graph, None, values(m, 17), None, None, None, values(e, 17)), {"act2": "identity"})
    gates = (values(n, 3), values(m, 3), values(e, 3))
    yield Sample((graph, *gates, None, values(m, 3)), {"act": "sigmoid", "act2": "identity", "reduce": "mean"})
    more = (values(n, 3), values(m, 3), values(e, 3))
    yield Sample((graph, *gates, *more), {"act": "sigmoid", "act2": "softplus"})
    yield Sample((graph, values(n, 4), values(m, 4)), {"act": "silu"})


def flops(graph: Graph, *tensors: Any, **options: Any) -> int:
    """One addition per term, channel and edge, about ten operations per activation beyond relu, one for the sum."""
    width = next(t.size(1) for t in tensors if t is not None)
    costly = sum(10 for act in (options.get("act"), options.get("act2")) if act in ("sigmoid", "softplus", "silu"))
    return graph.num_edges * width * (sum(t is not None for t in tensors) + costly + 1)


def bytes_moved(graph: Graph, *tensors: Any, **options: Any) -> int:
    """One row of every column and edge term per edge, row terms and the result once."""
    found = [(i % 3, t) for i, t in enumerate(tensors) if t is not None]
    width = found[0][1].size(1) * found[0][1].element_size()
    per_edge = sum(1 for kind, _ in found if kind != 0)
    return 8 * (graph.num_rows + 1) + graph.num_edges * (4 + per_edge * width) + 2 * graph.num_rows * width


OP = Op("edge_messages", edge_messages, reference, samples, flops, bytes_moved)
