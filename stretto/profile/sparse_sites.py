"""Hot sparse products, as they ran: which op, which reduction, its real matrix."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from stretto.graph import Graph
from stretto.kernels import Csr
from stretto.machine.timing import threads
from stretto.ops import spmm
from stretto.profile import stock
from stretto.profile.axes import Point, place, times, values
from stretto.profile.candidates import DENSE, not_in_half
from stretto.profile.captured import capture
from stretto.profile.contest import Candidates, Pace, Trial, contest, empty_row, too_large
from stretto.profile.row_sites import REDUCES, Site, reference

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile


@dataclass(frozen=True)
class SparseSite(Site):
    """A hot sparse product with its real matrix: edges (source, destination) and the number of nodes."""

    edges: Tensor
    num_nodes: int
    width: int
    reduce: str = "sum"
    weighted: bool = False

    @property
    def size(self) -> int:
        """Entries of the matrix."""
        return self.edges.size(1)

    def run(self, point: Point, pace: Pace) -> list[dict[str, Any]]:
        """Every candidate at one point."""
        edges, num_nodes = _edges_at(self.edges, self.num_nodes, point)
        reason = too_large(edges.size(1) * point.width)
        if reason:
            return [empty_row("spmm", self.native, point, reason)]
        long = edges.long()
        with threads(point.threads):
            source = values(num_nodes, point)
            drawn = torch.rand(edges.size(1), generator=torch.Generator().manual_seed(1))
            weight = drawn.to(point.device, source.dtype) if self.weighted else None
            offers, skipped = stock.spmm(long, source, weight, self.reduce)
            table: Candidates = {c.name: c.forward for c in offers if c.dtype in (None, source.dtype)}
            if self.reduce == "sum" and num_nodes**2 <= DENSE:
                ones = source.new_ones(edges.size(1)) if weight is None else weight
                dense = source.new_zeros(num_nodes, num_nodes)
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
    """The edges of a point: sources of another order or number; destinations stay where they can."""
    some = times(edges, point.edges)
    source, rows = place(some[0], num_nodes, replace(point, edges=1.0))
    target = place(some[1], num_nodes, replace(point, edges=1.0, order="given"))[0]
    return torch.stack([source, target.remainder(rows)]), rows


# op -> the candidate that it is
PRODUCTS = {
    "stretto::spmm": "stretto", "aten::_sparse_mm": "torch csr", "aten::mm": "torch csr", "aten::addmm": "torch csr",
    "aten::_sparse_mm_reduce_impl": "torch.sparse.mm reduce",
}  # fmt: skip


def sparse_sites(profile: Profile, share: float) -> tuple[list[SparseSite], list[tuple[Group, str]]]:
    """Hot square sparse products, ours or torch's, with the matrices they had; and those left out, with the reason."""
    groups = [g for g in profile.hot(share) if g.family == "spmm"]
    captured = capture(profile, groups) if groups else {}
    result: list[SparseSite] = []
    left: list[tuple[Group, str]] = []
    for group in groups:
        at = next((op for op in group.ops if op in captured), None)
        made = "the step did not run it again" if at is None else _sparse_site(group, *captured[at][1:])
        if isinstance(made, str):
            left.append((group, made))
        else:
            result.append(made)
    return result, left


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
