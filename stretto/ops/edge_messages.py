"""edge_messages: messages made on the fly from both ends of an edge and its features, and summed by destination.

sum over neighbours of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2), channel by channel:

    GINEConv           act="relu", col=x, edge=e
    CFConv (SchNet)    act="identity", col=x; act2="identity", edge2=filter
    ResGatedGraphConv  act="sigmoid", row=key, col=query, edge=e; act2="identity", col2=value
    CGConv             act="sigmoid", act2="softplus", both Linear layers of [x_i, x_j, e] split into their three parts
    MLP([x_i, x_j, e]) act="relu" with the first Linear split likewise; the second one follows the sum
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import expect
from stretto.graph import Graph
from stretto.kernels import backend, reference_edge
from stretto.ops import library
from stretto.ops.checks import check_shape
from stretto.ops.cost import Cost, Formula, row_bytes, wide_specs
from stretto.ops.kernel import Kernel, Sample, through
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
    """Sum (or mean) over neighbours of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2); absent terms are 0.

    graph [n, m], row and row2 [n, k], col and col2 [m, k], edge and edge2 [E, k] in the order of edge_index -> [n, k].
    act, act2: identity, relu, sigmoid, softplus, silu, or one (act2 only): no second factor.
    """
    tensors: tuple[Tensor | None, ...] = (row, col, edge, row2, col2, edge2)
    _check(graph, tensors, act, act2, reduce)
    tensors = _promoted(tensors)
    out = KERNEL(graph, *tensors, act, act2)
    if reduce == "mean":
        scale = library.mean_scale(graph, kernels.accumulate_type(out.dtype))
        out = (out * scale.unsqueeze(1)).to(out.dtype)
    return out


def run(graph: Graph, *arguments: Any) -> Tensor:
    """No autograd. arguments: the six terms and two activations."""
    out: Tensor = backend(graph.device).edge_messages(graph.edge_csr, arguments[:6], arguments[6:])
    return out


def gradient(
    graph: Graph, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], *acts: str
) -> tuple[Tensor | None, ...]:
    """No autograd: the gradient of every tensor that needs one.

    A row term's gradient is that of its edge term, summed: where the latter is made anyway, no activation is computed
    a second time.
    """
    (grad,), module = grads, backend(grads[0].device)
    csrs = graph.edge_csr, graph.T.edge_csr
    sums = [] if module.native else [s for s in (0, 3) if needs[s] and needs[s + 2] and saved[s + 2] is not None]
    fewer = tuple(need and at not in sums for at, need in enumerate(needs))
    made = list(module.edge_messages_grad(*csrs, tuple(saved), acts, grad, fewer))
    for term in sums:
        made[term] = run_sum(graph.segments, made[term + 2])
    return tuple(made)


def _plain(graph: Graph, *arguments: Any) -> Tensor:
    return reference_edge.edge_messages(graph.edge_csr, arguments[:6], arguments[6:])


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
    sizes = (graph.num_rows, graph.num_cols, graph.num_edges) * 2
    width: int | str = "k"
    for name, tensor, size in zip(_NAMES, tensors, sizes, strict=True):
        if tensor is not None:
            check_shape("edge_messages", name, tensor, graph.device, size, width)
            width = tensor.size(1)


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
    width: int = next(t.size(1) for t in tensors if t is not None)
    costly = sum(10 for act in (options.get("act"), options.get("act2")) if act in ("sigmoid", "softplus", "silu"))
    return graph.num_edges * width * (sum(t is not None for t in tensors) + costly + 1)


def bytes_moved(graph: Graph, *tensors: Any, **options: Any) -> int:
    """One row of every column and edge term per edge, row terms and the result once."""
    result = [(i % 3, t) for i, t in enumerate(tensors) if t is not None]
    width = row_bytes(result[0][1])
    per_edge = sum(1 for kind, _ in result if kind != 0)
    return 8 * (graph.num_rows + 1) + graph.num_edges * (4 + per_edge * width) + 2 * graph.num_rows * width


def _shapes(graph: Any, *arguments: Any) -> Tensor:
    term: Tensor = next(t for t in arguments if t is not None)
    return term.new_empty(graph.num_rows, term.shape[1])


def messages_cost(per_value: int, *, ways: int = 1) -> Formula:
    """Of kernels that join terms of rows, columns and edges per edge and channel, and sum over the edges of a node."""

    def cost(graph: Any, *arguments: Any, **options: Any) -> Cost:
        inputs = wide_specs(arguments)
        row = row_bytes(inputs[0])
        tables = ways * max(1, len(inputs) - 1)
        stream = ways * (graph.nbytes + 2 * graph.num_rows * row)
        flops = ways * per_value * graph.num_edges * inputs[0].shape[1] * len(inputs)
        return Cost("spmm", flops, stream, tables * graph.num_edges * row, row, tables * inputs[0].nbytes, None)

    return cost


KERNEL = Kernel(
    "edge_messages",
    "Tensor? row, Tensor? col, Tensor? edge, Tensor? row2, Tensor? col2, Tensor? edge2, str act, str act2",
    run=run,
    shapes=_shapes,
    gradient=gradient,
    again=through(_plain),
    function=edge_messages,
    reference=reference,
    samples=samples,
    flops=flops,
    bytes=bytes_moved,
    costs={"edge_messages": messages_cost(2), "edge_messages_grad": messages_cost(2, ways=2)},
)
