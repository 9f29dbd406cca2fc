"""Gradients of attention in Triton: which launches a backward pass needs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stretto.kernels.attention import TENSORS, Attention
from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton import attention_backward as backward
from stretto.kernels.triton import attention_rows as by_row
from stretto.kernels.triton.attention import BIAS_WIDTH, Call, by_edge, sum_attr, weighted, weights_of
from stretto.kernels.triton.column_sum import sum_few
from stretto.kernels.triton.operands import acc_of, power, rows, tiles, vector
from stretto.kernels.triton.pieces import pieces
from stretto.kernels.triton.row_sums import merge, row_sums
from stretto.kernels.triton.spmm import spmm


def attention_grad(
    csr: Csr,
    csr_t: Csr,
    a: Attention,
    out: Tensor,
    out_attr: Tensor | None,
    alpha: Tensor | None,
    stats: Tensor,
    grad: Tensor,
    grad_attr: Tensor | None,
    grad_alpha: Tensor | None,
    needs: tuple[bool, ...],
    into: dict[str, Tensor] | None = None,
    totals: dict[str, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of a.tensors where needed, rows in their type, scalars in the accumulation type; of a bias, too.

    into (dot): arrays that v's, left's and right's may be written to, one of which may be `out`, and the others v and
    left themselves. totals: is given the sums over all rows of left's and right's (gatv2), or of grad (dot).
    """
    if a.bias is not None:
        out, grad = (t.view(csr.num_rows, a.heads, a.values.size(2)) for t in (out, grad.contiguous()))
    grad = rows(grad)
    call = Call(a, csr.num_edges, (grad,))
    need = dict(zip(TENSORS, needs, strict=False))  # one more: whether a bias needs its gradient
    grad_attr, grad_alpha = _handed_out(call, grad_attr, grad_alpha)
    ends = dbias = None
    if a.form != "weight":
        more = _more(csr, out_attr, alpha, grad_attr, grad_alpha)
        ends, dbias = _ends_and_total(a, out, grad, stats, more, needs, totals)
    sums = _Sums(csr, call, need, into if into is not None and call.across == 1 and a.v is not None else {})
    if csr_t.num_rows and call.heads:
        _transposed(csr_t, call, grad, grad_attr, grad_alpha, ends, sums)
    found: dict[str, Tensor | None] = dict.fromkeys(TENSORS)
    if a.form == "gatv2":
        _finish_gatv2(csr, call, sums, found, need, totals)
    else:
        _finish(csr, call, sums, found)
    _add_values(call, sums.dv, found)
    if call.attr is not None:
        if need["query"] and call.query is not None and sums.dscore is not None:
            found["query"] = sum_attr(csr, sums.dscore, call.attr)
        found["attr"] = _attributes(csr, call, stats, sums.dscore, grad_attr) if need["attr"] else None
    every = tuple(found[name] if need[name] else None for name in TENSORS)
    return every if a.bias is None else (*every, dbias)


def _handed_out(call: Call, grad_attr: Tensor | None, grad_alpha: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of averaged attributes and of weights as kernels take them."""
    by_attr = None if call.a.attr is None or grad_attr is None else grad_attr.contiguous()
    return by_attr, None if grad_alpha is None else call.scalars(grad_alpha)


def _ends_and_total(
    a: Attention,
    out: Tensor,
    grad: Tensor,
    stats: Tensor,
    more: Tensor | None,
    needs: tuple[bool, ...],
    totals: dict[str, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """_ends, and the gradient of a bias or what `totals` is to be given of out, where either is wanted."""
    wanted = needs[-1] if a.bias is not None else totals is not None and a.form == "dot"
    ends, total = _ends(out, grad, stats, more, a.bias, need_sum=wanted)
    if a.bias is None and totals is not None and total is not None:
        totals["out"] = total
    return ends, total


class _Sums:
    """What the pass over the transposed edges fills, where a wanted gradient follows from it.

    given: arrays that may be used. Sums of rows keep the accumulation type where something is still to be added or
    multiplied.
    """

    def __init__(self, csr: Csr, call: Call, need: dict[str, bool], given: dict[str, Tensor]) -> None:
        a, self.given = call.a, given
        self.need_att = need["att"] and a.att is not None
        self.need_left = (need["left"] or self.need_att) and a.left is not None
        self.need_edge = a.edge is not None and (need["edge"] or (self.need_att and call.rows))
        need_right = (need["right"] or self.need_att) and a.right is not None
        h, new = call.heads, functools.partial(call.v.new_empty, dtype=call.acc)
        self.dv = self.dright = self.dscore = None
        if need["v"] if a.v is not None else need["right"]:
            self.dv = self._values(csr, call)
        if need_right:
            self.dright = self._rights(csr, call)
        edges = call.rows and self.need_edge and a.form == "gatv2"
        self.dedge = new(csr.num_edges, h, call.score_width) if edges else None
        if self.need_left or need["query"] or need["attr"] or (self.need_edge and not call.rows):
            self.dscore = new(csr.num_edges, h)

    def _values(self, csr: Csr, call: Call) -> Tensor:
        shape = (csr.num_cols, call.heads, call.width)
        if "v" in self.given:
            return self.given["v"].view(shape)
        return call.v.new_empty(shape, dtype=call.acc if _rough(call.a) or call.value_step == 0 else call.dtype)

    def _rights(self, csr: Csr, call: Call) -> Tensor:
        shape = (csr.num_cols, call.heads, call.score_width)
        if "right" in self.given:
            return self.given["right"].view(shape)
        dtype = call.dtype if call.rows and not _rough(call.a) and call.right_step else call.acc
        return call.v.new_empty(shape if call.rows else shape[:2], dtype=dtype)


def _rough(a: Attention) -> bool:
    """Whether sums of rows are still to be multiplied by att, or added to others."""
    return a.form == "gatv2" or a.v is None


def _finish_gatv2(
    csr: Csr,
    call: Call,
    sums: _Sums,
    found: dict[str, Tensor | None],
    need: dict[str, bool],
    totals: dict[str, Tensor] | None,
) -> None:
    """The gradients of both ends, of edges and of att. The sums by source are finished, and their memory is free again,
    before those by destination are made."""
    shared = call.a.v is None and call.value_step == call.right_step
    parts: list[Tensor] = []  # of the gradient of att
    _finish_rows(call, found, "right", sums.dright, call.right, sums.dv if shared else None, need, parts, totals)
    _finish_rows(call, found, "edge", sums.dedge, call.edge, None, need, parts, totals)
    sums.dv, sums.dright, sums.dedge = None if shared else sums.dv, None, None
    if sums.need_left and sums.dscore is not None:
        _finish_rows(call, found, "left", _left(csr, call, sums.dscore), call.left, None, need, parts, totals)
    if sums.need_att and call.att is not None:
        found["att"] = _sum_parts(call.att, parts)
    if found["edge"] is not None and call.a.edge is not None:
        found["edge"] = found["edge"].view(call.a.edge.shape)


def _finish(csr: Csr, call: Call, sums: _Sums, found: dict[str, Tensor | None]) -> None:
    """The gradients of both ends and of scalars of edges, of the other forms."""
    if sums.need_left and sums.dscore is not None and call.right is not None:
        by_scalars = call.a.form == "gat"
        found["left"] = (
            row_sums(csr, sums.dscore) if by_scalars else weighted(csr, sums.dscore, call.right, sums.given.get("left"))
        )
    found["right"] = sums.dright
    if sums.need_edge and not call.rows:
        found["edge"] = sums.dscore


def _add_values(call: Call, dv: Tensor | None, found: dict[str, Tensor | None]) -> None:
    """The gradient of the values, which may be the right end's rows; rows get their type."""
    if found["right"] is not None and call.rows and call.right_step == 0:
        found["right"] = found["right"].sum(1, keepdim=True)
    apart = call.a.v is not None
    if dv is not None:
        if call.value_step == 0:
            dv = dv.sum(1, keepdim=True)
        before = found["v" if apart else "right"]
        found["v" if apart else "right"] = (dv if before is None or apart else before + dv).to(call.dtype)
    for name in ("left", "right") if call.rows else ():
        value = found[name]
        found[name] = None if value is None else value.to(call.dtype)


def _transposed(
    csr_t: Csr,
    call: Call,
    grad: Tensor,
    grad_attr: Tensor | None,
    grad_alpha: Tensor | None,
    ends: Tensor | None,
    sums: _Sums,
) -> None:
    """The pass over the transposed edges. A row's dright of gatv2 and dedge still lack the factor att."""
    cut, h = pieces(csr_t), call.heads
    slots, dv, dright = cut.windows, sums.dv, sums.dright
    part = call.v.new_empty(slots, h, call.width, dtype=call.acc) if dv is not None else None
    part_right = dright.new_empty((slots, *dright.shape[1:]), dtype=call.acc) if dright is not None else None
    inputs = call.ends()
    if grad_attr is not None:
        inputs["attr"] = call.attr
    backward.pieces_kernel[(cut.count, call.head_tiles, call.across)](
        *cut.args, csr_t.col, csr_t.edge_id, call.v, call.v.stride(0), grad=grad, ldg=grad.stride(0),
        grad_attr=grad_attr, grad_alpha=grad_alpha, ends=ends, dv=dv, dright=dright, dedge=sums.dedge,
        dscore=sums.dscore, part=part, part_right=part_right, width=call.width, value_step=call.value_step,
        ALPHA_DROPPED=call.a.dropped, WIDE=call.wide, VEC=call.vec, **inputs, **call.flags(),
    )  # fmt: skip
    if part is not None and dv is not None:
        merge(cut, part, dv)
    if part_right is not None and dright is not None:
        merge(cut, part_right, dright)


def _left(csr: Csr, call: Call, dscore: Tensor) -> Tensor:
    """By destination: the sum of dscore * leaky_relu'(z), without the factor att. [n, h, k]"""
    assert call.left is not None
    assert call.right is not None
    cut, h, width = pieces(csr), call.heads, call.score_width
    dleft = dscore.new_empty(csr.num_rows, h, width)
    part = dscore.new_empty(cut.windows, h, width)
    backward.left_kernel[(cut.count, call.head_tiles, tiles(width, call.block))](
        *cut.args, csr.col, csr.edge_id, call.left, call.left.stride(0), call.right,
        call.right.stride(0), call.edge, dscore, call.constants, dleft, part, h, width, call.right_step,
        TWO=call.two, EVEN=call.even, WIDE=call.wide, ACC=acc_of(call.dtype), INT=call.int, VEC=call.vec,
        BLOCK_E=call.edges, BLOCK_H=call.block_heads, BLOCK_F=call.tile_width, num_warps=call.warps,
    )  # fmt: skip
    merge(cut, part, dleft)
    return dleft


def _finish_rows(
    call: Call,
    found: dict[str, Tensor | None],
    name: str,
    sums: Tensor | None,
    near: Tensor | None,
    more: Tensor | None,
    need: dict[str, bool],
    parts: list[Tensor],
    totals: dict[str, Tensor] | None,
) -> None:
    """gatv2: the sums t at one end times att (plus more), and that end's share of datt = sum of t * z over edges."""
    if sums is not None and near is not None:
        kept = parts if need["att"] else None
        found[name] = _times_att(call, sums, near, more, want=need[name], parts=kept, name=name, totals=totals)


def _times_att(
    call: Call,
    sums: Tensor,
    near: Tensor,
    more: Tensor | None,
    *,
    want: bool,
    parts: list[Tensor] | None,
    name: str,
    totals: dict[str, Tensor] | None,
) -> Tensor | None:
    """sums * att + more, and the sums over blocks of rows of sums * near. sums, more [r, h, k], near [r, h or 1, k]."""
    att = call.att
    assert att is not None
    rows, columns = sums.size(0), sums.size(1) * sums.size(2)
    if sums.numel() == 0:
        return sums.to(call.dtype) if want else None
    near = near.view(sums.shape) if near.dim() != 3 else near
    dtype = call.dtype if call.right_step else call.acc  # heads that share a row are still to be added
    out = (
        (sums if sums.dtype == dtype else torch.empty_like(sums, dtype=dtype)) if want else None
    )  # in place if it fits
    rows_each = max(64, tiles(rows, 1024))
    blocks = tiles(rows, rows_each)
    part = sums.new_empty(blocks, columns) if parts is not None else None
    block = power(columns, 128)
    part_out = sums.new_empty(blocks, columns) if totals is not None and out is not None else None
    near_columns = near.size(1) * near.size(2)
    by_row.finish_kernel[(blocks, tiles(columns, block))](
        sums, near, near.stride(0), att, more, out, part, part_out, rows, columns, near_columns, rows_each,
        SHARED=near_columns != columns, ACC=acc_of(call.dtype),
        VEC=min(vector(sums, near, more, width=columns), vector(near, width=near_columns)),
        BLOCK_R=max(1, 2048 // block), BLOCK_K=block, num_warps=4,
    )  # fmt: skip
    if totals is not None and part_out is not None:
        totals[name] = sum_few(part_out)
    if parts is not None and part is not None:
        parts.append(part)
    return out


def _sum_parts(att: Tensor, parts: list[Tensor]) -> Tensor:
    """The gradient of att from the blocks of both ends and of the edges."""
    if not parts:
        return torch.zeros_like(att)
    total = torch.empty_like(att)
    for k, part in enumerate(parts):
        sum_few(part, total, add=k > 0)
    return total


def _attributes(csr: Csr, call: Call, stats: Tensor, dscore: Tensor | None, grad_attr: Tensor | None) -> Tensor:
    """Gradient of the edge attributes. [E, d]"""
    assert call.attr is not None
    cut, d = pieces(csr), call.attr.size(1)
    dattr = torch.empty_like(call.attr)
    if dattr.numel():
        weights = None if grad_attr is None else weights_of(csr, call, stats, dropped=True)
        block = power(d, 64)
        by_row.attributes_kernel[(cut.count, tiles(d, block))](
            *cut.args, csr.edge_id, dscore, weights, call.query, grad_attr, dattr, call.heads, d,
            ACC=acc_of(call.dtype), BLOCK_E=16, BLOCK_D=block, num_warps=1,
        )  # fmt: skip
    return dattr


def _more(
    csr: Csr, out_attr: Tensor | None, alpha: Tensor | None, grad_attr: Tensor | None, grad_alpha: Tensor | None
) -> Tensor | None:
    """What attributes and weights that were handed out add to the row sums of alpha * d alpha. [n, h]"""
    total = None
    if grad_attr is not None and out_attr is not None:
        total = row_dot(grad_attr, out_attr)
    if grad_alpha is not None and alpha is not None:
        sums = spmm(by_edge(csr), alpha.to(grad_alpha.dtype) * grad_alpha)[0]
        total = sums if total is None else total + sums
    return total


def _ends(
    out: Tensor, grad: Tensor, stats: Tensor, more: Tensor | None, bias: Tensor | None, *, need_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """What backward gathers of a row [n, h, 2]: the log of its sum of exponentials, and the sum of alpha * d alpha,
    which is grad . out (+ more). bias: what out has on top. need_sum: also the sum of grad over all rows."""
    out, grad = rows(out), rows(grad)
    n, heads, width = grad.shape
    ends = torch.empty_like(stats)
    if ends.numel() == 0:
        return ends, grad.new_zeros(heads * width) if need_sum else None
    block = max(power(width, BIAS_WIDTH), 4)
    block_heads = power(heads, max(1, 256 // block))
    edges = max(1, 4096 // (block * block_heads))
    each = max(edges, tiles(n, 512))
    blocks = tiles(n, each)
    part = grad.new_empty(blocks, heads * width, dtype=stats.dtype) if need_sum else None
    by_row.ends_kernel[(blocks, tiles(heads, block_heads))](
        grad, grad.stride(0), out, out.stride(0), bias, stats, more, ends, part, n, heads, width, each,
        ONE=width <= block, ACC=acc_of(grad.dtype), VEC=vector(grad, out, width=width), BLOCK_E=edges,
        BLOCK_H=block_heads, BLOCK_F=block, num_warps=4,
    )  # fmt: skip
    return ends, None if part is None else sum_few(part)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot product of equal rows. a, b [n, h, f] -> [n, h] in the accumulation type."""
    a, b = rows(a), rows(b)
    n, heads, width = a.shape
    out = a.new_empty(n, heads, dtype=accumulate_type(a.dtype))
    if out.numel():
        block = power(width, 128)
        block_heads = power(heads, max(1, 256 // block))
        edges = max(1, 1024 // (block * block_heads))
        by_row.row_dot_kernel[(tiles(n, edges), tiles(heads, block_heads))](
            a, a.stride(0), b, b.stride(0), out, n, heads, width, ACC=acc_of(a.dtype),
            VEC=vector(a, b, width=width), BLOCK_E=edges, BLOCK_H=block_heads, BLOCK_F=block, num_warps=1,
        )  # fmt: skip
    return out
