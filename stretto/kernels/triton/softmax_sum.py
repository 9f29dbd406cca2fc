"""softmax_sum in Triton: softmax aggregation channel by channel, in one pass over a row's edges.

Every lane keeps its running maximum, sum of exponentials and weighted sum; they meet at the end of a piece. Backward is
one pass over the transposed edges from the two numbers kept per row and channel.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor

from stretto.kernels.csr import Csr
from stretto.kernels.reference_edge import ACTS
from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton.activations import through, value_of
from stretto.kernels.triton.attention_forward import rescale
from stretto.kernels.triton.column_sum import column_sum
from stretto.kernels.triton.edge_messages import blocks, leave, merge
from stretto.kernels.triton.launch import jit, kernel
from stretto.kernels.triton.operands import acc_of, at_entry, hub_of, locate, offsets, tiles, vector
from stretto.kernels.triton.pieces import pieces


@functools.lru_cache(maxsize=64)
def _shift(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A kernel's own scalar would be fp32."""
    return torch.tensor([value], dtype=dtype).to(device)


@jit
def fold(m, total, acc):
    """The lanes of a tile into one. [columns] each."""
    most = tl.max(m, 0)
    factor = rescale(m, most[None, :])
    return most, tl.sum(total * factor, 0), tl.sum(acc * factor, 0)


@jit
def finish(most, total, acc, row, k, width, live, some, out, kept_most, kept_inverse):
    """Normalise and store a row; a row without edges is 0."""
    inverse = tl.where(some, 1.0 / total, 0.0)
    at = row * width + k
    tl.store(out + at, tl.where(some, acc * inverse, 0.0), mask=live)
    tl.store(kept_most + at, tl.where(some, most, 0.0), mask=live)
    tl.store(kept_inverse + at, inverse, mask=live)


@jit
def argument(x, edge, at_x, at_edge, inside, ACC: tl.constexpr):
    u = tl.load(x + at_x, mask=inside, other=0.0).to(ACC)
    if edge is not None:
        u += tl.load(edge + at_edge, mask=inside, other=0.0).to(ACC)
    return u


@kernel("windows", "chunk", "width")
def _pieces(
    rowptr, row_of, windows, chunk, col, edge_id, x, edge, heat, shift, out, kept_most, kept_inverse, part, width,
    ACT: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    wide = width // VEC * VEC
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < wide
    warmth = tl.load(heat + k, mask=live, other=0.0)[None, :]
    add = tl.load(shift)
    m = tl.full((BLOCK_E, BLOCK_K), float("-inf"), ACC)
    total = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    acc = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & live[None, :]
        at_x = (at_entry(col, e, there, INT) * wide)[:, None] + k[None, :]
        at_edge = (at_entry(edge_id, e, there, INT) * wide)[:, None] + k[None, :]
        y = value_of(argument(x, edge, at_x, at_edge, inside, ACC), ACT) + add
        s = y * warmth
        most = tl.where(inside & ((s > m) | (s != s)), s, m)
        factor = rescale(m, most)
        p = tl.where(inside & (s != float("-inf")), tl.exp(s - most), 0.0)
        total = total * factor + p
        acc = acc * factor + p * y
        m = most
    most, total, acc = fold(m, total, acc)
    if slot >= 0:
        at = slot.to(tl.int64) * 3 * width + k
        tl.store(part + at, most, mask=live)
        tl.store(part + at + width, total, mask=live)
        tl.store(part + at + 2 * width, acc, mask=live)
    else:
        finish(most, total, acc, row, k, width, live, end > start, out, kept_most, kept_inverse)


@kernel("windows", "chunk", "width")
def _hubs(
    rowptr, row_of, windows, chunk, part, out, kept_most, kept_inverse, width,
    ACC: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, first, last = hub_of(tl.program_id(0), rowptr, row_of, chunk)
    if (row < 0) | (first != tl.program_id(0)):
        return
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < width
    m = tl.full((BLOCK_S, BLOCK_K), float("-inf"), ACC)
    total = tl.full((BLOCK_S, BLOCK_K), 0.0, ACC)
    acc = tl.full((BLOCK_S, BLOCK_K), 0.0, ACC)
    for base in range(first, last, BLOCK_S):
        n = base + tl.arange(0, BLOCK_S)
        inside = (n < last)[:, None] & live[None, :]
        at = (n * 3 * width)[:, None] + k[None, :]
        s = tl.load(part + at, mask=inside, other=float("-inf"))
        most = tl.where((s > m) | (s != s), s, m)
        factor, share = rescale(m, most), rescale(s, most)
        total = total * factor + tl.load(part + at + width, mask=inside, other=0.0) * share
        acc = acc * factor + tl.load(part + at + 2 * width, mask=inside, other=0.0) * share
        m = most
    most, total, acc = fold(m, total, acc)
    finish(most, total, acc, row, k, width, live, last > first, out, kept_most, kept_inverse)


@kernel("windows", "chunk", "width")
def _backward(
    rowptr, row_of, windows, chunk, col, edge_id, x, edge, heat, shift, out, kept_most, kept_inverse, grad,
    dx, dedge, dheat, part, part_heat, width,
    ACT: tl.constexpr, DETACHED: tl.constexpr, ACC: tl.constexpr, INT: tl.constexpr, VEC: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows are sources, columns destinations. dheat [m, k]: each source's share."""
    row, slot, start, end = locate(tl.program_id(0), rowptr, row_of, windows, chunk)
    if row < 0:
        return
    wide = width // VEC * VEC
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < wide
    warmth = tl.load(heat + k, mask=live, other=0.0)[None, :]
    add = tl.load(shift)
    at_x = (row * wide + k)[None, :]
    acc = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    acc_heat = tl.full((BLOCK_E, BLOCK_K), 0.0, ACC)
    for base in range(start, end, BLOCK_E):
        e = base + tl.arange(0, BLOCK_E)
        there = e < end
        inside = there[:, None] & live[None, :]
        at = (at_entry(col, e, there, INT) * wide)[:, None] + k[None, :]
        at_edge = (at_entry(edge_id, e, there, INT) * wide)[:, None] + k[None, :]
        u = argument(x, edge, at_x, at_edge, inside, ACC)
        y = value_of(u, ACT) + add
        most = tl.load(kept_most + at, mask=inside, other=0.0)
        p = tl.exp(y * warmth - most) * tl.load(kept_inverse + at, mask=inside, other=0.0)
        flow = tl.where(inside, p * tl.load(grad + at, mask=inside, other=0.0).to(ACC), 0.0)
        beyond = y - tl.load(out + at, mask=inside, other=0.0)
        acc_heat += tl.where(inside, flow * beyond * y, 0.0)
        if not DETACHED:
            flow = flow * (1.0 + warmth * beyond)
        d = tl.where(inside, through(flow, u, ACT), 0.0)
        acc += d
        if dedge is not None:
            tl.store(dedge + at_edge, d.to(dedge.dtype.element_ty), mask=inside)
    if dx is not None:
        leave(tl.sum(acc, 0), dx, part, row, slot, k, width, live)
    if dheat is not None:
        leave(tl.sum(acc_heat, 0), dheat, part_heat, row, slot, k, width, live)


def softmax_sum(
    csr: Csr, x: Tensor, edge: Tensor | None, temperature: Tensor, act: str, shift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax aggregation; out, and the two statistics backward needs, in the accumulation type. [n, k] each."""
    acc, width = accumulate_type(x.dtype), x.size(1)
    x, heat, edge = x.contiguous(), temperature.to(acc).contiguous(), None if edge is None else edge.contiguous()
    out, most, inverse = (x.new_empty(csr.num_rows, width, dtype=acc) for _ in range(3))
    if out.numel():
        cut = pieces(csr)
        edges, cols = blocks(width)
        part = x.new_empty(cut.windows, 3, width, dtype=acc)
        across = tiles(width, cols)
        _pieces[(cut.count, across)](
            *cut.args, csr.col, csr.edge_id, x, edge, heat, _shift(shift, acc, x.device), out, most, inverse, part,
            width, ACT=ACTS.index(act), ACC=acc_of(x.dtype), INT=offsets(x, edge, most=csr.num_edges * width),
            VEC=vector(x, edge, width=width), BLOCK_E=edges, BLOCK_K=cols, num_warps=1,
        )  # fmt: skip
        if cut.windows:
            _hubs[(cut.windows, across)](
                *cut.args, part, out, most, inverse, width, ACC=acc_of(x.dtype), BLOCK_S=4, BLOCK_K=cols, num_warps=1
            )  # fmt: skip
    return out, most, inverse


def softmax_sum_grad(
    csr: Csr,
    csr_t: Csr,
    x: Tensor,
    edge: Tensor | None,
    temperature: Tensor,
    act: str,
    shift: float,
    detached: bool,
    kept: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, edge and temperature."""
    acc, width = accumulate_type(x.dtype), x.size(1)
    x, heat, grad = x.contiguous(), temperature.to(acc).contiguous(), grad.contiguous()
    edge = None if edge is None else edge.contiguous()
    out, most, inverse = kept
    dx = x.new_empty(x.shape) if needs[0] else None
    dedge = edge.new_empty(edge.shape) if needs[1] and edge is not None else None
    dheat = x.new_empty(x.shape, dtype=acc) if needs[2] else None
    if x.numel():
        cut = pieces(csr_t)
        edges, cols = blocks(width)
        parts = [None if t is None else x.new_empty(cut.windows, width, dtype=acc) for t in (dx, dheat)]
        _backward[(cut.count, tiles(width, cols))](
            *cut.args, csr_t.col, csr_t.edge_id, x, edge, heat, _shift(shift, acc, x.device), out, most, inverse, grad,
            dx, dedge, dheat, *parts, width, ACT=ACTS.index(act), DETACHED=detached, ACC=acc_of(x.dtype),
            INT=offsets(x, edge, grad, most=csr.num_edges * width), VEC=vector(x, edge, grad, out, width=width),
            BLOCK_E=edges, BLOCK_K=cols, num_warps=1,
        )  # fmt: skip
        merge(cut, parts[0], dx)
        merge(cut, parts[1], dheat)
    return dx, dedge, None if dheat is None else column_sum(dheat)
