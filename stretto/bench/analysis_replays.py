"""For `stretto bench analysis`: hot ops outside the model over in it, and the gain of advice over the predicted one, in
several processes; each ratio is their median.

Where a process has its memory and its code is luck that lasts as long as it lives: an op may be a third slower in its
models than outside them, steadily, and in the next process not at all.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from statistics import median
from typing import Any

from stretto import datasets
from stretto.analyze import validate
from stretto.analyze.machine_file import Machine
from stretto.analyze.models import as_data, make
from stretto.analyze.subject import usable
from stretto.analyze.workload import Workload
from stretto.bench.run import threads as limited
from stretto.compile.choose import MOST_STEPS
from stretto.profile.profiling import Profile
from stretto.profile.profiling import make as make_profile
from stretto.profile.replay import NEAR, replay, verdict

HIDDEN = 64
HOT = 0.9  # share of a step's time that its hot ops take
ALLOWED = 0.2  # how far a gain may be from the one predicted
CLOSE = 0.05  # to what is allowed
Row = dict[str, Any]


@dataclass
class Told:
    """What one process has to say of a model on a graph."""

    replays: list[Row]
    gain: Row


def in_processes(processes: int, model: str, graph: str, *rest: Any) -> Told:
    """What `one_process` finds, the median of so many new ones; 1: in this one.

    Where a verdict is close, all verdicts of the cell are those of twice as many processes and one more. Nothing else
    decides how many there are: to go on until all is well would find what it looks for.
    """
    if processes == 1:
        return one_process(model, graph, *rest)
    fresh = multiprocessing.get_context("spawn")
    with fresh.Pool(1, maxtasksperchild=1) as process:
        several = lambda count: [process.apply(one_process, (model, graph, *rest)) for _ in range(count)]  # noqa: E731
        found = several(processes)
        if close(middle(found)):
            found += several(processes + 1)
    return middle(found)


def close(told: Told) -> bool:
    """Whether more processes may say otherwise."""
    agreement = told.gain["agreement"]
    return any(r["hot"] and abs(r["real"] - 1) > NEAR - CLOSE for r in told.replays) or (
        agreement is not None and abs(agreement - 1) > ALLOWED - CLOSE
    )


def one_process(model: str, graph: str, computer: Machine, count: int, device: str, seconds: float) -> Told:
    """Every op of a step outside the model over in it, of the model as given and accelerated, with so many threads;
    then the gain of the advice."""
    with limited(count):
        data = as_data(datasets.load_graph(graph), width=HIDDEN).to(usable(device))
        net = make(model, data.x.size(1), HIDDEN, int(data.y.max()) + 1).to(data.x.device)
        workload = Workload(net, data)
        rows: list[Row] = []
        for name, plan in validate.plans(workload).items():
            for _ in range(MOST_STEPS):
                plan.run()
            profile = make_profile(plan, plan.timed(repeats=3, warmup=1), computer, model)
            rows += replayed(profile, {"model": model, "graph": graph, "plan": name}, seconds)
        done = make_profile(workload, workload.timed(repeats=1), computer, model).apply()
        gain = {"model": model, "graph": graph, "reason": done["reason"], "predicted gain ms": done["predicted_ms"],
                "realised gain ms": done.get("realised_ms"), "agreement": done.get("agreement")}  # fmt: skip
        return Told(rows, gain)


def replayed(profile: Profile, where: Row, seconds: float) -> list[Row]:
    """Every op of the step outside the model over in it, with its own indices and with shuffled ones."""
    rows, hot = replay(profile, share=1.0, seconds=seconds), len(profile.hot(HOT))
    return [
        {**where, "op": row["op"], "phase": row["phase"], "shapes": row["shapes"], "hot": place < hot,
         "ms": row["in model ms"], "real": row["ratio"], "interval": row["interval"],
         "itself": row["itself interval"], "verdict": verdict(row), "turns": row["real indices"]["repeats"],
         "shuffled": row["shuffled indices"]["ratio"] if "shuffled indices" in row else None}
        for place, row in enumerate(rows)
    ]  # fmt: skip


def middle(found: list[Told]) -> Told:
    """Of several processes: the medians."""
    gains = [told.gain for told in found]
    known = [gain["agreement"] for gain in gains if gain["agreement"] is not None]
    agreement = median(known) if 2 * len(known) > len(gains) else None  # most of them must advise something
    numbers = {key: median(gain[key] or 0.0 for gain in gains) for key in ("predicted gain ms", "realised gain ms")}
    gain = {**gains[0], **numbers, "agreement": agreement, "each": [gain["agreement"] for gain in gains]}
    return Told(merged([told.replays for told in found]), gain)


def merged(found: list[list[Row]]) -> list[Row]:
    """The rows of several processes as one table. An op that some of them do not have (a plan may be chosen anew)
    counts where it is; it is hot where most processes say so."""
    table: dict[Any, list[Row]] = {}
    for rows in found:
        seen: dict[Any, int] = {}
        for row in rows:
            key = (row["plan"], row["op"], row["phase"], row["shapes"])
            seen[key] = seen.get(key, 0) + 1  # the same but for its layout
            table.setdefault((*key, seen[key]), []).append(row)
    return [_middle(rows, len(found)) for rows in table.values()]


def _middle(rows: list[Row], processes: int) -> Row:
    ratio = median(row["real"] for row in rows)
    itself = tuple(median(row["itself"][end] for row in rows) for end in (0, 1))
    shuffled = [row["shuffled"] for row in rows if row["shuffled"] is not None]
    return {
        **rows[0], "hot": 2 * sum(row["hot"] for row in rows) > processes, "ms": median(row["ms"] for row in rows),
        "real": ratio, "each": [row["real"] for row in rows], "itself": itself,
        "interval": (min(row["interval"][0] for row in rows), max(row["interval"][1] for row in rows)),
        "verdict": verdict({"ratio": ratio, "itself interval": itself}), "turns": min(row["turns"] for row in rows),
        "shuffled": median(shuffled) if shuffled else None,
    }  # fmt: skip
