"""What accelerating one layer saves in the step that it is part of.

On a card a layer alone is mostly its host code, while in a step the host is ahead of the card or behind it: what is
saved is then another number. So the step itself runs with one layer accelerated, in turns with the stock one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stretto.compile.choose import MOST_STEPS
from stretto.graph import Graph
from stretto.machine.timing import Timing, as_alone, ratio, waiter
from stretto.observe.workload import Workload


def hidden(device: torch.device) -> bool:
    """Whether the host goes on while the device works: a layer's cost alone is then not its share of a step."""
    return waiter(device) is not None


def with_new_graph(step: Callable[[], object]) -> Callable[[], object]:
    """The step as it is on a graph that was never seen before."""

    def call() -> object:
        Graph.cache_clear()
        return step()

    return call


def name_of(site: str) -> str:
    """What the step with this layer accelerated is called among the steps that are timed."""
    return f"accelerated, the step with {site}"


def step_with(workload: Workload, path: str, new_graph: bool) -> Callable[[], object]:
    """The workload's step, of a copy of its model whose layer at `path` is accelerated and has its plans."""
    from stretto import accelerate

    changed = workload.copied()
    accelerate(changed.model.get_submodule(path))
    run = with_new_graph(changed.run) if new_graph else changed.run
    for _ in range(MOST_STEPS):
        run()
    return as_alone(run, ours=True)


def gain(row: dict[str, Any], whole: Timing, changed: Timing) -> dict[str, Any]:
    """What a row of advice says of the step, where the step was timed with this layer accelerated."""
    times, low, high = ratio(whole, changed)
    advised = row["advice"] == "accelerate"
    saves = max(0.0, whole.median - changed.median) if advised else 0.0
    return {
        "saves_ms": saves * 1e3,
        "in_step": True,  # not alone
        "reason": f"{row['reason']}; {times:.2f}x ({low:.2f}-{high:.2f}) in the step",
    }
