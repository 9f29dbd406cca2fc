"""Implementations, fake kernels and gradients of the attention schemas in library.py; registered.py has the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.kernels import accumulate_type
from stretto.kernels.attention import TENSORS
from stretto.ops.attention import run, run_grad

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


# name -> (implementation, fake kernel, save for backward, backward)
ENTRIES: dict[str, tuple[Any, Any, Any, Any]] = {
    "attention": (_attention, _fake_attention, _save_attention, _attention_backward),
    "attention_grad": (_attention_grad, _fake_attention_grad, None, None),
}
