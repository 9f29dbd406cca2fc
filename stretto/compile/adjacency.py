"""Adjacency: the graph, scales and weights that a sparse leaf of an expression stands for, and its products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.compile.powers import multiplied
from stretto.graph import Graph
from stretto.graph.derived import kept_with
from stretto.ops.spmm import run as run_spmm
from stretto.ops.spmm import spmm


@dataclass(frozen=True)
class Adjacency:
    """What a sparse leaf stands for: diag(row_scale) (A * weight) diag(col_scale), that is S A T. All constant."""

    graph: Graph
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    weight: Tensor | None = None

    def apply(
        self,
        x: Tensor,
        transposed: bool,
        y: Tensor | None = None,
        beta: float = 1.0,
        again: bool = False,
        form: str = "",
    ) -> Tensor:
        """This matrix, or its transpose, times x, plus beta y. again: keep it differentiable; form: Sparse.form."""
        graph = self.graph.T if transposed else self.graph
        row, col = (self.col_scale, self.row_scale) if transposed else (self.row_scale, self.col_scale)
        weight = self.weight
        if form:
            weight = self._values(graph, row, col, x.dtype) if form == "edges" else weight
            row = col = None
        if again:
            return spmm(graph, x, weight, row_scale=row, col_scale=col, y=y, beta=beta)
        return run_spmm(graph, x, weight, row, col, y, beta)

    def _values(self, graph: Graph, row: Tensor | None, col: Tensor | None, dtype: torch.dtype) -> Tensor:
        """One value per edge, in the user's order. Kept with the graph, while the scales live."""

        def make() -> Tensor:
            csr = graph.edge_csr
            values = torch.ones(graph.num_edges, dtype=dtype, device=graph.device)
            if row is not None:
                values = values * csr.to_user_order(row[csr.rows()])
            if col is not None:
                values = values * csr.to_user_order(col[csr.columns()])
            return values.to(dtype)

        values = kept_with(graph, ("values", id(row), id(col), dtype), _present(row, col), make)
        return values if self.weight is None else values * self.weight

    def power(self, hops: int, dtype: torch.dtype) -> Adjacency:
        """This matrix, which has no weights, to a power that is multiplied out. Kept with the graph, while the scales
        live."""
        row, col = self.row_scale, self.col_scale

        def make() -> tuple[Graph, Tensor]:
            values = torch.ones(self.graph.num_edges, dtype=torch.float64, device=self.graph.device)
            for scale, ends in ((row, self.graph.csr.rows()), (col, self.graph.csr.columns())):
                values = values if scale is None else values * scale[ends]
            with torch.no_grad():
                graph, made = multiplied(self.graph, values, hops)
            return graph, made.to(dtype)

        graph, values = kept_with(self.graph, ("power", hops, id(row), id(col), dtype), _present(row, col), make)
        return Adjacency(graph, weight=values)

    @property
    def scaled(self) -> bool:
        """Whether it is normalised."""
        return self.row_scale is not None or self.col_scale is not None

    def met(self) -> bool:
        """Whether its graph was multiplied with before; counts this time."""
        before = "met" in self.graph._derived
        self.graph._derived["met"] = True
        return before


def _present(*scales: Tensor | None) -> list[Tensor]:
    return [scale for scale in scales if scale is not None]
