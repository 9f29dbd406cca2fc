"""The analysis as an object: numbers by name, a summary in words, JSON, an HTML page, and a check against reality."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from stretto.analyze.depth import Depth
from stretto.analyze.graph_stats import GraphStats, Partition
from stretto.analyze.layer_costs import LayerCost
from stretto.analyze.rewrites import Rewrite
from stretto.analyze.strategy import Problem, Refusal, Strategy
from stretto.errors import expect
from stretto.machine.file import Machine
from stretto.observe.costs import DEGREE
from stretto.observe.inputs import Inputs
from stretto.observe.layer import Layer
from stretto.observe.predict import bound, clearing, times
from stretto.observe.trace import Trace
from stretto.observe.workload import Workload
from stretto.page.document import Document
from stretto.page.text import duration, finite


@dataclass(repr=False)
class Report(Document):
    """What stretto.analyze found."""

    model: str
    mode: str
    graph: GraphStats
    layers: list[Layer]
    costs: list[LayerCost]
    trace: Trace  # at the sizes of the data, lifted from the probe where that worked
    lifted: bool
    symbolic: dict[str, str]  # flops, bytes as formulas
    split: dict[str, dict[str, float]]  # flops and bytes of ops over edges (sparse), and of all others (dense)
    depth: Depth
    machine: Machine
    memory: dict[str, float]
    partitions: list[Partition]
    strategies: list[Strategy]
    refusals: list[Refusal]  # strategies that do not apply, with the reason
    rewrites: list[Rewrite]
    seconds: float  # predicted step
    workload: Workload
    inputs: Inputs
    problem: Problem  # what the strategies were priced from
    on_edges: list[bool] = field(default_factory=list)  # op by op, whether it has something as long as the edges
    memory_kept: bool = False  # whether the process kept freed memory when `seconds` was predicted
    remarks: list[str] = field(default_factory=list)  # what one must know before believing the numbers
    checks: list[dict[str, Any]] = field(default_factory=list)  # what validate() found

    @property
    def work(self) -> float:
        """Flops of a step."""
        return float(self.trace.flops)

    @property
    def bytes(self) -> float:
        """Compulsory bytes of a step."""
        return float(self.trace.bytes)

    @property
    def parallelism(self) -> float:
        """Work over depth: how many processors could ever be busy on average."""
        return self.work / max(self.depth.steps, 1.0)

    @property
    def comm(self) -> dict[str, float]:
        """Bytes per step of each strategy, as "name, P"."""
        return {f"{s.name}, {s.workers}": s.bytes for s in self.strategies}

    @property
    def syncs(self) -> dict[str, int]:
        """Synchronisations per step of each strategy."""
        return {f"{s.name}, {s.workers}": s.syncs for s in self.strategies}

    @property
    def best(self) -> Strategy:
        """The strategy ranked first."""
        return self.strategies[0]

    @property
    def best_here(self) -> Strategy | None:
        """The first that fits and needs no more workers than the machine has."""
        return next((s for s in self.strategies if s.fits and s.here), None)

    def verdict(self) -> str:
        """Which strategy is best, and what must be said with it."""
        best, here, machine = self.best, self.best_here, self.machine
        if not best.fits:
            least = min(self.strategies, key=lambda s: s.memory)
            room, need = (f"{size / 1e9:.3g} GB" for size in (machine.memory, least.memory))
            return f"Nothing fits into {room}: least is {least.name} on {least.workers}, which needs {need}"
        said = f"Best: {best.name} on {best.workers}: {duration(best.seconds)}; {best.reason}"
        if best.here:
            return said
        many = f"{machine.workers} worker{'s' * (machine.workers != 1)} at once"
        own = f", best {here.name} on {here.workers}: {duration(here.seconds)}" if here else ", and nothing that fits"
        return f"{said}. That is elsewhere: {machine.name} runs {many}{own}"

    def rows(self) -> list[dict[str, Any]]:
        """One line per op and shape: where, how often, work, predicted time (and how much of it clears new memory for
        the results), and what bounds it."""
        table: dict[tuple[str, str, str, str], dict[str, Any]] = {}
        new = clearing(self.trace, self.machine, kept=self.memory_kept)
        for op, seconds in zip(self.trace.ops, times(self.trace, self.machine), strict=True):
            if op.cost.family == "view" and op.index not in new:
                continue
            key = (op.name, op.path, op.phase, op.shapes)
            row = table.setdefault(
                key,
                {"op": op.name, "module": op.path, "phase": op.phase, "shapes": op.shapes, "calls": 0, "flops": 0.0,
                 "bytes": 0.0, "ms": 0.0, "new memory ms": 0.0, "bound": bound(op, self.machine),
                 "W/D": float(op.cost.flops) / self._steps(op.cost.depth)},
            )  # fmt: skip
            row["calls"] += 1
            row["flops"] += float(op.cost.flops)
            row["bytes"] += float(op.cost.bytes)
            row["ms"] += (seconds + new.get(op.index, 0.0)) * 1e3
            row["new memory ms"] += new.get(op.index, 0.0) * 1e3
        return sorted(table.values(), key=lambda row: -row["ms"])

    def _share(self, what: str) -> float:
        """Sparse work as a share of all."""
        parts = [self.split[part][what] for part in ("sparse", "dense")]
        return parts[0] / sum(parts) if sum(parts) else 0.0

    def _steps(self, depth: Any) -> float:
        """Depth of one op as a number."""
        known = depth.subs({DEGREE: max(self.graph.max_degree, 2)}) if hasattr(depth, "subs") else depth
        return max(1.0, float(known))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values."""
        return {
            "model": self.model,
            "mode": self.mode,
            "graph": finite(asdict(self.graph)),
            "work": {"flops": self.work, "bytes": self.bytes, **self.symbolic, "lifted": self.lifted},
            "split": self.split,
            "depth": asdict(self.depth),
            "parallelism": self.parallelism,
            "layers": [asdict(cost) for cost in self.costs],
            "memory": self.memory,
            "partitions": [part.to_dict() for part in self.partitions],
            "strategies": [asdict(strategy) for strategy in self.strategies],
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "rewrites": [{**asdict(rewrite), "law": rewrite.law} for rewrite in self.rewrites],
            "predicted_seconds": self.seconds,
            "unknown_ops": self.trace.unknown,
            "machine": self.machine.to_dict(),
            "remarks": self.remarks,
            "checks": self.checks,
            "ops": self.rows(),
        }

    def page(self) -> str:
        """The page of the analysis."""
        from stretto.analyze.page import analysis_page

        return analysis_page(self)

    def validate(self, *, repeats: int = 5, workers: int = 2) -> list[dict[str, Any]]:
        """Predicted, counted and measured, side by side; runs the step and what strategies can run here."""
        from stretto.analyze.validate import validate

        expect(type(repeats) is int and repeats >= 1, f"validate: 'repeats' is {repeats!r}, wanted at least 1")
        expect(type(workers) is int and workers >= 0, f"validate: 'workers' is {workers!r}, wanted 0 or more")
        self.checks = validate(self, repeats=repeats, workers=workers)
        return self.checks

    def schemes(self, *, fanout: int = 10, batch: int = 1024) -> list[dict[str, Any]]:
        """Work of an epoch by full batch, sampled neighbours, layers, clusters: counted from real batches."""
        from stretto.analyze.schemes import schemes

        for name, value in (("fanout", fanout), ("batch", batch)):
            expect(value >= 1, f"schemes: '{name}' is {value}, wanted at least 1")
        one = self.graph.num_nodes and not self.inputs.hetero and not self.inputs.sizes.g
        expect(bool(one), "schemes: only one graph with nodes of one type is counted by schemes, and not an empty one")
        rounds = sum(len(layer.rounds) for layer in self.layers)
        result = schemes(self.workload, layers=max(rounds, 1), fanout=fanout, batch=batch)
        return [asdict(scheme) for scheme in result]

    def explain(self) -> str:
        """The analysis in words."""
        g = self.graph
        launch_bound = sum(bound(op, self.machine) == "launch" for op in self.trace if op.cost.family != "view")
        lines = [
            f"{self.model} on {g.num_nodes:,} nodes and {g.num_edges:,} edges ({self.mode}): "
            f"{self.work / 1e9:.3g} GFLOP, {self.bytes / 1e9:.3g} GB, predicted {duration(self.seconds)} a step.",
            f"Depth {self.depth.steps:.0f} ({self.depth.symbolic}) against work {self.work:.3g}: "
            f"up to {self.parallelism:.3g} processors could be busy.",
            f"{self.depth.launches} of {self.trace.launches} kernels wait for one another"
            + (" (a CPU runs one after the other: there all of them do)" if self.machine.device == "cpu" else "")
            + f"; {launch_bound} are bound by their launch.",
            f"Over edges (sparse): {self._share('flops'):.0%} of the flops, {self._share('bytes'):.0%} of the bytes.",
            f"Memory: {self.memory['total'] / 1e6:.4g} MB, "
            + ("fits." if self.memory["fits"] else f"more than the {self.machine.memory / 1e9:.3g} GB there are."),
        ]
        lines += [f"{remark}." for remark in self.remarks]
        lines += [f"{cost.path or 'model'}: {cost.module}, class {cost.name}." for cost in self.costs]
        lines += [f"{r.layer or 'model'}, {r.rule}: {r.sentence}." for r in self.rewrites]
        if self.machine.link == "assumed" and any(s.workers > 1 for s in self.strategies):
            rate = f"{self.machine.link_latency * 1e6:.3g} us and {self.machine.link_bandwidth / 1e9:.3g} GB/s"
            lines.append(f"The link between workers was not measured: {rate} are assumed.")
        lines.append(f"{self.verdict()}.")
        return "\n".join(lines)

    __str__ = __repr__ = explain  # what print and a notebook show
