"""Work and depth of each layer in three forms: as published, as it runs, and re-associated as well as can be.

Each as a formula and as a number. Formulas of what runs are in n, m, a, e, l, t, g (lift.NAMES), widths as numbers;
published ones are in the letters of published.py and leave constants out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import nn

from stretto.analyze import published
from stretto.analyze.depth import depth
from stretto.analyze.graph_stats import GraphStats
from stretto.analyze.layer import Layer
from stretto.analyze.lift import SYMBOLS
from stretto.analyze.look import Look
from stretto.analyze.rewrites import Rewrite, chosen, saved_flops
from stretto.analyze.trace import Trace


@dataclass
class LayerCost:
    """Work and depth of one layer in three forms."""

    path: str
    module: str
    name: str  # class and type
    published: dict[str, str | float] = field(default_factory=dict)
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
        """The three forms: "form", "work", "flops", "depth", "steps". As published also as usually implemented."""
        known = self.published
        found: list[dict[str, Any]] = []
        if known:
            found += [
                {"form": "published", "work": readable(known["work"]), "flops": known["work here"],
                 "depth": readable(known["depth"]), "steps": known["depth here"]},
                {"form": "published, as usually implemented", "work": readable(known["implemented work"]),
                 "flops": known["implemented work here"], "depth": readable(known["implemented depth"]),
                 "steps": known["implemented depth here"]},
            ]  # fmt: skip
        best = {"form": "best re-association", "work": self.best_formula, "flops": self.best_flops,
                "depth": self.best_depth_formula, "steps": self.best_depth}  # fmt: skip
        runs = {"form": "as it runs", "work": self.formula, "flops": self.flops, "depth": self.depth_formula,
                "steps": self.depth}  # fmt: skip
        return [{"layer": self.path or "model", "class": self.name, **row} for row in (*found, runs, best)]


def readable(formula: Any) -> str:
    """L*k*m + log(d)**2 -> L k m + log(d)^2."""
    return str(formula).replace("**", "^").replace("*", " ")


def text(expression: Any) -> str:
    """A formula, expanded."""
    return readable(sympy.expand(expression))


def mlp_depth(model: nn.Module, layer: Layer) -> int:
    """K of a layer: linear maps inside it, or the kernels of a mixture."""
    module = dict(model.named_modules(remove_duplicate=False)).get(layer.path)
    if module is None:
        return 1
    kernels = getattr(module, "kernel_size", None)
    if isinstance(kernels, int):
        return max(1, kernels)
    return max(1, sum(type(m).__name__ == "Linear" for m in module.modules()))


def layer_costs(model: nn.Module, seen: Look, stats: GraphStats, ways: list[Rewrite]) -> list[LayerCost]:
    """One for each layer."""
    return [_cost(model, layer, seen, stats, [way for way in ways if way.layer == layer.path]) for layer in seen.layers]


def _cost(model: nn.Module, layer: Layer, seen: Look, stats: GraphStats, ways: list[Rewrite]) -> LayerCost:
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
        published=_published(model, layer, stats),
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


def _is_pygs(module: nn.Module | None, name: str) -> bool:
    """Whether a class of this name is PyG's, or ours for it: a user's may be called the same and do something else."""
    own = (c.__module__.partition(".")[0] for c in type(module).__mro__ if c.__name__ == name)
    return any(package in ("torch_geometric", "stretto") for package in own)


def _published(model: nn.Module, layer: Layer, stats: GraphStats) -> dict[str, str | float]:
    module = dict(model.named_modules(remove_duplicate=False)).get(layer.path)
    known = layer.module if _is_pygs(module, layer.module) else ""
    row = published.find(known, layer.kind, layer.type)
    if row is None:
        return {}
    values = {
        "n": stats.num_nodes, "m": stats.num_edges, "d": max(stats.max_degree, 2), "L": max(len(layer.calls), 1),
        "K": mlp_depth(model, layer), "T": max(layer.hops, 1), "k": max(layer.width_in, layer.width_out, 1), "c": 10,
    }  # fmt: skip
    named = known in row.pyg
    formulas = {
        "work": row.work, "depth": row.depth, "implemented work": row.implemented_work,
        "implemented depth": row.implemented_depth,
    }  # fmt: skip
    return {
        "row": row.model,
        "found by": "its name" if named else "its class and type",
        **{name: str(formula) for name, formula in formulas.items()},
        **{f"{name} here": published.evaluate(formula, values) for name, formula in formulas.items()},
        "note": row.note if named else "",
    }
