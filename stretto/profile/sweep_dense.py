"""The sweep's other ops: sparse and dense products, elementwise ops on messages, reductions, softmax.

Each family is a line in FAMILIES: a maker of candidates as functions of one tensor, and the reference. The first
argument of a site's op is moved along the axes that mean something for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from stretto.analyze.specs import Spec, tensors
from stretto.analyze.trace import OpRecord
from stretto.bench import stock
from stretto.bench.run import threads
from stretto.graph import Graph
from stretto.kernels import Csr
from stretto.ops import edge_softmax, spmm
from stretto.profile.axes import Point, place, times, values
from stretto.profile.candidates import DENSE, Offers, not_in_half, prepared
from stretto.profile.contest import Candidates, Pace, Trial, contest, empty_row, too_large
from stretto.profile.replay import capture
from stretto.profile.row_sites import REDUCES, made_in_step, reference

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

# Axes of an op without an index.
PLAIN = ("base", "cache", "direction", "width", "sparsity", "dtype", "nodes", "aligned", "threads", "compiled")
INTO = " into a kept buffer"
SPARSE = (*PLAIN, "order", "law", "density", "edges", "index")


def _full(point: Point) -> torch.dtype:
    """The type of factors and kept buffers: half inputs meet fp32 ones."""
    return torch.float64 if point.dtype == "f64" else torch.float32


def _fixed(point: Point, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=_full(point)).to(point.device)


@dataclass(frozen=True)
class DenseSite:
    """A hot op without an index: rows, the width that is swept, and the other width of a product."""

    group: Group
    native: str  # the candidate that the model runs
    rows: int
    width: int
    inner: int = 0
    turned: tuple[bool, bool] = (False, False)  # of a product: factors that lie in memory by columns
    kept: bool = False  # of a scaling: whether every step has the same factor
    axes: tuple[str, ...] = PLAIN

    scale = "nodes"  # the axis by which it is cut where all of it takes too long

    @property
    def size(self) -> int:
        """Rows."""
        return self.rows

    def run(self, point: Point, pace: Pace) -> list[dict[str, Any]]:
        """Every candidate at one point."""
        family, rows = self.group.family, max(1, round(self.rows * point.nodes))
        reason = too_large(rows * max(point.width, self.inner))
        if reason:
            return [empty_row(family, self.native, point, reason)]
        with threads(point.threads):
            (table, skipped), wanted = FAMILIES[family](replace(self, rows=rows), point)
            source = values(point.width, point, rows).t() if self.turned[0] else values(rows, point)
            return contest(Trial(family, table, wanted, source, self.native, skipped), point, pace)


def _product(site: DenseSite, point: Point) -> tuple[Offers, Callable[[Tensor], Tensor]]:
    """x [rows, width] @ w [width, inner], and + b [inner] for addmm; the zeros of x may pay as a sparse matrix."""
    weight = _fixed(point, site.inner, point.width).t() if site.turned[1] else _fixed(point, point.width, site.inner)
    across = weight.t().contiguous()  # as a Linear keeps it: no work in a step
    adds = site.native.startswith("addmm")
    bias = _fixed(point, site.inner) if adds else weight.new_zeros(())
    room = torch.empty(site.rows, site.inner, dtype=_full(point), device=point.device)

    def plain(x: Tensor) -> Tensor:
        out = x @ weight.to(x.dtype)
        return out + bias.to(x.dtype) if adds else out

    def kept(x: Tensor) -> Tensor:
        if x.requires_grad or x.dtype != room.dtype:
            raise NotImplementedError("out= takes no gradient, and the buffer is of full precision")
        return torch.addmm(bias, x, weight, out=room) if adds else torch.mm(x, weight, out=room)

    def sparse(x: Tensor) -> Tensor:
        if point.sparsity < 0.5 or x.requires_grad or x.dtype != weight.dtype:
            raise NotImplementedError("a sparse product wants zeros, full precision and an input without a gradient")
        return torch.mm(x.to_sparse_csr(), weight) + bias

    def einsum(x: Tensor) -> Tensor:
        return torch.einsum("nk,km->nm", x, weight.to(x.dtype)) + bias.to(x.dtype)

    def linear(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, across.to(x.dtype), bias.to(x.dtype) if bias.dim() else None)

    found: Candidates = {"mm, then add" if adds else "mm": plain, "linear": linear, "einsum": einsum}
    found["addmm" + INTO if adds else "mm" + INTO] = kept
    if adds:
        found["addmm"] = lambda x: torch.addmm(bias.to(x.dtype), x, weight.to(x.dtype))
    for name in tuple(found):
        found[name] = not_in_half(found[name])
    found["sparse CSR product, conversion included"] = sparse
    pyg_lib, skipped = stock.optional("pyg_lib"), {}
    if isinstance(pyg_lib, str):
        skipped["pyg_lib segment_matmul"] = pyg_lib
    else:
        whole = torch.tensor([0, site.rows])
        found["pyg_lib segment_matmul"] = not_in_half(
            lambda x: pyg_lib.ops.segment_matmul(x, whole, weight.to(x.dtype)[None]) + bias.to(x.dtype)
        )
    return (found, skipped), plain


def _scaled(site: DenseSite, point: Point) -> tuple[Offers, Callable[[Tensor], Tensor]]:
    """x [rows, width] times one factor per row: a message and its weight."""
    factor = _fixed(point, site.rows, 1)
    out = torch.empty(site.rows, point.width, dtype=_full(point), device=point.device)

    def kept(x: Tensor) -> Tensor:
        if x.requires_grad or x.dtype not in (torch.float32, torch.float64):
            raise NotImplementedError("out= takes no gradient, and the buffer is of full precision")
        return torch.mul(x, factor.to(x.dtype), out=out if x.dtype == out.dtype else None)

    def expanded() -> Callable[[Tensor], Tensor]:
        wide = factor.expand(site.rows, point.width).contiguous()
        return lambda x: x * wide.to(x.dtype)

    found: Candidates = {
        "mul": lambda x: x * factor.to(x.dtype),
        "mul, factor expanded in memory": prepared(expanded, site.kept),
        "mul" + INTO: kept,
        "einsum": lambda x: torch.einsum("nk,no->nk", x, factor.to(x.dtype)),
    }
    return (found, {}), lambda x: x * factor.to(x.dtype)


def _summed(site: DenseSite, point: Point) -> tuple[Offers, Callable[[Tensor], Tensor]]:
    """The sum of x [rows, width] over its rows: a bias's gradient."""
    parts = max(1, math.isqrt(site.rows))
    found: Candidates = {
        "sum": lambda x: x.sum(0),
        "ones @ x": not_in_half(lambda x: x.new_ones(x.size(0)) @ x),
        "einsum": lambda x: torch.einsum("nk->k", x),
        "in two steps": lambda x: torch.stack([part.sum(0) for part in x.chunk(parts)]).sum(0),
    }
    return (found, {}), lambda x: x.sum(0)


def _normalised(site: DenseSite, point: Point) -> tuple[Offers, Callable[[Tensor], Tensor]]:
    """log_softmax of x [rows, width] over the width."""
    found: Candidates = {
        "log_softmax": lambda x: x.log_softmax(-1),
        "x - logsumexp": lambda x: x - x.logsumexp(-1, keepdim=True),
        "softmax, then log": lambda x: x.softmax(-1).clamp_min(torch.finfo(x.dtype).tiny).log(),
    }
    if site.rows * max(point.width, 1) <= DENSE:
        owner = torch.arange(site.rows, device=point.device).repeat_interleave(max(point.width, 1))
        places = torch.arange(owner.numel(), device=point.device)
        graph = Graph.of(torch.stack([places, owner]), (owner.numel(), site.rows))
        found["stretto edge_softmax, then log"] = lambda x: _by_edges(graph, x)
    return (found, {}), lambda x: x.log_softmax(-1)


def _by_edges(graph: Graph, x: Tensor) -> Tensor:
    alpha = edge_softmax(graph, x.reshape(-1, 1))
    return alpha.clamp_min(torch.finfo(x.dtype).tiny).log().reshape(x.shape)


# family of costs.py -> maker of (candidates, those not to be had) and the reference
FAMILIES: dict[str, Callable[[DenseSite, Point], tuple[Offers, Callable[[Tensor], Tensor]]]] = {
    "gemm": _product,
    "pointwise": _scaled,
    "reduce": _summed,
    "softmax": _normalised,
}


@dataclass(frozen=True)
class SparseSite:
    """A hot sparse product with its real matrix: edges (source, destination) and the number of nodes."""

    group: Group
    native: str
    edges: Tensor
    num_nodes: int
    width: int
    reduce: str = "sum"
    weighted: bool = False

    scale = "edges"  # the axis by which it is cut where all of it takes too long

    @property
    def size(self) -> int:
        """Entries of the matrix."""
        return self.edges.size(1)

    @property
    def axes(self) -> tuple[str, ...]:
        """What is moved; torch.compile is for torch's own ops."""
        return tuple(a for a in SPARSE if a != "compiled" or self.native != "stretto")

    def run(self, point: Point, pace: Pace) -> list[dict[str, Any]]:
        """Every candidate at one point."""
        edges, num_nodes = _edges_at(self.edges, self.num_nodes, point)
        reason = too_large(edges.size(1) * point.width)
        if reason:
            return [empty_row("spmm", self.native, point, reason)]
        long = edges.long()
        with threads(point.threads):
            source = values(num_nodes, point)
            weight = _fixed(point, edges.size(1)).abs().to(source.dtype) if self.weighted else None
            offers, skipped = stock.spmm(long, source, weight, self.reduce)
            table: Candidates = {c.name: c.forward for c in offers if c.dtype in (None, source.dtype)}
            if self.reduce == "sum" and num_nodes**2 <= DENSE:
                ones = source.new_ones(edges.size(1)) if weight is None else weight
                dense = torch.zeros(num_nodes, num_nodes, dtype=_full(point), device=point.device)
                dense.index_put_((long[1], long[0]), ones.to(dense.dtype), accumulate=True)
                table["dense GEMM"] = not_in_half(lambda x: dense.to(x.dtype) @ x)
            table["EdgeIndex.matmul"] = _edge_index(long, num_nodes, weight, self.reduce)
            graph = Graph.of(edges, num_nodes)
            table["stretto"] = lambda x: spmm(graph, x, weight, reduce=self.reduce)

            reduced = reference("scatter", long[1], num_nodes, self.reduce)

            def wanted(x: Tensor) -> Tensor:
                return reduced(x[long[0]] if weight is None else x[long[0]] * weight.to(x.dtype)[:, None])

            rows = contest(Trial("spmm", table, wanted, source, self.native, skipped), point, pace)
        return [{**row, "reduce": self.reduce, "weighted": self.weighted} for row in rows]


def _edge_index(edges: Tensor, num_nodes: int, weight: Tensor | None, reduce: str) -> Callable[[Tensor], Tensor]:
    """PyG's own sparse product; the matrix is kept, as an EdgeIndex keeps it."""
    order = (edges[1] * num_nodes + edges[0]).argsort()
    rows: Any = EdgeIndex(edges.flip(0)[:, order].contiguous(), sparse_size=(num_nodes, num_nodes), sort_order="row")
    value = None if weight is None else weight[order]

    def product(x: Tensor) -> Tensor:
        if value is not None and x.dtype != value.dtype:
            raise NotImplementedError("an EdgeIndex takes weights in the type of its input")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse")
            return rows.matmul(x, value, reduce=reduce)

    return product


def _edges_at(edges: Tensor, num_nodes: int, point: Point) -> tuple[Tensor, int]:
    """The edges of a point: sources of another law, order or number; destinations stay where they can."""
    kept = times(edges, point.edges)
    if point.density < 1.0:
        generator = torch.Generator().manual_seed(0)
        kept = kept[:, torch.rand(kept.size(1), generator=generator) < point.density]
    source, rows = place(kept[0], num_nodes, replace(point, density=1.0, edges=1.0))
    target = place(kept[1], num_nodes, replace(point, density=1.0, edges=1.0, order="given", law="real"))[0]
    return torch.stack([source, target.remainder(rows)]), rows


def dense_sites(profile: Profile, share: float) -> tuple[list[DenseSite], list[tuple[Group, str]]]:
    """Hot products, scalings, reductions and softmaxes on matrices; and those without candidates, with the reason."""
    found: list[DenseSite] = []
    left: list[tuple[Group, str]] = []
    for group in profile.hot(share):
        if group.family not in FAMILIES:
            continue
        op = profile.trace.ops[max(group.ops, key=lambda i: profile.trace.ops[i].seconds)]
        made = dense_site(group, op, lambda spec, op=op: made_in_step(profile.trace, op, spec.key))  # type: ignore[misc]
        if isinstance(made, str):
            left.append((group, made))
        else:
            found.append(made)
    return found, left


def dense_site(group: Group, op: OpRecord, fresh: Callable[[Spec], bool]) -> DenseSite | str:
    """What an op is, if its family's candidates do the same; or why they do not. fresh: whether a step makes it."""
    every = tensors(op.args)
    inputs = [spec for spec in every if len(spec.shape) >= 2]
    base, buffered = op.name.split("::")[1].split(".")[0], INTO if "out" in op.kwargs else ""
    if not inputs or not all(size for spec in inputs for size in spec.shape):
        return "its inputs are no matrices, or empty ones"
    if not all(spec.floating for spec in every):
        return "not all of its inputs are floating numbers"
    first = inputs[0]
    if op.cost.family == "gemm":
        if base not in ("mm", "addmm") or len(inputs) != 2 or set(op.kwargs) - {"out"}:
            return "only plain products of two matrices are swept"
        turned = tuple(spec.stride[0] == 1 and spec.shape[1] > 1 for spec in inputs)
        return DenseSite(group, base + buffered, first.shape[0], first.shape[1], inputs[1].shape[1], turned)  # type: ignore[arg-type]
    if op.cost.family == "pointwise":
        if base != "mul" or len(inputs) != 2 or len(every) != 2:
            return "only a product of rows and one factor each is swept"
        narrow, wide = sorted(inputs, key=lambda spec: spec.numel)
        if narrow.shape != (*wide.shape[:-1], 1) or wide.shape[-1] < 2 or 0 in narrow.stride or 0 in wide.stride:
            return "only a product of rows and one factor each is swept"
        return DenseSite(group, "mul" + buffered, narrow.numel, wide.shape[-1], kept=not fresh(narrow))
    if op.cost.family == "reduce":
        dims = op.args[1] if len(op.args) > 1 else ()
        if base != "sum" or tuple(dims or ()) not in ((0,), (-len(first.shape),)):
            return "only a sum over rows is swept"
        if 0 in first.stride:
            return "its input is one row, expanded"
        return DenseSite(group, "sum", first.shape[0], first.row)
    if base != "_log_softmax" or len(first.shape) != 2 or op.args[1] not in (1, -1):
        return "only log_softmax over the last dimension is swept"
    return DenseSite(group, "log_softmax", first.shape[0], first.shape[1])


# op -> the candidate that it is
PRODUCTS = {
    "stretto::spmm": "stretto", "aten::_sparse_mm": "torch csr", "aten::mm": "torch csr", "aten::addmm": "torch csr",
    "aten::_sparse_mm_reduce_impl": "torch.sparse.mm reduce",
}  # fmt: skip


def sparse_sites(profile: Profile, share: float) -> tuple[list[SparseSite], list[tuple[Group, str]]]:
    """Hot square sparse products, ours or torch's, with the matrices they had; and those left out, with the reason."""
    groups = [g for g in profile.hot(share) if g.family == "spmm"]
    captured = capture(profile, groups) if groups else {}
    found: list[SparseSite] = []
    left: list[tuple[Group, str]] = []
    for group in groups:
        at = next((op for op in group.ops if op in captured), None)
        made = "the step did not run it again" if at is None else _sparse_site(group, *captured[at][1:])
        if isinstance(made, str):
            left.append((group, made))
        else:
            found.append(made)
    return found, left


def _sparse_site(group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SparseSite | str:
    native = PRODUCTS.get(group.name.split(".")[0])
    known = next((e for e in map(_edge_list, args) if e is not None), None)
    dense = next((a for a in args if isinstance(a, Tensor) and a.layout == torch.strided and a.dim() >= 2), None)
    if native is None:
        return "no other way to do it is known"
    if known is None or dense is None or not dense.size(0):
        return "only products of a square matrix with a dense one are swept"
    word = next((v for v in (*args, *kwargs.values()) if isinstance(v, str)), "sum")
    reduce = REDUCES.get(word, word)
    if reduce not in REDUCES.values():
        return f"no candidate reduces by {reduce!r}"
    extra = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.layout == torch.strided]
    weighted = any(v is not dense and v.dim() == 1 for v in extra)
    return SparseSite(group, native, known[0], known[1], dense[0].numel(), reduce, weighted)


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
