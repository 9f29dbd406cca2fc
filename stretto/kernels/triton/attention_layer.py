"""A whole attention layer in fp32, projections and bias included, from launches of our own alone: they can be taped.

form    parameters                             what is kept for backward
gat     weight, att_src, att_dst               values, left and right scores, stats
gatv2   (weight, bias) of left, right; att     right, left, stats
dot     (weight, bias) of query, key, value,   query, key, value, the sum before the root term is added, stats
        root
weights [h * f, i], biases [h * f] or None, att [1, h, f]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from torch import Tensor

from stretto.kernels.attention import TENSORS, Attention
from stretto.kernels.csr import Csr
from stretto.kernels.triton.attention import attention
from stretto.kernels.triton.attention_grad import attention_grad
from stretto.kernels.triton.column_sum import column_sum, sum_few
from stretto.kernels.triton.launch import kernel
from stretto.kernels.triton.operands import power, tiles
from stretto.kernels.triton.product import product, product_with_scores, weight_grad

WIDEST = 128  # columns of a head
FEW = 8  # heads at most, for sums over x
SPARED = 3  # times as wide as v that x may be, for sums over x to cost less than to go through v
Maybe = Tensor | None


@dataclass(frozen=True)
class Layer:
    """What a layer is, but for its tensors."""

    form: str
    heads: int
    width: int
    slope: float = 0.2
    scale: float = 1.0
    dropout: float = 0.0

    def attention(
        self, seed: Maybe, bias: Maybe, *, left: Tensor, right: Tensor, v: Maybe = None, att: Maybe = None
    ) -> Attention:
        """The attention between rows [n, h * f], or scalars [n, h] (left and right of gat)."""
        shape = (-1, self.heads, self.width)
        if self.form != "gat":
            left, right = left.view(shape), right.view(shape)
        return Attention(
            self.form,
            None if v is None else v.view(shape),
            left,
            right,
            None if att is None else att.view(shape[1:]),
            slope=self.slope,
            scale=self.scale,
            dropout=self.dropout,
            dropped=True,
            seed_at=seed,
            bias=bias,
        )


def forward(csr: Csr, layer: Layer, x: Tensor, seed: Maybe, bias: Maybe, *parameters: Any) -> tuple[Tensor, ...]:
    """The result [n, h * f], and what backward needs."""
    if layer.form == "gat":
        weight, att_src, att_dst = parameters
        v, right, left = product_with_scores(x, weight.t(), att_src, att_dst)
        out, _, _, stats = attention(csr, layer.attention(seed, bias, v=v, left=left, right=right), weights=False)
        return out, v, left, right, stats
    if layer.form == "gatv2":
        *maps, att = parameters
        left, right = (product(x, weight.t(), b) for weight, b in _pairs(maps))
        a = layer.attention(seed, bias, left=left, right=right, att=att)
        out, _, _, stats = attention(csr, a, weights=False)
        return out, right, left, stats
    query, key, value = (product(x, weight.t(), b) for weight, b in _pairs(parameters[:6]))
    total, _, _, stats = attention(csr, layer.attention(seed, None, v=value, left=query, right=key), weights=False)
    total = total.view(query.shape)
    weight, root_bias = parameters[6:]
    return product(x, weight.t(), root_bias, add=total), query, key, value, total, stats


@dataclass
class Step:
    """The operands of a backward pass."""

    csr: Csr
    csr_t: Csr
    layer: Layer
    needs: tuple[bool, ...]  # of x, bias and the parameters
    reuse: bool  # what forward kept is not needed again and may be overwritten
    grad: Tensor
    x: Tensor
    seed: Maybe
    bias: Maybe
    out: Tensor
    parameters: tuple[Any, ...]
    kept: tuple[Any, ...]

    def through(
        self, a: Attention, out: Tensor, grad: Tensor, needed: str, into: Any = None, totals: Any = None
    ) -> dict[str, Any]:
        """Gradients of the attention's operands, by name."""
        wanted = tuple(name in needed.split() for name in TENSORS)
        if a.bias is not None:
            wanted = (*wanted, self.needs[1])
        stats = self.kept[-1]
        found = attention_grad(self.csr, self.csr_t, a, out, None, None, stats, grad, None, None, wanted, into, totals)
        return dict(zip((*TENSORS, "bias"), found, strict=False))


def backward(
    csr: Csr,
    csr_t: Csr,
    layer: Layer,
    needs: tuple[bool, ...],
    reuse: bool,
    grad: Tensor,
    x: Tensor,
    seed: Maybe,
    bias: Maybe,
    out: Tensor,
    *rest: Maybe,
) -> list[Maybe]:
    """Gradients of x, bias and the parameters, where needed. rest: the parameters, and what forward kept."""
    count = len(needs) - 2
    run = {"gat": _gat, "gatv2": _gatv2, "dot": _dot}[layer.form]
    return run(Step(csr, csr_t, layer, needs, reuse, grad, x, seed, bias, out, rest[:count], rest[count:]))


def _gat(step: Step) -> list[Maybe]:
    v, left, right, _ = step.kept
    weight, att_src, att_dst = step.parameters
    a = step.layer.attention(step.seed, step.bias, v=v, left=left, right=right)
    found = step.through(a, step.out, step.grad, "v left right")
    dv = found["v"].view(v.shape)
    need_x, _, need_weight, need_src, need_dst = step.needs
    ends = (found["right"], found["left"], att_src, att_dst)
    if need_x or not need_weight or att_src.size(-2) > FEW or step.x.size(1) > SPARED * v.size(1):
        datt_src, datt_dst = _through_scores(dv, v, *ends)
        dweight = weight_grad(dv, step.x) if need_weight else None
    else:
        dweight = weight_grad(dv, step.x)
        datt_src, datt_dst = _through_weight(dweight, step.x, weight, *ends)
    return [
        product(dv, weight) if need_x else None,
        found["bias"],
        dweight,
        datt_src if need_src else None,
        datt_dst if need_dst else None,
    ]


def _gatv2(step: Step) -> list[Maybe]:
    right, left, _ = step.kept
    *maps, att = step.parameters
    a = step.layer.attention(step.seed, step.bias, left=left, right=right, att=att)
    need_x, _, *needs, need_att = step.needs
    totals: dict[str, Tensor] = {}
    found = step.through(a, step.out, step.grad, "left right att" if need_att else "left right", totals=totals)
    rows = (found["left"].view(left.shape), found["right"].view(right.shape))
    dx, dmaps = _through_maps(rows, step.x, maps, need_x, needs, (totals["left"], totals["right"]))
    return [dx, found["bias"], *dmaps, found["att"].view(att.shape) if need_att else None]


def _dot(step: Step) -> list[Maybe]:
    query, key, value, total, _ = step.kept
    a = step.layer.attention(step.seed, None, v=value, left=query, right=key)
    shape = (-1, step.layer.heads, step.layer.width)
    into = {"v": value, "right": total, "left": query} if step.reuse else None
    totals: dict[str, Tensor] = {}
    found = step.through(a, total.view(shape), step.grad.view(shape), "v left right", into, totals)
    rows = [found[name].view(query.shape) for name in ("left", "right", "v")]
    columns = (None, None, None, totals["out"])
    dx, dmaps = _through_maps((*rows, step.grad), step.x, step.parameters, step.needs[0], step.needs[2:], columns)
    return [dx, None, *dmaps]


def _pairs(items: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _through_maps(
    grads: Sequence[Tensor],
    x: Tensor,
    maps: Sequence[Maybe],
    need_x: bool,
    needs: Sequence[bool],
    columns: Sequence[Maybe] | None = None,
) -> tuple[Maybe, list[Maybe]]:
    """From the gradients of several x W' + b to those of x and of every W and b. columns: their sums, where known."""
    dx: Maybe = None
    found: list[Maybe] = []
    for grad, (weight, bias), (need_weight, need_bias) in zip(grads, _pairs(maps), _pairs(needs), strict=True):
        if need_x:
            dx = product(grad, weight, add=dx, out=dx)
        found.append(weight_grad(grad, x) if need_weight else None)
        known = None if columns is None else columns[len(found) // 2]
        found.append((column_sum(grad) if known is None else known) if need_bias and bias is not None else None)
    return dx, found


def _through_scores(
    dv: Tensor, v: Tensor, dright: Tensor, dleft: Tensor, att_src: Tensor, att_dst: Tensor
) -> tuple[Tensor, Tensor]:
    """gat: adds to dv [n, h * f] what the scores [n, h] owe to v; the gradients of the attention vectors."""
    rows, columns = v.shape
    heads = dright.size(1)
    width = columns // heads
    rows_each = max(64, tiles(rows, 1024))
    blocks, block = tiles(rows, rows_each), power(width, 128)
    part, part2 = v.new_empty(blocks, columns), v.new_empty(blocks, columns)
    _scores_kernel[(blocks, heads)](
        dv, v, dright, dleft, att_src, att_dst, part, part2, rows, heads, width, rows_each,
        BLOCK_R=max(1, 2048 // block), BLOCK_K=block, num_warps=4,
    )  # fmt: skip
    shape = att_src.shape
    return sum_few(part).view(shape), sum_few(part2).view(shape)


@kernel("rows", "heads", "width", "rows_each")
def _scores_kernel(
    dv, v, dright, dleft, att, att2, part, part2, rows, heads, width, rows_each,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    width = width // 4 * 4
    head = tl.program_id(1)
    live = tl.arange(0, BLOCK_K) < width
    k = head * width + tl.arange(0, BLOCK_K)
    one = tl.load(att + k, mask=live, other=0.0)[None, :]
    other = tl.load(att2 + k, mask=live, other=0.0)[None, :]
    acc = tl.full((BLOCK_R, BLOCK_K), 0.0, tl.float32)
    acc2 = tl.full((BLOCK_R, BLOCK_K), 0.0, tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_each
    last = tl.minimum(first + rows_each, rows)
    for base in range(first, last, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R)
        inside = (r < last)[:, None] & live[None, :]
        at = r[:, None] * (heads * width) + k[None, :]
        right = tl.load(dright + r * heads + head, mask=r < last, other=0.0)[:, None]
        left = tl.load(dleft + r * heads + head, mask=r < last, other=0.0)[:, None]
        values = tl.load(v + at, mask=inside, other=0.0)
        tl.store(dv + at, tl.load(dv + at, mask=inside, other=0.0) + right * one + left * other, mask=inside)
        acc += right * values
        acc2 += left * values
    to = tl.program_id(0) * (heads * width) + k
    tl.store(part + to, tl.sum(acc, 0), mask=live)
    tl.store(part2 + to, tl.sum(acc2, 0), mask=live)


def _through_weight(
    dweight: Tensor, x: Tensor, weight: Tensor, dright: Tensor, dleft: Tensor, att_src: Tensor, att_dst: Tensor
) -> tuple[Tensor, Tensor]:
    """gat, where nobody asks for the gradient of x: adds to dweight [h * f, i] what the scores [n, h] owe to it; the
    gradients of the attention vectors. Both follow from sums over rows of scores times x, so that x is read once and v
    and its gradient not at all."""
    rows, inner = x.shape
    heads = dright.size(1)
    width = weight.size(0) // heads
    each = max(64, tiles(rows, 2048))
    blocks, block = tiles(rows, each), power(inner, 128)
    part = x.new_empty(blocks, 2 * heads * inner)
    _few_kernel[(blocks, tiles(inner, block))](
        x, x.stride(0), dright, dleft, part, rows, inner, each,
        HEADS=heads, BLOCK_H=power(heads, FEW), BLOCK_R=8, BLOCK_K=block, num_warps=1,
    )  # fmt: skip
    datt_src, datt_dst = x.new_empty(att_src.shape), x.new_empty(att_dst.shape)
    _weights_kernel[(weight.size(0),)](
        sum_few(part), weight, att_src, att_dst, dweight, datt_src, datt_dst, heads, width, inner,
        BLOCK_K=power(inner, 256), num_warps=1,
    )  # fmt: skip
    return datt_src, datt_dst


@kernel("ldx", "rows", "inner", "rows_each")
def _few_kernel(
    x, ldx, dright, dleft, part, rows, inner, rows_each,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over a block of rows of dright[r, h] * x[r], and of dleft. [2, heads, columns]."""
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < inner // 4 * 4
    h = tl.arange(0, BLOCK_H)
    first = tl.program_id(0).to(tl.int64) * rows_each
    count = tl.minimum(rows_each, rows - first).to(tl.int32)
    x += first * (ldx // 4 * 4)
    dright += first * HEADS
    dleft += first * HEADS
    acc = tl.full((BLOCK_H, BLOCK_K), 0.0, tl.float32)
    acc2 = tl.full((BLOCK_H, BLOCK_K), 0.0, tl.float32)
    for base in range(0, count, BLOCK_R):
        r = base + tl.arange(0, BLOCK_R)
        there = r < count
        values = tl.load(x + r[:, None] * (ldx // 4 * 4) + k[None, :], mask=there[:, None] & live[None, :], other=0.0)
        for head in tl.static_range(HEADS):
            right = tl.load(dright + r * HEADS + head, mask=there, other=0.0)
            left = tl.load(dleft + r * HEADS + head, mask=there, other=0.0)
            mine = (h == head)[:, None]
            acc += tl.where(mine, tl.sum(right[:, None] * values, 0)[None, :], 0.0)
            acc2 += tl.where(mine, tl.sum(left[:, None] * values, 0)[None, :], 0.0)
    to = (tl.program_id(0) * 2 * HEADS + h)[:, None] * inner + k[None, :]
    inside = (h < HEADS)[:, None] & live[None, :]
    tl.store(part + to, acc, mask=inside)
    tl.store(part + to + HEADS * inner, acc2, mask=inside)


@kernel("heads", "width", "inner")
def _weights_kernel(sums, weight, att, att2, dweight, datt, datt2, heads, width, inner, BLOCK_K: tl.constexpr):
    """A row of the weight: what _few_kernel summed times its entries of the attention vectors, and their gradients."""
    row = tl.program_id(0)
    head = row // width
    one, other = tl.load(att + row), tl.load(att2 + row)
    total = tl.full((BLOCK_K,), 0.0, tl.float32)
    total2 = tl.full((BLOCK_K,), 0.0, tl.float32)
    for base in range(0, inner, BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        live = k < inner
        right = tl.load(sums + head * inner + k, mask=live, other=0.0)
        left = tl.load(sums + (heads + head) * inner + k, mask=live, other=0.0)
        values = tl.load(weight + row * inner + k, mask=live, other=0.0)
        total += right * values
        total2 += left * values
        to = dweight + row * inner + k
        tl.store(to, tl.load(to, mask=live, other=0.0) + one * right + other * left, mask=live)
    tl.store(datt + row, tl.sum(total, 0))
    tl.store(datt2 + row, tl.sum(total2, 0))
