"""Implementations, fake kernels and gradients of the attention schemas in library.py; registered.py has the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.kernels import accumulate_type
from stretto.kernels.attention import TENSORS
from stretto.ops.attention import run, run_grad
from stretto.ops.edge_messages import run as run_messages
from stretto.ops.edge_messages import run_grad as run_messages_grad
from stretto.ops.edge_softmax_sum import run as run_softmax_sum
from stretto.ops.edge_softmax_sum import run_grad as run_softmax_sum_grad
from stretto.ops.edge_statistics import run as run_statistics
from stretto.ops.edge_statistics import run_grad as run_statistics_grad

_COUNT = len(TENSORS)


def _attention(handle: Tensor, *args: Any) -> tuple[Tensor, ...]:
    tensors, (seed, form, *numbers) = args[:_COUNT], args[_COUNT : _COUNT + 7]
    return run(Graph.numbered(int(handle)), form, tuple(numbers), seed, tensors)


def _fake_attention(handle: Tensor, *args: Any) -> tuple[Tensor, ...]:
    v, left, right, _, edge, attr, _ = args[:_COUNT]
    weights, _, num_rows, num_edges = args[-4:]
    values = right if v is None else v
    heads = (edge if left is None else left).shape[1]
    acc = accumulate_type(values.dtype)
    out = values.new_empty(num_rows, heads, values.shape[2])
    out_attr = values.new_empty(num_rows, heads, attr.shape[1]) if attr is not None else values.new_empty(0)
    alpha = values.new_empty(num_edges, heads) if weights else values.new_empty(0)
    stats = values.new_empty(num_rows, heads, 2, dtype=acc)
    kept = out.shape[2] + (0 if attr is None else attr.shape[1])
    wide = values.new_empty(0 if acc == values.dtype else num_rows * heads * kept, dtype=acc)
    return out, out_attr, alpha, stats, wide


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    handle, *rest = inputs
    ctx.numbers = rest[_COUNT + 1 : _COUNT + 7]
    ctx.mark_non_differentiable(output[3], output[4])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(handle, *rest[: _COUNT + 1], *output)


def _attention_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    handle, *rest = ctx.saved_tensors
    inputs, seed, results = rest[:_COUNT], rest[_COUNT], rest[_COUNT + 1 :]
    needs = [bool(n) for n in ctx.needs_input_grad[1 : _COUNT + 1]]
    found = torch.ops.stretto.attention_grad(handle, *inputs, seed, *ctx.numbers, *results, *grads[:3], needs)
    every = tuple(g if need else None for g, need in zip(found, needs, strict=True))
    return None, *every, *([None] * 9)


def _attention_grad(handle: Tensor, *args: Any) -> list[Tensor]:
    tensors, (seed, form, *numbers) = args[:_COUNT], args[_COUNT : _COUNT + 7]
    results, grads, needs = args[_COUNT + 7 : _COUNT + 12], args[_COUNT + 12 : _COUNT + 15], args[-1]
    graph = Graph.numbered(int(handle))
    found = run_grad(graph, form, tuple(numbers), seed, tensors, results, grads, tuple(needs))
    return [results[0].new_empty(0) if g is None else g for g in found]


def _fake_attention_grad(handle: Tensor, *args: Any) -> list[Tensor]:
    needs, out = args[-1], args[_COUNT + 7]
    return [
        out.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(args[:_COUNT], needs, strict=True)
    ]


def _given(found: Any, like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if g is None else g for g in found]


def _fake_gradients(tensors: Any, needs: Any, like: Tensor) -> list[Tensor]:
    return [
        like.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(tensors, needs, strict=True)
    ]


def _messages(handle: Tensor, *args: Any) -> Tensor:
    return run_messages(Graph.numbered(int(handle)), args[:6], args[6:8])


def _fake_messages(handle: Tensor, *args: Any) -> Tensor:
    first = next(t for t in args[:6] if t is not None)
    return first.new_empty(args[8], first.shape[1])


def _save_messages(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.acts = inputs[7:9]
    ctx.save_for_backward(*inputs[:7])


def _messages_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = [bool(n) for n in ctx.needs_input_grad[1:7]]
    found = torch.ops.stretto.edge_messages_grad(*ctx.saved_tensors, *ctx.acts, grad, needs)
    return None, *(g if need else None for g, need in zip(found, needs, strict=True)), None, None, None


def _messages_grad(handle: Tensor, *args: Any) -> list[Tensor]:
    grad, needs = args[8], tuple(args[9])
    found = run_messages_grad(Graph.numbered(int(handle)), args[:6], args[6:8], grad, needs)
    return _given(found, grad)


def _softmax_sum(handle: Tensor, x: Tensor, edge: Any, heat: Tensor, act: str, shift: float, *rest: Any) -> Any:
    return run_softmax_sum(Graph.numbered(int(handle)), x, edge, heat, act, shift)


def _fake_softmax_sum(handle: Tensor, x: Tensor, edge: Any, heat: Tensor, *rest: Any) -> Any:
    shape = (rest[-1], x.shape[1])
    acc = accumulate_type(x.dtype)
    return x.new_empty(shape), *(x.new_empty(shape, dtype=acc) for _ in range(3))


def _save_softmax_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[4:7]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:4], *output[1:])


def _softmax_sum_backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    needs = [bool(n) for n in ctx.needs_input_grad[1:4]]
    saved = ctx.saved_tensors
    found = torch.ops.stretto.softmax_sum_grad(*saved[:4], *ctx.options, *saved[4:], grad, needs)
    return None, *(g if need else None for g, need in zip(found, needs, strict=True)), None, None, None, None


def _softmax_sum_grad(handle: Tensor, x: Tensor, edge: Any, heat: Tensor, *rest: Any) -> list[Tensor]:
    options, kept, grad, needs = rest[:3], rest[3:6], rest[6], tuple(rest[7])
    found = run_softmax_sum_grad(Graph.numbered(int(handle)), x, edge, heat, options, kept, grad, needs)
    return _given(found, grad)


def _statistics(handle: Tensor, x: Tensor, own: Any, names: Any, num_rows: int) -> Tensor:
    return run_statistics(Graph.numbered(int(handle)), x, own, tuple(names))


def _fake_statistics(handle: Tensor, x: Tensor, own: Any, names: Any, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, len(names), x.shape[1])


def _save_statistics(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.names = inputs[3]
    ctx.save_for_backward(*inputs[:3])


def _statistics_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = [bool(n) for n in ctx.needs_input_grad[1:3]]
    found = torch.ops.stretto.statistics_grad(*ctx.saved_tensors, ctx.names, grad, needs)
    return None, *(g if need else None for g, need in zip(found, needs, strict=True)), None, None


def _statistics_grad(handle: Tensor, x: Tensor, own: Any, names: Any, grad: Tensor, needs: Any) -> list[Tensor]:
    found = run_statistics_grad(Graph.numbered(int(handle)), x, own, tuple(names), grad, tuple(needs))
    return _given(found, grad)


# name -> (implementation, fake kernel, save for backward, backward)
ENTRIES: dict[str, tuple[Any, Any, Any, Any]] = {
    "attention": (_attention, _fake_attention, _save_attention, _attention_backward),
    "attention_grad": (_attention_grad, _fake_attention_grad, None, None),
    "edge_messages": (_messages, _fake_messages, _save_messages, _messages_backward),
    "edge_messages_grad": (
        _messages_grad,
        lambda handle, *args: _fake_gradients(args[:6], args[9], args[8]),
        None,
        None,
    ),
    "softmax_sum": (_softmax_sum, _fake_softmax_sum, _save_softmax_sum, _softmax_sum_backward),
    "softmax_sum_grad": (
        _softmax_sum_grad,
        lambda handle, *args: _fake_gradients(args[:3], args[10], args[9]),
        None,
        None,
    ),
    "statistics": (_statistics, _fake_statistics, _save_statistics, _statistics_backward),
    "statistics_grad": (
        _statistics_grad,
        lambda handle, *args: _fake_gradients(args[:2], args[4], args[3]),
        None,
        None,
    ),
}
