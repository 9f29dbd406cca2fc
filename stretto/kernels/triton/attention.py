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
# registers (benchmarks/results/tiles.csv). Where scores are made of rows, several tiles live at once.
WIDEST = 256
TILE = {"scalars": 1024, "weight": 512, "narrow": 256, "rows": 128}
NARROW = 64  # columns of a tile up to which a small one is enough
SURVEYED = 32  # edges of a tile of the first look at scalar scores: one for each lane of a warp
LANES = 512  # bytes that a warp reads at once: a tile as wide holds its edges in the registers of a lane
BIAS_WIDTH = 256  # columns of a head up to which a bias is added on the way, and its gradient summed


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
        self.left, self.right = self._both_ends()
        if self.left is not None and self.rows:
            self.score_width = self.left.size(2)
        edge = None if a.edge is None else a.edge if self.rows else self.scalars(a.edge)
        att = None if a.att is None else self.scalars(a.att)
        self.edge, self.att, self.attr, self.query = (
            None if t is None else t.contiguous() for t in (edge, att, a.attr, a.query)
        )
        self.value_step = self.width if v.size(1) > 1 or self.heads == 1 else 0
        shared = self.right is not None and self.rows and self.right.size(1) == 1 and self.heads > 1
        self.right_step = 0 if shared else self.score_width
        self._cut()
        strided = [t for t in (v, self.left, self.right, *also) if t is not None and t.dim() == 3]
        self.vec = min(vector(*strided, width=self.width), vector(*strided, width=self.score_width or self.width))
        self.int = offsets(
            v, self.left, self.right, self.edge, self.attr, self.query, *also, most=num_edges * self.heads
        )
        seed = None
        if a.dropout > 0:
            seed = torch.tensor([_signed(a.seed)]).to(v.device) if a.seed_at is None else a.seed_at
        self.random = {"drop_below": min(int(a.dropout * 4294967296.0), 0xFFFFFFFF) - 2**31, "seed": seed}
        self.constants = _constants(a.slope, a.scale, a.dropout, self.acc, v.device)

    def _both_ends(self) -> tuple[Tensor | None, Tensor | None]:
        """What the score takes of destinations and sources; the latter's may be the values themselves."""
        a = self.a
        if a.left is None or a.right is None:
            return None, None
        if not self.rows:
            return self.scalars(a.left), self.scalars(a.right)
        return rows(a.left), self.v if a.v is None else rows(a.right)

    def _cut(self) -> None:
        """The tiles of a program: how many edges, heads and columns."""
        size, widest = self.v.element_size(), max(self.width, self.score_width)
        self.block = max(power(widest, WIDEST), 4)
        self.block_heads = power(self.heads, max(1, WIDEST // self.block))
        columns = self.block * self.block_heads
        self.across = tiles(widest, self.block)
        # Twice what a warp reads at once: two halves of every head, so that a lane has to do with one head only.
        self.two = self.across == 1 and self.block >= 8 and columns * size >= 2 * LANES
        self.head_tiles = tiles(self.heads, self.block_heads)
        # The widest tile is one edge by one warp: what is left of its registers, other rows' programs use. Weights that
        # are given ask for so little that two warps take an edge each, and meet at the end.
        self.warps = 2 if self.two and self.a.form == "weight" else 1
        wide = "weight" if self.a.form == "weight" else "scalars"
        edges = TILE["rows" if self.rows else "narrow" if columns <= NARROW else wide] // columns
        self.edges = self.warps if self.two else max(1, min(32, edges))
        # Nothing of a tile of heads and columns sticks out: only missing edges need a mask.
        self.even = self.heads % self.block_heads == 0 and all(
            w in (0, self.block) for w in (self.width, self.score_width)
        )
        self.tile_width = self.block // 2 if self.two else self.block
        self.wide = self.warps == 1 and self.tile_width * self.block_heads * size >= LANES

    def scalars(self, t: Tensor) -> Tensor:
        """In the accumulation type; only the row stride is free."""
        t = t if t.dtype == self.acc else t.to(self.acc)
        return t if t.stride(-1) == 1 else t.contiguous()

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
            "RAW": self.a.seed_at is not None,
            "ONE": self.across == 1,
            "TWO": self.two,
            "EVEN": self.even,
            "INT": self.int,
            "ACC": acc_of(self.dtype),
            "BLOCK_E": self.edges,
            "BLOCK_H": self.block_heads,
            "BLOCK_F": self.tile_width,
            "BLOCK_D": power(attr_width, 64),
            "num_warps": self.warps,
        }


def attention(csr: Csr, a: Attention, *, weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """out, out_attr (with attributes only), alpha (if wanted) and the row statistics backward needs.

    With a bias, out has its heads side by side: [n, h * f].
    """
    call = Call(a, csr.num_edges)
    h = call.heads
    shape = (h, call.width) if a.bias is None else (h * call.width,)
    out = call.v.new_empty(csr.num_rows, *shape)
    stats = call.v.new_empty(csr.num_rows, h, 2, dtype=call.acc)
    if csr.num_rows and h:
        _sum(csr, call, out, stats, None if a.bias is None else a.bias.contiguous())
    alpha = weights_of(csr, call, stats, dropped=a.dropped) if weights else None
    out_attr = None
    if call.attr is not None:
        used = (
            alpha if alpha is not None and (a.dropped or a.dropout == 0) else weights_of(csr, call, stats, dropped=True)
        )
        out_attr = sum_attr(csr, used, call.attr)
    return out, out_attr, alpha, stats


def _sum(csr: Csr, call: Call, out: Tensor, stats: Tensor | None, bias: Tensor | None = None) -> None:
    cut, h, width = pieces(csr), call.heads, call.width
    part = call.v.new_empty(cut.windows, h, width, dtype=call.acc)
    part_stats = call.v.new_empty(cut.windows, h, 2, dtype=call.acc)
    across = tiles(width, call.block)
    same = call.a.v is None and call.across == 1 and call.value_step == call.right_step
    forward.pieces_kernel[(cut.count, call.head_tiles, across)](
        *cut.args, csr.col, csr.edge_id, call.v, call.v.stride(0), out=out, stats=stats, bias=bias, part=part,
        part_stats=part_stats, width=width, value_step=call.value_step, SAME=same, WIDE=call.wide, VEC=call.vec,
        BLOCK_S=SURVEYED, **call.ends(), **call.flags(),
    )  # fmt: skip
    if cut.windows:
        forward.hubs_kernel[(cut.windows, call.head_tiles, across)](
            *cut.args, part, part_stats, out, stats, bias, h, width,
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


def weighted(csr: Csr, weight: Tensor, v: Tensor, into: Tensor | None = None) -> Tensor:
    """Sum over a row's edges of weight[e, h] * v[j, h or 0]. weight [E, h], v [m, h or 1, f] -> [n, h, f]"""
    shape = (csr.num_rows, weight.size(1), v.size(2))
    out = v.new_empty(shape) if into is None else into.view(shape)
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
    """64 bits as an int64."""
    bits &= 2**64 - 1
    return bits - 2**64 if bits >= 2**63 else bits
