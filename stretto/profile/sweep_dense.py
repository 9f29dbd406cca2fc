"""The sweep's other ops: sparse and dense products, elementwise ops on messages, reductions, softmax.

Each family is a line in FAMILIES: a maker of candidates as functions of one tensor, its reference, the torch way, and
the axes that mean something for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.analyze.trace import OpRecord
from stretto.bench import stock
from stretto.bench.run import threads
from stretto.graph import Graph
from stretto.kernels import Csr
from stretto.ops import edge_softmax, spmm
from stretto.profile.axes import Point, place, values
from stretto.profile.replay import capture
from stretto.profile.sweep import DENSE, Candidates, contest

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

Way = tuple[Candidates, Callable[[Tensor], Tensor]]
Maker = Callable[[int, int, Point], Way]
PLAIN = (
    "base",
    "cache",
    "direction",
    "width",
    "sparsity",
    "dtype",
    "threads",
    "compiled",
)  # axes of an op without an index
SPARSE = (*PLAIN, "order", "law", "density", "index")


def _fixed(point: Point, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(point.device)


def _product(rows: int, inner: int, point: Point) -> Way:
    """x [rows, width] @ w [width, inner]; the zeros of x may pay as a sparse matrix."""
    weight = _fixed(point, point.width, inner)
    across = weight.t().contiguous()

    def sparse(x: Tensor) -> Tensor:
        if point.sparsity < 0.5 or x.requires_grad or x.dtype != torch.float32:
            raise NotImplementedError("a sparse product wants zeros in an fp32 input without a gradient")
        return torch.mm(x.to_sparse_csr(), weight)

    found: Candidates = {
        "mm": lambda x: x @ weight.to(x.dtype),
        "linear": lambda x: torch.nn.functional.linear(x, across.to(x.dtype)),
        "einsum": lambda x: torch.einsum("nk,km->nm", x, weight.to(x.dtype)),
        "sparse CSR product, conversion included": sparse,
    }
    for name in ("mm", "linear", "einsum"):
        found[name] = _not_in_half(found[name])
    return found, lambda x: x @ weight.to(x.dtype)


def _not_in_half(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Half products go through oneDNN, which ends the process with an illegal instruction on some virtual CPUs."""

    def call(x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64) and not x.is_cuda:
            raise NotImplementedError("dense products are not tried in half precision")
        return function(x)

    return call


def _scaled(rows: int, inner: int, point: Point) -> Way:
    """x [rows, width] times one factor per row: a message and its weight."""
    factor = _fixed(point, rows, 1)
    wide = factor.expand(rows, point.width).contiguous()
    out = torch.empty(rows, point.width, device=point.device)

    def kept(x: Tensor) -> Tensor:
        if x.requires_grad or x.dtype not in (torch.float32, torch.float64):
            raise NotImplementedError("out= takes no gradient, and the buffer is fp32")
        return torch.mul(x, factor.to(x.dtype), out=out if x.dtype == out.dtype else None)

    found: Candidates = {
        "mul": lambda x: x * factor.to(x.dtype),
        "mul, factor expanded in memory": lambda x: x * wide.to(x.dtype),
        "mul into a kept buffer": kept,
        "einsum": lambda x: torch.einsum("nk,no->nk", x, factor.to(x.dtype)),
    }
    return found, lambda x: x * factor.to(x.dtype)


def _summed(rows: int, inner: int, point: Point) -> Way:
    """The sum of x [rows, width] over its rows: a bias's gradient."""
    found: Candidates = {
        "sum": lambda x: x.sum(0),
        "ones @ x": _not_in_half(lambda x: x.new_ones(x.size(0)) @ x),
        "einsum": lambda x: torch.einsum("nk->k", x),
        "in two steps": lambda x: torch.stack([part.sum(0) for part in x.chunk(max(1, math.isqrt(rows)))]).sum(0),
    }
    return found, lambda x: x.sum(0)


def _normalised(rows: int, inner: int, point: Point) -> Way:
    """log_softmax of x [rows, width] over the width."""
    found: Candidates = {
        "log_softmax": lambda x: x.log_softmax(-1),
        "x - logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
        "softmax, then log": lambda x: x.softmax(-1).clamp_min(torch.finfo(x.dtype).tiny).log(),
    }
    if rows * max(point.width, 1) <= DENSE:
        owner = torch.arange(rows, device=point.device).repeat_interleave(max(point.width, 1))
        places = torch.arange(owner.numel(), device=point.device)
        graph = Graph.of(torch.stack([places, owner]), (owner.numel(), rows))
        found["stretto edge_softmax, then log"] = lambda x: _by_edges(graph, x)
    return found, lambda x: x.log_softmax(-1)


def _by_edges(graph: Graph, x: Tensor) -> Tensor:
    alpha = edge_softmax(graph, x.reshape(-1, 1))
    return alpha.clamp_min(torch.finfo(x.dtype).tiny).log().reshape(x.shape)


# family of costs.py -> (maker, the way of torch)
FAMILIES: dict[str, tuple[Maker, str]] = {
    "gemm": (_product, "mm"),
    "pointwise": (_scaled, "mul"),
    "reduce": (_summed, "sum"),
    "softmax": (_normalised, "log_softmax"),
}


@dataclass(frozen=True)
class DenseSite:
    """A hot op without an index: rows, the width that is swept, and the other width of a product."""

    group: Group
    rows: int
    width: int
    inner: int
    axes: tuple[str, ...] = PLAIN

    def run(self, point: Point, repeats: int) -> list[dict[str, Any]]:
        """Every candidate at one point."""
        maker, native = FAMILIES[self.group.family]
        with threads(point.threads):
            table, reference = maker(self.rows, self.inner, point)
            source = values(self.rows, point)
            return contest(self.group.family, table, reference, source, point, native, repeats)


@dataclass(frozen=True)
class SparseSite:
    """A hot sparse product with its real matrix: edges (source, destination) and the number of nodes."""

    group: Group
    edges: Tensor
    num_nodes: int
    width: int
    axes: tuple[str, ...] = SPARSE

    def run(self, point: Point, repeats: int) -> list[dict[str, Any]]:
        """Every candidate at one point."""
        edges, num_nodes = _edges_at(self.edges, self.num_nodes, point)
        with threads(point.threads):
            source = values(num_nodes, point)
            offers, _ = stock.spmm(edges.long(), source, None, "sum")
            table: Candidates = {c.name: c.forward for c in offers if c.dtype in (None, source.dtype)}
            if num_nodes**2 <= DENSE:
                ones = torch.ones(edges.size(1), device=point.device)
                dense = torch.zeros(num_nodes, num_nodes, device=point.device)
                dense.index_put_((edges[1].long(), edges[0].long()), ones, accumulate=True)
                table["dense GEMM"] = _not_in_half(lambda x: dense.to(x.dtype) @ x)
            graph = Graph.of(edges, num_nodes)
            table["stretto"] = lambda x: spmm(graph, x)

            def reference(x: Tensor) -> Tensor:
                return torch.zeros_like(x).index_add(0, edges[1].long(), x[edges[0].long()])

            return contest("spmm", table, reference, source, point, "gather + index_add_", repeats)


def _edges_at(edges: Tensor, num_nodes: int, point: Point) -> tuple[Tensor, int]:
    """The edges of a point: sources of another law or order, or fewer edges; destinations stay."""
    kept = edges
    if point.density < 1.0:
        generator = torch.Generator().manual_seed(0)
        kept = edges[:, torch.rand(edges.size(1), generator=generator) < point.density]
    source, rows = place(kept[0], num_nodes, replace(point, density=1.0))
    target = kept[1].remainder(rows).to(source)
    return torch.stack([source, target]), rows


def dense_sites(profile: Profile, share: float) -> list[DenseSite]:
    """Hot products, elementwise ops, reductions and softmaxes on matrices."""
    found: list[DenseSite] = []
    for group in profile.hot(share):
        if group.family not in FAMILIES:
            continue
        op = profile.trace.ops[max(group.ops, key=lambda i: profile.trace.ops[i].seconds)]
        sizes = _sizes(op)
        if sizes is not None:
            found.append(DenseSite(group, *sizes))
    return found


def _sizes(op: OpRecord) -> tuple[int, int, int] | None:
    """(rows, width, inner) of an op that its family's candidates can stand for; None for another."""
    inputs = [spec for spec in op.inputs if spec.floating and len(spec.shape) >= 2]
    base = op.name.split("::")[1].split(".")[0]
    if not inputs or not all(inputs[0].shape):
        return None
    rows, width = inputs[0].shape[0], inputs[0].row
    if op.cost.family == "gemm":
        if base not in ("mm", "addmm") or len(inputs) < 2:
            return None
        return rows, width, inputs[1].shape[1]
    if op.cost.family == "pointwise":
        widest = max(inputs, key=lambda spec: spec.numel)
        return (widest.shape[0], widest.row, 0) if base == "mul" else None
    if op.cost.family == "reduce":
        dims = op.args[1] if len(op.args) > 1 else ()
        return (rows, width, 0) if base == "sum" and tuple(dims or ()) in ((0,), (-len(inputs[0].shape),)) else None
    return (rows, width, 0) if base == "_log_softmax" and len(inputs[0].shape) == 2 else None


def sparse_sites(profile: Profile, share: float) -> list[SparseSite]:
    """Hot square sparse products, ours or torch's, with the matrices they had."""
    groups = [g for g in profile.hot(share) if g.family == "spmm"]
    captured = capture(profile, groups) if groups else {}
    found: list[SparseSite] = []
    for group in groups:
        for at in group.ops:
            if at not in captured:
                continue
            args = captured[at][1]
            known = next((e for e in map(_edge_list, args) if e is not None), None)
            dense = next(
                (a for a in args if isinstance(a, Tensor) and a.layout == torch.strided and a.dim() >= 2), None
            )
            if known is not None and dense is not None:
                found.append(SparseSite(group, known[0], known[1], dense[0].numel() if dense.size(0) else 1))
                break
    return found


def _edge_list(value: Any) -> tuple[Tensor, int] | None:
    """Edges [2, E] of a square matrix, ours or torch's; None for another value."""
    if isinstance(value, Csr) and value.col is not None and value.num_rows == value.num_cols:
        counts = value.rowptr.cpu().long().diff()
        return torch.stack(
            [value.col.cpu().long(), torch.arange(value.num_rows).repeat_interleave(counts)]
        ), value.num_rows
    if isinstance(value, Tensor) and value.layout == torch.sparse_csr and value.shape[0] == value.shape[1]:
        counts = value.crow_indices().cpu().long().diff()
        rows = torch.arange(value.shape[0]).repeat_interleave(counts)
        return torch.stack([value.col_indices().cpu().long(), rows]), value.shape[0]
    return None
