"""Implementations, fake kernels and gradients of the schemas in library.py: what torch.compile and torch.export see.

Each implementation looks its graph up by number and runs the same code as eager mode. Mixed types have met before an op
gets here (the functions promote to the wider type), so autocast needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.graph import Graph
from stretto.kernels import accumulate_type, reference
from stretto.ops import extremum, matmul, registered_attention, rows, segment, softmax
from stretto.ops.library import LIBRARY
from stretto.ops.sddmm import run as run_sddmm
from stretto.ops.spmm import run as run_spmm


def _look_up(handle: Tensor, transposed: bool = False) -> Graph:
    graph = Graph.numbered(int(handle))
    return graph.T if transposed else graph


def _rowwise(scale: Tensor, like: Tensor) -> Tensor:
    return scale.to(like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


# ---- implementations ----


def _graph(edge_index: Tensor, num_src: int, num_dst: int, flow: str) -> Tensor:
    return Graph.of(edge_index, (num_src, num_dst), flow=flow).handle.clone()


def _segments(index: Tensor, num_segments: int) -> Tensor:
    return Graph.of_segments(index, num_segments).handle.clone()


def _transposed(handle: Tensor) -> Tensor:
    return _look_up(handle).T.handle.clone()


def _segments_of(handle: Tensor) -> Tensor:
    return _look_up(handle).segments.handle.clone()


def _segment_index(handle: Tensor, num_edges: int, device: torch.device) -> Tensor:
    return _look_up(handle).segment_index.to(torch.int64, copy=True)


def _mean_scale(handle: Tensor, num_rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _look_up(handle).mean_scale(dtype).clone()


def _spmm(
    handle: Tensor,
    x: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    y: Tensor | None,
    beta: float,
    num_rows: int,
    num_cols: int,
    transposed: bool,
) -> Tensor:
    return run_spmm(_look_up(handle, transposed), x, weight, row_scale, col_scale, y, beta)


def _extremum(
    handle: Tensor, x: Tensor, weight: Tensor | None, own: Tensor | None, reduce: str, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    out, most, ties = extremum.run(_look_up(handle), x, weight, own, reduce, ties=True)
    assert ties is not None
    return out, x.new_empty(0) if own is None else most, ties


def _extremum_grad(
    handle: Tensor, x: Tensor, weight: Tensor | None, out: Tensor, most: Tensor, ties: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    moved = most.shape == out.shape
    results = (out, most if moved else out, ties)
    needs = (True, weight is not None, moved)
    dx, dweight, down = extremum.run_grad(_look_up(handle), x, weight, results, grad, needs=needs)
    assert dx is not None
    return dx, x.new_empty(0) if dweight is None else dweight, x.new_empty(0) if down is None else down


def _sddmm(handle: Tensor, a: Tensor, b: Tensor, op: str, num_edges: int, transposed: bool) -> Tensor:
    return run_sddmm(_look_up(handle, transposed), a, b, op)


def _edge_softmax(handle: Tensor, score: Tensor) -> Tensor:
    return softmax.run(_look_up(handle), score)


def _edge_softmax_grad(handle: Tensor, alpha: Tensor, grad: Tensor) -> Tensor:
    return softmax.run_grad(_look_up(handle), alpha, grad)


def _scatter_rows(src: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return rows.run_sum(Graph.of_segments(index, num_rows), src)


def _segment_mul(handle: Tensor, src: Tensor, num_rows: int) -> Tensor:
    return segment.run_mul(_look_up(handle), src)


def _segment_mul_grad(handle: Tensor, src: Tensor, grad: Tensor) -> Tensor:
    return segment.run_mul_grad(_look_up(handle), src, grad)


# ---- fake kernels: shapes and types only ----


def _fake_handle(*args: Any) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_spmm(handle, x, weight, row_scale, col_scale, y, beta, num_rows, num_cols, transposed):
    return x.new_empty(num_rows, *x.shape[1:])


def _fake_extremum(handle, x, weight, own, reduce, num_rows):
    out = x.new_empty(num_rows, *x.shape[1:])
    most = x.new_empty(0) if own is None else torch.empty_like(out)
    return out, most, out.new_empty(out.shape, dtype=accumulate_type(x.dtype))


def _fake_extremum_grad(handle, x, weight, out, most, ties, grad):
    def like(tensor):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return like(x), x.new_empty(0) if weight is None else like(weight), like(most)


def _fake_sddmm(handle, a, b, op, num_edges, transposed):
    return a.new_empty(num_edges, a.shape[1])


def _contiguous_like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


# ---- gradients ----


def _save_spmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    handle, x, weight, row_scale, col_scale, y, ctx.beta, ctx.num_rows, ctx.num_cols, ctx.transposed = inputs
    ctx.num_edges = None if weight is None else weight.shape[0]
    ctx.y_dtype = None if y is None else y.dtype
    ctx.save_for_backward(handle, x if weight is not None else None, weight, row_scale, col_scale)


def _spmm_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    handle, x, weight, row_scale, col_scale = ctx.saved_tensors
    dx = torch.ops.stretto.spmm(
        handle, grad, weight, col_scale, row_scale, None, 1.0, ctx.num_cols, ctx.num_rows, not ctx.transposed
    )
    dweight = None
    if weight is not None and ctx.needs_input_grad[2]:
        g = grad if row_scale is None else grad * _rowwise(row_scale, grad)
        v = x if col_scale is None else x * _rowwise(col_scale, x)
        if weight.dim() == 1:
            g, v = g.flatten(1).unsqueeze(1), v.flatten(1).unsqueeze(1)
        dweight = torch.ops.stretto.sddmm(handle, g, v, "dot", ctx.num_edges, ctx.transposed).reshape(weight.shape)
    dy = (grad * ctx.beta).to(ctx.y_dtype) if ctx.needs_input_grad[5] else None
    return None, dx, dweight, None, None, dy, None, None, None, None


def _save_extremum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    handle, x, weight, _, _, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(handle, x, weight, *output)


def _extremum_backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    dx, dweight, down = torch.ops.stretto.extremum_grad(*ctx.saved_tensors, grad)
    _, need_weight, need_own = ctx.needs_input_grad[1:4]
    return None, dx, dweight if need_weight else None, down if need_own else None, None, None


def _save_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    handle, a, b, ctx.op, _, ctx.transposed = inputs
    ctx.sizes = (a.shape[0], b.shape[0])
    ctx.save_for_backward(handle, a, b)


def _sddmm_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    handle, a, b = ctx.saved_tensors
    n, m = ctx.sizes
    t = ctx.transposed
    if ctx.op == "dot":
        da = torch.ops.stretto.spmm(handle, b, grad, None, None, None, 1.0, n, m, t)
        db = torch.ops.stretto.spmm(handle, a, grad, None, None, None, 1.0, m, n, not t)
    else:  # a dot product with ones sums a row's edges
        ones = grad.new_ones(grad.shape[1], 1)
        da = torch.ops.stretto.spmm(handle, ones.expand(m, -1, -1), grad, None, None, None, 1.0, n, m, t).squeeze(2)
        db = torch.ops.stretto.spmm(handle, ones.expand(n, -1, -1), grad, None, None, None, 1.0, m, n, not t).squeeze(2)
    return None, da, db, None, None, None


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _softmax_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    handle, alpha = ctx.saved_tensors
    return None, torch.ops.stretto.edge_softmax_grad(handle, alpha, grad)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(index)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.stretto.scatter_rows(grad, ctx.saved_tensors[0], ctx.num_rows), None


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.stretto.gather_rows(grad, ctx.saved_tensors[0]), None, None


def _save_mul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _mul_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    handle, src = ctx.saved_tensors
    return None, torch.ops.stretto.segment_mul_grad(handle, src, grad), None


def _save_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.ptr, weight = inputs
    ctx.save_for_backward(x, weight)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx = torch.ops.stretto.segment_matmul(grad, ctx.ptr, weight.transpose(1, 2))
    return dx, None, matmul.weight_grad(x, ctx.ptr, grad)


# name -> (implementation, fake kernel, save for backward, backward)
REGISTERED: dict[
    str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None, Callable[..., Any] | None]
] = {
    "graph": (_graph, _fake_handle, None, None),
    "segments": (_segments, _fake_handle, None, None),
    "transposed": (_transposed, _fake_handle, None, None),
    "segments_of": (_segments_of, _fake_handle, None, None),
    "segment_index": (
        _segment_index,
        lambda h, e, device: torch.empty(e, dtype=torch.int64, device=device),
        None,
        None,
    ),
    "mean_scale": (_mean_scale, lambda h, n, dtype, device: torch.empty(n, dtype=dtype, device=device), None, None),
    "spmm": (_spmm, _fake_spmm, _save_spmm, _spmm_grad),
    "extremum": (_extremum, _fake_extremum, _save_extremum, _extremum_backward),
    "extremum_grad": (_extremum_grad, _fake_extremum_grad, None, None),
    "sddmm": (_sddmm, _fake_sddmm, _save_sddmm, _sddmm_grad),
    "edge_softmax": (_edge_softmax, lambda h, score: _contiguous_like(score), _save_softmax, _softmax_backward),
    "edge_softmax_grad": (_edge_softmax_grad, lambda h, alpha, grad: _contiguous_like(alpha), None, None),
    "gather_rows": (
        rows.run_gather,
        lambda x, index: x.new_empty(index.shape[0], *x.shape[1:]),
        _save_gather,
        _gather_backward,
    ),
    "scatter_rows": (
        _scatter_rows,
        lambda src, index, n: src.new_empty(n, *src.shape[1:]),
        _save_scatter,
        _scatter_backward,
    ),
    "segment_mul": (_segment_mul, lambda h, src, n: src.new_empty(n, src.shape[1]), _save_mul, _mul_backward),
    "segment_mul_grad": (_segment_mul_grad, lambda h, src, grad: _contiguous_like(src), None, None),
    "segment_matmul": (
        reference.segment_matmul,
        lambda x, ptr, weight: x.new_empty(x.shape[0], weight.shape[2]),
        _save_matmul,
        _matmul_backward,
    ),
    **registered_attention.ENTRIES,
}

for _name, (_implementation, _fake, _save, _backward) in REGISTERED.items():
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stretto::{_name}", _fake, lib=LIBRARY)
    if _save is not None and _backward is not None:
        torch.library.register_autograd(f"stretto::{_name}", _backward, setup_context=_save, lib=LIBRARY)
