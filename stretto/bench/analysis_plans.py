"""For `stretto bench analysis`: the ways to run one step, and how far the predicted order of them is the measured one.

Ways are plans (the model as given; accelerated; with one layer by another plan than the chosen) and strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

from stretto.analyze import validate
from stretto.analyze.analysis import analyze
from stretto.analyze.graph_stats import Partitioner
from stretto.analyze.machine_file import Machine
from stretto.analyze.trace import Recorder
from stretto.analyze.workload import Workload
from stretto.compile.choose import CHOOSER, MOST_STEPS, Decision
from stretto.nn.base import record_of

OTHERS = 3  # plans of a layer beside the chosen one, the best by prediction
TIE = 0.05  # two ways that are measured as near as this have no order
Row = dict[str, Any]


@dataclass
class Replanned(Workload):
    """The step of an accelerated model, one of its layers by another plan than the one it has chosen."""

    decision: Decision | None = None
    plan: Any = None

    def run(self, recorder: Recorder | None = None) -> None:
        """One step; what was chosen stays chosen."""
        assert self.decision is not None
        with self.decision.instead(self.plan):
            super().run(recorder)


def other_plans(fast: Workload) -> dict[str, Workload]:
    """The step by other plans, one layer at a time; `fast` has settled on its own.

    A plan that runs the very ops of the chosen one is left out: where the nonzeros of X are multiplied, say, the order
    of the products around it changes nothing.
    """
    usual = _ops(fast)
    found: dict[str, Workload] = {}
    for path, layer in fast.model.named_modules():
        decision = CHOOSER.decision(record_of(layer).key)
        if decision is None or decision.chosen is None:
            continue
        plans = [plan for _, plan in decision.ranking.predicted if plan != decision.chosen]
        for plan in plans[:OTHERS]:
            step = Replanned(fast.model, fast.data, fast.mode, fast.step, decision=decision, plan=plan)
            if _ops(step) == usual:
                continue
            for _ in range(MOST_STEPS):
                step.run()
            found[f"accelerated, {path or 'model'} as {plan.name}"] = step
    return found


def _ops(workload: Workload) -> list[tuple[str, str]]:
    return [(op.name, op.shapes) for op in workload.trace()]


def strategies(workload: Workload, computer: Machine, workers: int) -> list[Row]:
    """The step on `workers` processes of one thread each, as partitions and as stretto.dist runs it; those that can."""
    report = analyze(workload.model, workload.data, machine=computer, procs=[1, workers])
    splitter = Partitioner(workload.data.edge_index, report.graph.num_nodes)
    rows = validate.partitioned(report, splitter, workers, 5)
    for name in validate.ENGINE:
        rows += validate.by_engine(report, splitter, name, workers, 5)
    timed = [row for row in rows if row["what"].endswith(validate.REPRICED)]
    return [
        {"plan": row["what"].removeprefix("step, ").removesuffix(f", {validate.REPRICED}"),
         "predicted": row["predicted"], "measured": row["measured"], "fastest": row["measured"]}
        for row in timed
    ]  # fmt: skip


def order(rows: list[Row]) -> tuple[int, int]:
    """Pairs of ways that the prediction has in the order measured, and pairs that it has not; ties aside."""
    right = wrong = 0
    for a, b in combinations(rows, 2):
        slow, fast = (a, b) if a["measured"] > b["measured"] else (b, a)
        if slow["measured"] <= (1 + TIE) * fast["measured"]:
            continue
        if slow["predicted"] > fast["predicted"]:
            right += 1
        else:  # told as equal is not told either
            wrong += 1
    return right, wrong


def tau(rows: list[Row]) -> float | None:
    """Kendall's rank correlation of predicted and measured times; None where all that was measured is a tie."""
    right, wrong = order(rows)
    return (right - wrong) / (right + wrong) if right + wrong else None
