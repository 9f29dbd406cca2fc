"""Attention in Triton: which launches a forward pass needs, and in which form the tensors travel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from stretto.kernels.attention import FORMS, Attention
from stretto.kernels.csr import Csr
from stretto.kernels.schema import accumulate_type
from stretto.kernels.triton import attention_forward as forward
from stretto.kernels.triton.operands import acc_of, offsets, power, rows, tiles, vector
from stretto.kernels.triton.pieces import pieces

# Columns of a tile at most, over all its heads (wider rows take several), and values of a tile: loads in flight against
# registers (docs/gpu.md). Where scores are made of rows, several tiles are alive at once.
WIDEST = {"scalars": 256, "rows": 128}
TILE = {"scalars": 512, "rows": 256}
NARROW = 128  # columns up to which a tile of scalar scores holds twice as many values


@functools.lru_cache(maxsize=256)
def _constants(slope: float, scale: float, dropout: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """slope, scale and the factor of what dropout keeps: a kernel's own scalars would be fp32."""
    keep = 0.0 if dropout >= 1 else 1 / (1 - dropout)
    return torch.tensor([slope, scale, keep], dtype=dtype).to(device)


class Call:
    """The operands of an Attention as kernels take them."""

    def __init__(self, a: Attention, num_edges: int, also: tuple[Tensor, ...] = ()) -> None:
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
        kind = "rows" if self.rows else "scalars"
        self.block = max(power(widest, WIDEST[kind]), 4)
        self.block_heads = power(self.heads, max(1, WIDEST[kind] // self.block))
        columns = self.block * self.block_heads
        self.across = tiles(widest, self.block)
        self.head_tiles = tiles(self.heads, self.block_heads)
        tile = TILE[kind] * (2 if columns <= NARROW and not self.rows else 1)
        self.edges = max(2, min(32, tile // columns))
        self.warps = 1
        # Nothing of a tile of heads and columns sticks out: only missing edges need a mask.
        self.even = self.heads % self.block_heads == 0 and all(
            w in (0, self.block) for w in (self.width, self.score_width)
        )
        strided = [t for t in (v, self.left, self.right, *also) if t is not None and t.dim() == 3]
        self.vec = min(vector(*strided, width=self.width), vector(*strided, width=self.score_width or self.width))
        self.int = offsets(
            v, self.left, self.right, self.edge, self.attr, self.query, *also, most=num_edges * self.heads
        )
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
            "ONE": self.across == 1,
            "EVEN": self.even,
            "INT": self.int,
            "ACC": acc_of(self.dtype),
            "BLOCK_E": self.edges,
            "BLOCK_H": self.block_heads,
            "BLOCK_F": self.block,
            "BLOCK_D": power(attr_width, 64),
            "num_warps": self.warps,
        }


def attention(csr: Csr, a: Attention, *, weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """out, out_attr (with attributes only), alpha (if wanted) and the row statistics backward needs."""
    call = Call(a, csr.num_edges)
    h = call.heads
    out = call.v.new_empty(csr.num_rows, h, call.width)
    stats = call.v.new_empty(csr.num_rows, h, 2, dtype=call.acc)
    if csr.num_rows and h:
        _sum(csr, call, out, stats)
    alpha = weights_of(csr, call, stats, dropped=a.dropped) if weights else None
    out_attr = None
    if call.attr is not None:
        used = (
            alpha if alpha is not None and (a.dropped or a.dropout == 0) else weights_of(csr, call, stats, dropped=True)
        )
        out_attr = sum_attr(csr, used, call.attr)
    return out, out_attr, alpha, stats


def _sum(csr: Csr, call: Call, out: Tensor, stats: Tensor | None) -> None:
    cut, h, width = pieces(csr), call.heads, call.width
    part = call.v.new_empty(cut.windows, h, width, dtype=call.acc)
    part_stats = call.v.new_empty(cut.windows, h, 2, dtype=call.acc)
    across = tiles(width, call.block)
    same = call.a.v is None and call.across == 1 and call.value_step == call.right_step
    forward.pieces_kernel[(cut.count, call.head_tiles, across)](
        *cut.args, csr.col, csr.edge_id, call.v, call.v.stride(0), out=out, stats=stats, part=part,
        part_stats=part_stats, width=width, value_step=call.value_step, SAME=same, VEC=call.vec,
        **call.ends(), **call.flags(),
    )  # fmt: skip
    if cut.windows:
        forward.hubs_kernel[(cut.windows, call.head_tiles, across)](
            *cut.args, part, part_stats, out, stats, h, width,
            FORM=FORMS[call.a.form], ACC=acc_of(call.dtype), BLOCK_S=4, BLOCK_H=call.block_heads, BLOCK_F=call.block,
            num_warps=2,
        )  # fmt: skip


def weights_of(csr: Csr, call: Call, stats: Tensor, *, dropped: bool) -> Tensor:
    """alpha [E, h] in the accumulation type."""
    alpha = stats.new_empty(csr.num_edges, call.heads)
    if alpha.numel():
        cut = pieces(csr)
        flags = {**call.flags(), "DROP": dropped and call.a.dropout > 0}
        forward.alpha_kernel[(cut.count, call.head_tiles)](
            *cut.args, csr.col, csr.edge_id, stats=stats, alpha=alpha, **call.ends(), **flags
        )  # fmt: skip
    return alpha


def sum_attr(csr: Csr, weight: Tensor, attr: Tensor) -> Tensor:
    """Weighted sum of the attributes of a row's edges. weight [E, h], attr [E, d] -> [n, h, d]"""
    return weighted(by_edge(csr), weight, attr.unsqueeze(1))


def weighted(csr: Csr, weight: Tensor, v: Tensor) -> Tensor:
    """Sum over a row's edges of weight[e, h] * v[j, h or 0]. weight [E, h], v [m, h or 1, f] -> [n, h, f]"""
    out = v.new_empty(csr.num_rows, weight.size(1), v.size(2))
    if out.numel():
        _sum(csr, Call(Attention("weight", v, edge=weight), csr.num_edges), out, None)
    return out


def by_edge(csr: Csr) -> Csr:
    """The matrix whose columns are the edges, in the user's order."""
    kept = csr.cache.get("by_edge")
    if kept is None:
        kept = Csr(csr.rowptr, csr.edge_id, csr.edge_id, csr.num_rows, csr.num_edges, csr.num_edges)
        kept.cache["pieces"] = pieces(csr)
        csr.cache["by_edge"] = kept
    return kept


def _signed(bits: int) -> int:
    """32 bits as the int32 a kernel takes: one type for every seed."""
    return bits - 2**32 if bits >= 2**31 else bits
