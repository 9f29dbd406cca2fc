"""P workers: bytes, messages and synchronisations of every strategy, and the time the machine file predicts for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import ceil

from stretto.analyze.graph_stats import Partition
from stretto.analyze.layouts import feature, one_and_a_half, pipeline, three_d, two_d
from stretto.analyze.strategy import Problem, Refusal, Strategy, priced, side_by_side, split_memory, wire
from stretto.dist import Schedule, Staleness

FANOUT, BATCH = 10, 1024
PULL = "partition + halo, pull"
STALE = "partition + stale halo (T^R = 1)"
OVERLAPPED = "partition + halo, overlapped"


def _single(problem: Problem, part: Partition) -> Strategy:
    return Strategy(
        name="one worker, full batch",
        workers=1,
        bytes=0.0,
        messages=0,
        syncs=0,
        memory=problem.fixed + problem.features + problem.activations,
        compute=problem.step,
        communicate=0.0,
        seconds=problem.step,
        exact=True,
        reason="nothing is exchanged; memory must hold every layer's activations",
        formula="0",
    )


def _halo(problem: Problem, part: Partition, rows: int, name: str, reason: str, formula: str) -> Strategy:
    """Every worker computes its part and exchanges the rows of its halo, before or after, then all sum up gradients."""
    moved = problem.b * rows * problem.width
    share = max(problem.edge_share(*own) for own in zip(part.edges, part.rows, strict=True))
    # A layer that multiplies first does so for the rows it pulled too.
    rows_there = max(own + pulled for own, pulled in zip(part.rows, part.halo, strict=True))
    halo = sum(part.halo)
    return priced(
        problem,
        name,
        part.parts,
        sent=moved,
        busiest=moved * max(part.halo) / halo if halo else None,
        messages=part.pairs * problem.rounds,
        waits=problem.rounds,
        compute=problem.compute(share, rows_there / max(1, problem.stats.num_nodes)),
        memory=split_memory(problem, share, _halo_bytes(problem, part)),
        reason=reason,
        formula=formula,
    )


def _halo_bytes(problem: Problem, part: Partition) -> float:
    """Rows of others that the largest halo holds, one set for each layer."""
    return problem.b * max(part.halo) * sum(problem.forward_widths)


def _gradients(problem: Problem, part: Partition) -> float:
    """Seconds of the sum of gradients, which a step waits for."""
    return wire(problem, problem.allreduce(part.parts), problem.turns(part.parts))


def _pull(problem: Problem, part: Partition) -> Strategy:
    skew = part.imbalance["edges"]
    plan = _halo(
        problem,
        part,
        sum(part.halo),
        PULL,
        f"{sum(part.halo)} rows cross {part.parts} parts ({part.method}), edges {skew:.2f}x uneven",
        "b sum_p |B_p| (sum_l k_(l-1) + sum_(l with learned input) k_(l-1)) + 2 (P-1) |W| b",
    )
    return dataclasses.replace(plan, staleness=Staleness())


def _push(problem: Problem, part: Partition) -> Strategy | str:
    return problem.not_in_parts or _halo(
        problem,
        part,
        sum(part.push),
        "partition + halo, push",
        f"partial sums for {sum(part.push)} remote rows instead of {sum(part.halo)} pulled ones",
        "as pull, with distinct remote destinations in place of sources",
    )


def _either(problem: Problem, part: Partition) -> Strategy | str:
    if not problem.not_in_parts and part.best >= min(sum(part.halo), sum(part.push)):
        return "no pair of parts does better than all by the same side"
    return problem.not_in_parts or _halo(
        problem,
        part,
        part.best,
        "partition + halo, pull or push per pair",
        f"each pair of parts takes its smaller side: {part.best} rows",
        "sum over pairs of min(pull, push)",
    )


def _hides(problem: Problem) -> str:
    """How much of an exchange hides, to go on with what it hides behind."""
    hidden = problem.machine.hidden
    return "the exchange hides" if hidden == 1 else f"{hidden:.0%} of the exchange hides"


def _overlapped(problem: Problem, part: Partition) -> Strategy:
    """As pull; rows that need no others are computed while rows are under way, the sum of gradients follows.

    A layer runs for either kind of row, so that the host code around its ops runs twice.
    """
    plan, gradients = _pull(problem, part), _gradients(problem, part)
    n = max(1, problem.stats.num_nodes)
    halo, seconds = plan.communicate - gradients, 0.0
    again = problem.compute(0.0, 0.0)
    for own, edges, inner, pulled in zip(part.rows, part.edges, part.interior, part.halo, strict=True):
        compute = problem.compute(problem.edge_share(edges, own), (own + pulled) / n)
        interior = compute * inner / max(1, edges)
        seconds = max(seconds, side_by_side(problem, interior, halo) + compute - interior + again)
    share = sum(part.interior) / max(1, sum(part.edges))
    return dataclasses.replace(
        plan,
        name=OVERLAPPED,
        seconds=seconds + gradients,
        reason=f"{_hides(problem)} behind the {share:.0%} of the edges that lead to rows which need no others",
        formula="bytes as pull; time interior + exchange - min(interior, hidden exchange) + boundary + host code again "
        "+ sum of gradients",
        schedule=Schedule("async", "async"),
    )


def _stale(problem: Problem, part: Partition) -> Strategy:
    """As pull, with the rows of the step before: the exchange goes on while the next step computes."""
    plan, gradients = _pull(problem, part), _gradients(problem, part)
    return dataclasses.replace(
        plan,
        name=STALE,
        syncs=int(problem.train),
        memory=plan.memory + _halo_bytes(problem, part),  # what arrives, beside what is read
        seconds=side_by_side(problem, plan.compute, plan.communicate - gradients) + gradients,
        exact=False,
        reason=f"{_hides(problem)} behind the next step's compute; "
        f"{part.cut / max(1, sum(part.edges)):.0%} of the edges read rows that are one step old",
        formula="bytes as pull; time compute + exchange - min(compute, hidden exchange) + sum of gradients; "
        "T^R = 1 for features and gradients, all other T = 0, all L = 1",
        staleness=Staleness.halo(1),
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else f"{share:.1g}" if share < 1e-4 else f"{share:.2%}"


def _sampling(problem: Problem, part: Partition) -> Strategy:
    P, stats = part.parts, problem.stats
    rounds = len(problem.forward_widths)
    fan = min(FANOUT, max(1.0, stats.mean_degree))
    batch = min(BATCH, max(1, ceil(problem.targets / P)))
    nodes, frontier, edges = float(batch), float(batch), 0.0
    for _ in range(rounds):
        edges += frontier * fan
        frontier = min(frontier * fan, stats.num_nodes)
        nodes = min(nodes + frontier, stats.num_nodes)
    edges = min(edges, nodes * fan, stats.num_edges)
    steps = ceil(problem.targets / (batch * P)) if problem.targets else 1
    share = nodes / max(1, stats.num_nodes)
    compute = problem.compute(problem.edge_share(edges, nodes), share) * steps
    fetch = nodes * problem.layers[0].width_in * problem.b * (1 - 1 / P) if problem.layers else 0.0
    total = steps * P * (fetch + problem.allreduce(P))
    messages = P - 1 + problem.turns(P)
    moving = steps * wire(problem, fetch + problem.allreduce(P), messages)
    what = "gradients are estimates" if problem.train else "results are estimates"
    return Strategy(
        name="data-parallel sampling",
        workers=P,
        bytes=total,
        messages=steps * messages * P,
        syncs=steps,
        memory=problem.fixed + problem.features / P + fetch + problem.activations * share,
        compute=compute,
        communicate=moving,
        seconds=compute + moving,
        exact=False,
        reason=f"{steps} step{'s' * (steps != 1)} of {batch} seeds see {_percent(share)} of the graph each; {what}",
        formula="steps P (c^L k b (1 - hit) + 2 (P-1)/P |W| b)",
    )


# name -> the strategy on a partition's P workers, or why there is none
MANY: dict[str, Callable[[Problem, Partition], Strategy | str]] = {
    "data-parallel sampling": _sampling,
    PULL: _pull,
    "partition + halo, push": _push,
    "partition + halo, pull or push per pair": _either,
    OVERLAPPED: _overlapped,
    STALE: _stale,
    "feature-parallel": feature,
    "1.5-D, replicated": one_and_a_half,
    "2-D": two_d,
    "3-D": three_d,
    "pipelined by layers": pipeline,
}


def strategies(problem: Problem, partitions: list[Partition]) -> list[Strategy]:
    """Every strategy for every P, fastest first; those that do not fit the memory come last.

    Where times are the same to four digits, fewer workers come first, then what is exact, then fewer bytes.
    """
    machine = problem.machine
    result = [_single(problem, partitions[0])] if partitions else []
    for part in partitions:
        if part.parts > 1:
            result += [s for make in MANY.values() if isinstance(s := make(problem, part), Strategy)]
    known = [
        dataclasses.replace(s, fits=s.memory <= machine.memory, here=s.workers <= max(1, machine.workers))
        for s in result
    ]
    return sorted(known, key=lambda s: (not s.fits, float(f"{s.seconds:.3e}"), s.workers, not s.exact, s.bytes))


def refusals(problem: Problem, partitions: list[Partition]) -> list[Refusal]:
    """The strategies that do not apply, for every P, with the reason."""
    return [
        Refusal(name, part.parts, reason)
        for part in partitions
        if part.parts > 1
        for name, make in MANY.items()
        if isinstance(reason := make(problem, part), str)
    ]
