"""Attention in Triton: which launches a forward and a backward pass need, and in which form the tensors travel."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from stretto.kernels.attention import FORMS, TENSORS, Attention
from stretto.kernels.csr import Csr
from stretto.kernels.schema import REDUCES, accumulate_type
from stretto.kernels.triton import attention_backward as backward
from stretto.kernels.triton import attention_forward as forward
from stretto.kernels.triton.operands import acc_of, power, rows, vector
from stretto.kernels.triton.pieces import Pieces, pieces
from stretto.kernels.triton.spmm import _hubs as sum_hubs
from stretto.kernels.triton.spmm import spmm

WIDEST = 256  # columns of a tile at most; wider rows take several
TILE = 1024  # values of a tile: loads in flight against registers


@functools.lru_cache(maxsize=256)
def _constants(slope: float, scale: float, dropout: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """slope, scale and the factor of what dropout keeps: a kernel's own scalars would be fp32."""
    keep = 0.0 if dropout >= 1 else 1 / (1 - dropout)
    return torch.tensor([slope, scale, keep], dtype=dtype).to(device)


class _Call:
    """The operands of an Attention as kernels take them."""

    def __init__(self, a: Attention, also: tuple[Tensor, ...] = ()) -> None:
        self.a = a
        self.v = v = rows(a.values)
        self.dtype, self.acc = v.dtype, accumulate_type(v.dtype)
        self.rows = a.form in ("gatv2", "dot")
        self.heads, self.width = a.heads, v.size(2)
        self.score_width = 0
        self.left = self.right = None
        if a.left is not None and a.right is not None:
            self.left = rows(a.left) if self.rows else self.scalars(a.left)
            self.right = (v if a.v is None else rows(a.right)) if self.rows else self.scalars(a.right)
            if self.rows:
                self.score_width = self.left.size(2)
        self.edge = None if a.edge is None else a.edge.contiguous() if self.rows else self.scalars(a.edge)
        self.att = None if a.att is None else self.scalars(a.att)
        self.attr = None if a.attr is None else a.attr.contiguous()
        self.query = None if a.query is None else a.query.contiguous()
        self.value_step = self.width if v.size(1) > 1 or self.heads == 1 else 0
        shared = self.right is not None and self.rows and self.right.size(1) == 1 and self.heads > 1
        self.right_step = 0 if shared else self.score_width
        widest = max(self.width, self.score_width)
        self.block = max(power(widest, WIDEST), 4)
        self.tiles = triton.cdiv(widest, self.block)
        self.edges = max(4, min(32, TILE // self.block))
        self.warps = 2 if self.block > 128 else 1
        strided = [t for t in (v, self.left, self.right, *also) if t is not None and t.dim() == 3]
        self.vec = min(vector(*strided, width=self.width), vector(*strided, width=self.score_width or self.width))
        seed = a.seed & (2**64 - 1)
        self.random = {
            "drop_below": min(int(a.dropout * 4294967296.0), 0xFFFFFFFF) - 2**31,
            "seed_low": _signed(seed & 0xFFFFFFFF),
            "seed_high": _signed(seed >> 32),
        }
        self.constants = _constants(a.slope, a.scale, a.dropout, self.acc, v.device)

    def scalars(self, t: Tensor) -> Tensor:
        return t.to(self.acc).contiguous()

    def ends(self) -> dict[str, Any]:
        """What the scores are computed from."""
        return {
            "left": self.left,
            "ldl": 0 if self.left is None else self.left.stride(0),
            "right": self.right,
            "ldr": 0 if self.right is None else self.right.stride(0),
            "att": self.att,
            "edge": self.edge,
            "attr": self.attr if self.query is not None else None,
            "query": self.query,
            "constants": self.constants,
            **self.random,
            "heads": self.heads,
            "score_width": self.score_width,
            "attr_width": 0 if self.attr is None else self.attr.size(1),
            "right_step": self.right_step,
        }

    def flags(self) -> dict[str, Any]:
        attr_width = 1 if self.attr is None else self.attr.size(1)
        return {
            "FORM": FORMS[self.a.form],
            "DROP": self.a.dropout > 0,
            "ONE": self.tiles == 1,
            "ACC": acc_of(self.dtype),
            "BLOCK_E": self.edges,
            "BLOCK_F": self.block,
            "BLOCK_D": power(attr_width, 64),
            "num_warps": self.warps,
        }


def attention(csr: Csr, a: Attention, *, weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """out, out_attr (with attributes only), alpha (if wanted) and the row statistics backward needs."""
    call = _Call(a)
    h = call.heads
    out = call.v.new_empty(csr.num_rows, h, call.width)
    stats = call.v.new_empty(csr.num_rows, h, 2, dtype=call.acc)
    if csr.num_rows and h:
        _sum(csr, call, out, stats)
    alpha = _weights(csr, call, stats, dropped=a.dropped) if weights else None
    out_attr = None
    if call.attr is not None:
        used = (
            alpha if alpha is not None and (a.dropped or a.dropout == 0) else _weights(csr, call, stats, dropped=True)
        )
        out_attr = _sum_attr(csr, used, call.attr)
    return out, out_attr, alpha, stats


def _sum(csr: Csr, call: _Call, out: Tensor, stats: Tensor | None) -> None:
    cut, h, width = pieces(csr), call.heads, call.width
    part = call.v.new_empty(cut.num_slots, h, width, dtype=call.acc)
    part_stats = call.v.new_empty(cut.num_slots, h, 2, dtype=call.acc)
    tiles = triton.cdiv(width, call.block)
    same = call.a.v is None and call.tiles == 1 and call.value_step == call.right_step
    forward.pieces_kernel[(cut.count, h, tiles)](
        cut.edge, cut.row, cut.slot, csr.col, csr.edge_id, call.v, call.v.stride(0), out=out, stats=stats, part=part,
        part_stats=part_stats, width=width, value_step=call.value_step, num_rows=csr.num_rows, SAME=same, VEC=call.vec,
        **call.ends(), **call.flags(),
    )  # fmt: skip
    if cut.num_hubs:
        forward.hubs_kernel[(cut.num_hubs, h, tiles)](
            cut.hub_row, cut.hub_slot, part, part_stats, out, stats, h, width, csr.num_rows,
            FORM=FORMS[call.a.form], ACC=acc_of(call.dtype), BLOCK_S=8, BLOCK_F=call.block, num_warps=call.warps,
        )  # fmt: skip


def _weights(csr: Csr, call: _Call, stats: Tensor, *, dropped: bool) -> Tensor:
    """alpha [E, h] in the accumulation type."""
    alpha = stats.new_empty(csr.num_edges, call.heads)
    if alpha.numel():
        cut = pieces(csr)
        flags = {**call.flags(), "DROP": dropped and call.a.dropout > 0}
        forward.alpha_kernel[(cut.count, call.heads)](
            cut.edge, cut.row, cut.slot, csr.col, csr.edge_id, stats=stats, alpha=alpha, **call.ends(), **flags
        )  # fmt: skip
    return alpha


def _sum_attr(csr: Csr, weight: Tensor, attr: Tensor) -> Tensor:
    """Weighted sum of the attributes of a row's edges. weight [E, h], attr [E, d] -> [n, h, d]"""
    by_edge = _by_edge(csr)
    return weighted(by_edge, weight, attr.unsqueeze(1))


def weighted(csr: Csr, weight: Tensor, v: Tensor) -> Tensor:
    """Sum over a row's edges of weight[e, h] * v[j, h or 0]. weight [E, h], v [m, h or 1, f] -> [n, h, f]"""
    out = v.new_empty(csr.num_rows, weight.size(1), v.size(2))
    if out.numel():
        _sum(csr, _Call(Attention("weight", v, edge=weight)), out, None)
    return out


def _by_edge(csr: Csr) -> Csr:
    """The matrix whose columns are the edges, in the user's order."""
    kept = csr.cache.get("by_edge")
    if kept is None:
        kept = Csr(csr.rowptr, csr.edge_id, csr.edge_id, csr.num_rows, csr.num_edges, csr.num_edges)
        kept.cache["pieces"] = pieces(csr)
        csr.cache["by_edge"] = kept
    return kept


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
) -> tuple[Tensor | None, ...]:
    """Gradients of a.tensors where needed, rows in their type, scalars in the accumulation type."""
    grad = rows(grad)
    call = _Call(a, (grad,))
    h, acc = call.heads, call.acc
    need = dict(zip(TENSORS, needs, strict=True))
    new = functools.partial(call.v.new_empty, dtype=acc)
    if a.attr is None or grad_attr is None:
        grad_attr = None
    else:
        grad_attr = grad_attr.contiguous()
    if grad_alpha is not None:
        grad_alpha = call.scalars(grad_alpha)
    row_sum = None
    if a.form != "weight":
        row_sum = _row_sum(csr, out, out_attr, alpha, grad, grad_attr, grad_alpha)
    need_att = need["att"] and a.att is not None
    need_left = (need["left"] or need_att) and a.left is not None
    need_right = (need["right"] or need_att) and a.right is not None
    need_edge = a.edge is not None and (need["edge"] or (need_att and call.rows))
    need_v = need["v"] if a.v is not None else need["right"]
    # Sums of rows keep the accumulation type where something is still to be added or multiplied.
    rough = a.form == "gatv2" or a.v is None
    dv = (
        new(csr.num_cols, h, call.width, dtype=acc if rough or call.value_step == 0 else call.dtype) if need_v else None
    )
    dright = None
    if need_right:
        shape = (csr.num_cols, h, call.score_width) if call.rows else (csr.num_cols, h)
        dright = new(shape, dtype=call.dtype if call.rows and not rough and call.right_step else acc)
    dedge = new(csr.num_edges, h, call.score_width) if call.rows and need_edge and a.form == "gatv2" else None
    dscore = None
    if need_left or need["query"] or need["attr"] or (need_edge and not call.rows):
        dscore = new(csr.num_edges, h)
    if csr_t.num_rows and h:
        _transposed(csr_t, call, stats, grad, grad_attr, grad_alpha, row_sum, dv, dright, dedge, dscore)
    found: dict[str, Tensor | None] = dict.fromkeys(TENSORS)
    dleft = None
    if need_left:
        assert dscore is not None
        assert call.right is not None
        if a.form == "gat":
            dleft = spmm(_by_edge(csr), dscore)[0]
        elif a.form == "dot":
            dleft = weighted(csr, dscore, call.right)
        else:
            dleft = _left(csr, call, dscore)
    if a.form == "gatv2":
        _finish_rows(a, call, found, dleft, dright, dedge, need)
    else:
        found["left"], found["right"] = dleft, dright
        if need_edge and not call.rows:
            found["edge"] = dscore
    if found["right"] is not None and call.rows and call.right_step == 0:
        found["right"] = found["right"].sum(1, keepdim=True)
    if dv is not None:
        if call.value_step == 0:
            dv = dv.sum(1, keepdim=True)
        name = "v" if a.v is not None else "right"
        before = found[name]
        found[name] = (dv if before is None or a.v is not None else before + dv).to(call.dtype)
    if call.rows:
        for name in ("left", "right"):
            value = found[name]
            found[name] = None if value is None else value.to(call.dtype)
    if need["query"] and call.query is not None and call.attr is not None and dscore is not None:
        found["query"] = _sum_attr(csr, dscore, call.attr)
    if need["attr"] and call.attr is not None:
        found["attr"] = _attributes(csr, call, stats, dscore, grad_attr)
    return tuple(found[name] if need[name] else None for name in TENSORS)


def _transposed(
    csr_t: Csr,
    call: _Call,
    stats: Tensor,
    grad: Tensor,
    grad_attr: Tensor | None,
    grad_alpha: Tensor | None,
    row_sum: Tensor | None,
    dv: Tensor | None,
    dright: Tensor | None,
    dedge: Tensor | None,
    dscore: Tensor | None,
) -> None:
    """The pass over the transposed edges. A row's dright of gatv2 and dedge still lack the factor att."""
    cut, h = pieces(csr_t), call.heads
    slots = cut.num_slots
    part = call.v.new_empty(slots, h, call.width, dtype=call.acc) if dv is not None else None
    part_right = dright.new_empty((slots, *dright.shape[1:]), dtype=call.acc) if dright is not None else None
    ends = call.ends()
    if grad_attr is not None:
        ends["attr"] = call.attr
    backward.pieces_kernel[(cut.count, h, call.tiles)](
        cut.edge, cut.row, cut.slot, csr_t.col, csr_t.edge_id, call.v, call.v.stride(0), grad=grad, ldg=grad.stride(0),
        grad_attr=grad_attr, grad_alpha=grad_alpha, row_sum=row_sum, stats=stats, dv=dv, dright=dright, dedge=dedge,
        dscore=dscore, part=part, part_right=part_right, width=call.width, value_step=call.value_step,
        num_rows=csr_t.num_rows, ALPHA_DROPPED=call.a.dropped, VEC=call.vec, **ends, **call.flags(),
    )  # fmt: skip
    if part is not None and dv is not None:
        merge(cut, part, dv, csr_t.num_rows)
    if part_right is not None and dright is not None:
        merge(cut, part_right, dright, csr_t.num_rows)


def merge(cut: Pieces, part: Tensor, into: Tensor, num_rows: int) -> None:
    """Sums of the hubs' slots, in order, into their rows. part [slots, ...], into [rows, ...]"""
    width = part.stride(0)
    block = power(width, 128)
    if cut.num_hubs and part.numel():
        sum_hubs[(cut.num_hubs, triton.cdiv(width, block))](
            cut.hub_row, cut.hub_slot, part, None, None, None, 0, 1.0, into, None, width, num_rows,
            REDUCE=REDUCES["sum"], TIES=False, ACC=acc_of(part.dtype), BLOCK_S=8, BLOCK_K=block, num_warps=1,
        )  # fmt: skip


def _left(csr: Csr, call: _Call, dscore: Tensor) -> Tensor:
    """By destination: the sum of dscore * leaky_relu'(z), without the factor att. [n, h, k]"""
    assert call.left is not None
    assert call.right is not None
    cut, h, width = pieces(csr), call.heads, call.score_width
    dleft = dscore.new_empty(csr.num_rows, h, width)
    part = dscore.new_empty(cut.num_slots, h, width)
    backward.left_kernel[(cut.count, h, triton.cdiv(width, call.block))](
        cut.edge, cut.row, cut.slot, csr.col, csr.edge_id, call.left, call.left.stride(0), call.right,
        call.right.stride(0), call.edge, dscore, call.constants, dleft, part, h, width, call.right_step, csr.num_rows,
        ACC=acc_of(call.dtype), VEC=call.vec, BLOCK_E=call.edges, BLOCK_F=call.block, num_warps=call.warps,
    )  # fmt: skip
    merge(cut, part, dleft, csr.num_rows)
    return dleft


def _finish_rows(
    a: Attention,
    call: _Call,
    found: dict[str, Tensor | None],
    dleft: Tensor | None,
    dright: Tensor | None,
    dedge: Tensor | None,
    need: dict[str, bool],
) -> None:
    """gatv2: the sums t by source, destination and edge times att; datt = sum of t * z over edges, end by end."""
    att = call.att
    assert att is not None
    assert call.left is not None
    assert call.right is not None
    if need["att"]:
        assert dleft is not None
        assert dright is not None
        datt = (dleft * call.left).sum(0) + (dright * call.right).sum(0)
        if dedge is not None and call.edge is not None:
            datt += (dedge * call.edge.view(dedge.shape)).sum(0)
        found["att"] = datt
    for name, value in (("left", dleft), ("right", dright)):
        if value is not None and need[name]:
            found[name] = value.mul_(att)
    if dedge is not None and need["edge"] and a.edge is not None:
        found["edge"] = dedge.mul_(att).to(call.dtype).view(a.edge.shape)


def _attributes(csr: Csr, call: _Call, stats: Tensor, dscore: Tensor | None, grad_attr: Tensor | None) -> Tensor:
    """Gradient of the edge attributes. [E, d]"""
    assert call.attr is not None
    cut, d = pieces(csr), call.attr.size(1)
    dattr = torch.empty_like(call.attr)
    if dattr.numel():
        weights = None if grad_attr is None else _weights(csr, call, stats, dropped=True)
        block = power(d, 64)
        backward.attributes_kernel[(cut.count, triton.cdiv(d, block))](
            cut.edge, cut.row, cut.slot, csr.edge_id, dscore, weights, call.query, grad_attr, dattr, call.heads, d,
            ACC=acc_of(call.dtype), BLOCK_E=16, BLOCK_D=block, num_warps=1,
        )  # fmt: skip
    return dattr


def _row_sum(
    csr: Csr,
    out: Tensor,
    out_attr: Tensor | None,
    alpha: Tensor | None,
    grad: Tensor,
    grad_attr: Tensor | None,
    grad_alpha: Tensor | None,
) -> Tensor:
    """Sum over each row of alpha * d alpha, which is grad . out. [n, h]"""
    total = row_dot(grad, out)
    if grad_attr is not None and out_attr is not None:
        total = row_dot(grad_attr, out_attr, into=total)
    if grad_alpha is not None and alpha is not None:
        total = total + spmm(_by_edge(csr), alpha.to(total.dtype) * grad_alpha)[0]
    return total


def row_dot(a: Tensor, b: Tensor, into: Tensor | None = None) -> Tensor:
    """Dot product of equal rows. a, b [n, h, f] -> [n, h] in the accumulation type, added to `into`."""
    a, b = rows(a), rows(b)
    n, heads, width = a.shape
    out = a.new_empty(n, heads, dtype=accumulate_type(a.dtype)) if into is None else into
    if out.numel():
        block = power(width, 128)
        edges = max(1, 1024 // block)
        backward.row_dot_kernel[(triton.cdiv(n, edges), heads)](
            a, a.stride(0), b, b.stride(0), out, n, heads, width, ADD=into is not None, ACC=acc_of(a.dtype),
            VEC=vector(a, b, width=width), BLOCK_E=edges, BLOCK_F=block, num_warps=1,
        )  # fmt: skip
    return out


def _signed(bits: int) -> int:
    """32 bits as the int32 a kernel takes: one type for every seed."""
    return bits - 2**32 if bits >= 2**31 else bits
