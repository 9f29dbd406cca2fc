"""Work and depth of each layer in two forms: as it runs, and re-associated as well as can be.

Each as a formula and as a number. Formulas are in n, m, a, e, l, t, g (lift.NAMES), widths as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy

from stretto.analyze.depth import depth
from stretto.analyze.graph_stats import GraphStats
from stretto.analyze.rewrites import Rewrite, chosen, saved_flops
from stretto.observe.layer import Layer
from stretto.observe.lift import SYMBOLS
from stretto.observe.look import Look
from stretto.observe.trace import Trace


@dataclass
class LayerCost:
    """Work and depth of one layer in two forms."""

    path: str
    module: str
    name: str  # class and type
    flops: float = 0.0  # as it runs
    bytes: float = 0.0
    formula: str = ""
    depth: float = 0.0
    depth_formula: str = ""
    best_flops: float = 0.0
    best_bytes: float = 0.0
    best_formula: str = ""
    best_depth: float = 0.0
    best_depth_formula: str = ""
    rewrites: list[str] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """The two forms: "form", "work", "flops", "depth", "steps"."""
        forms = (
            ("as it runs", self.formula, self.flops, self.depth_formula, self.depth),
            ("best re-association", self.best_formula, self.best_flops, self.best_depth_formula, self.best_depth),
        )
        place = {"layer": self.path or "model", "class": self.name}
        return [place | dict(zip(("form", "work", "flops", "depth", "steps"), form, strict=True)) for form in forms]


def readable(formula: Any) -> str:
    """L*k*m + log(d)**2 -> L k m + log(d)^2."""
    return str(formula).replace("**", "^").replace("*", " ")


def text(expression: Any) -> str:
    """A formula, expanded."""
    return readable(sympy.expand(expression))


def layer_costs(seen: Look, stats: GraphStats, ways: list[Rewrite]) -> list[LayerCost]:
    """One for each layer."""
    return [_cost(layer, seen, stats, [way for way in ways if way.layer == layer.path]) for layer in seen.layers]


def _cost(layer: Layer, seen: Look, stats: GraphStats, ways: list[Rewrite]) -> LayerCost:
    mine = {
        op.index for op in seen.trace if op.index in (own := set(layer.ops)) or (op.site is not None and op.site in own)
    }
    costs = [op.cost for op in seen.trace if op.index in mine]
    flops, moved = float(sum(c.flops for c in costs)), float(sum(c.bytes for c in costs))
    picked = chosen(ways)
    free = {i for way in picked if way.rule in ("fuse", "cache A X", "cache norm") for i in way.ops}
    path = depth(seen.trace, stats.max_degree, symbolic=seen.symbolic, only=mine)
    best = depth(seen.trace, stats.max_degree, symbolic=seen.symbolic, only=mine, free=free)
    return LayerCost(
        path=layer.path,
        module=layer.module,
        name=layer.name,
        flops=flops,
        bytes=moved,
        formula="" if seen.symbolic is None else text(_work(seen.symbolic, mine)),
        depth=path.steps,
        depth_formula=path.symbolic,
        best_flops=max(0.0, flops - sum(way.flops for way in picked)),
        best_bytes=max(0.0, moved - sum(way.bytes for way in chosen(ways, "bytes"))),
        best_formula="" if seen.symbolic is None else _best(seen.symbolic, mine, picked),
        best_depth=best.steps,
        best_depth_formula=best.symbolic,
        rewrites=[way.rule for way in ways],
    )


def _work(trace: Trace, mine: set[int]) -> Any:
    return sum(op.cost.flops for op in trace if op.index in mine)


def _best(symbolic: Trace, mine: set[int], picked: list[Rewrite]) -> str:
    total = _work(symbolic, mine) - sum(saved_flops(way, symbolic, SYMBOLS["n"]) for way in picked)
    return text(sympy.nsimplify(sympy.expand(total), rational=True))
