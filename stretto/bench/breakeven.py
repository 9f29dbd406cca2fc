"""From which density on is a dense product faster than a sparse one? Predicted from the machine file, and measured.

A sparse product reads one row of k values per entry at the rate of random rows, a dense one does 2 k flops per entry:
they take as long at the density rho* = 2 BW_gather / (b F_gemm). k cancels; the rates depend on it.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from stretto.analyze.machine_file import Machine, near_row
from stretto.graph import Graph
from stretto.ops import spmm
from stretto.tune.timing import in_a_row, measure

SIDE, WIDTH, BYTES = 1024, 64, 4
DENSITIES = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class BreakEven:
    """Densities, and how many times longer the sparse product took at each that was tried. None: never equal."""

    predicted: float
    measured: float | None
    ratios: dict[float, float]

    @property
    def holds(self) -> bool:
        """Whether the prediction is within 2x."""
        return self.measured is not None and 0.5 <= self.predicted / self.measured <= 2

    def __str__(self) -> str:
        found = "none up to 100 %" if self.measured is None else f"{self.measured:.1%}"
        return f"dense products are faster from a density of {self.predicted:.1%} on as predicted, {found} as measured"


def predicted(machine: Machine, *, side: int = SIDE, width: int = WIDTH) -> float:
    """rho* = 2 BW_gather / (b F_gemm) with the rates at these sizes, at most 1."""
    gather = near_row(machine.spmm, width * BYTES, side * width * BYTES)
    return min(1.0, 2 * gather / (BYTES * near_row(machine.gemm, 2.0 * side * side * width, width)))


def crossing(ratios: dict[float, float]) -> float | None:
    """The density at which the ratio passes 1, linear on log scales between those tried."""
    points = sorted(ratios.items())
    if points[0][1] >= 1:
        return points[0][0]
    for (low, before), (high, after) in pairwise(points):
        if after >= 1:
            share = -math.log(before) / (math.log(after) - math.log(before))
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return None


def run(machine: Machine, *, side: int = SIDE, width: int = WIDTH, repeats: int = 20, device: str = "cpu") -> BreakEven:
    """Sparse and dense in turns at every density, after both agree."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(side, width, generator=generator).to(device)
    ratios: dict[float, float] = {}
    with torch.no_grad():
        for density in DENSITIES:
            adj = (torch.rand(side, side, generator=generator) < density).float().to(device)
            graph = Graph.of(adj.t().nonzero().t().contiguous(), side)
            torch.testing.assert_close(spmm(graph, x), adj @ x, rtol=1e-4, atol=1e-3)
            calls = {"dense": lambda adj=adj: adj @ x, "sparse": lambda graph=graph: spmm(graph, x)}
            taken = measure(calls, repeats=repeats, warmup=3, device=device, sample_seconds=in_a_row(device))
            ratios[density] = taken["sparse"].best / taken["dense"].best
    return BreakEven(predicted(machine, side=side, width=width), crossing(ratios), ratios)
