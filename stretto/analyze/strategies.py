"""P workers: bytes, messages and synchronisations of every strategy, and the time the machine file predicts for it.

Conventions. b = 4 bytes per value. Halo exchange moves the input rows of every round of aggregation, forward always and
backward for all but the first layer. The all-reduce of |W| parameters moves 2 (P - 1) / P |W| b per worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil, sqrt
from typing import Any

from stretto.analyze.classify import Layer
from stretto.analyze.graph_stats import GraphStats, Partition
from stretto.analyze.machine_file import Machine
from stretto.dist import Staleness

B = 4
FANOUT, BATCH = 10, 1024
STALE = "partition + stale halo (T^R = 1)"


@dataclass(frozen=True)
class Problem:
    """What all strategies are given."""

    stats: GraphStats
    layers: tuple[Layer, ...]
    parameters: int  # values
    step: float  # seconds of a full-batch step on one worker
    on_edges: float  # of which in ops on edges
    around: float  # of which host code around the ops: every worker runs all of it
    activations: float  # bytes a full-batch step takes
    fixed: float  # bytes of parameters and their gradients
    features: float  # bytes of the input
    machine: Machine
    train: bool
    targets: int

    @property
    def forward_widths(self) -> list[int]:
        """Width of what each round of aggregation reads, in order."""
        return [layer.width_in for layer in self.layers for _ in range(max(layer.hops, 1))]

    @property
    def backward_widths(self) -> list[int]:
        """The same for gradients; the first layer's input needs none."""
        if not self.train or not self.layers:
            return []
        return self.forward_widths[max(self.layers[0].hops, 1) :]

    @property
    def rounds(self) -> int:
        """Exchanges of a step."""
        return len(self.forward_widths) + len(self.backward_widths)

    @property
    def width(self) -> int:
        """Values per node that all rounds together exchange."""
        return sum(self.forward_widths) + sum(self.backward_widths)

    def compute(self, edges: float, nodes: float) -> float:
        """Seconds of a worker that has these shares of the edges and of the nodes, while the others run too."""
        alone = self.around + self.on_edges * edges + (self.step - self.on_edges - self.around) * nodes
        return alone * self.machine.beside

    def allreduce(self, workers: int) -> float:
        """Bytes per worker."""
        return 2 * (workers - 1) / workers * self.parameters * B if self.train else 0.0


@dataclass(frozen=True)
class Strategy:
    """A way to run the step on P workers and what it costs. bytes: all workers together, per step."""

    name: str
    workers: int
    bytes: float
    messages: int
    syncs: int
    memory: float  # bytes per worker
    compute: float  # seconds
    communicate: float
    seconds: float  # of a step over the whole graph (an epoch, for sampling)
    exact: bool
    reason: str
    formula: str
    staleness: Staleness | None = None  # the engine's setting (stretto.dist), where its exchanges are the strategy's

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def _wire(problem: Problem, bytes_per_worker: float, messages: float) -> float:
    link = problem.machine
    return messages * link.link_latency + bytes_per_worker / link.link_bandwidth


def _split_memory(problem: Problem, share: float, halo: float) -> float:
    return problem.fixed + (problem.features + problem.activations) * share + halo


def _single(problem: Problem, part: Partition) -> Strategy:
    memory = problem.fixed + problem.features + problem.activations
    return Strategy(
        "one worker, full batch",
        1,
        0.0,
        0,
        0,
        memory,
        problem.step,
        0.0,
        problem.step,
        True,
        "nothing is exchanged; memory must hold every layer's activations",
        "0",
    )


def _halo(
    problem: Problem,
    part: Partition,
    rows: int,
    name: str,
    formula: str,
    reason: str,
    overlap: str,
    staleness: Staleness | None = None,
) -> Strategy:
    P = part.parts
    moved = B * rows * problem.width
    total = moved + P * problem.allreduce(P)
    rounds = problem.rounds
    messages = part.pairs * rounds + (2 * (P - 1) * P if problem.train else 0)
    share = max(part.edges) / max(1, problem.stats.num_edges)
    # A layer that multiplies first does so for the rows it pulled too.
    rows_held = max(own + pulled for own, pulled in zip(part.rows, part.halo, strict=True))
    compute = problem.compute(share, rows_held / max(1, problem.stats.num_nodes))
    worst = max(part.halo) / max(1, sum(part.halo)) if sum(part.halo) else 1 / P
    wire = _wire(problem, moved * worst + problem.allreduce(P), messages / P)
    seconds = {"none": compute + wire, "full": max(compute, wire), "interior": compute + 0.5 * wire}[overlap]
    syncs = (rounds + (1 if problem.train else 0)) if overlap != "full" else (1 if problem.train else 0)
    halo_bytes = B * max(part.halo) * sum(problem.forward_widths) * (2 if overlap == "full" else 1)
    return Strategy(
        name,
        P,
        total,
        messages,
        syncs,
        _split_memory(problem, share, halo_bytes),
        compute,
        wire,
        seconds,
        overlap != "full",
        reason,
        formula,
        staleness,
    )


def _pull(problem: Problem, part: Partition) -> Strategy:
    skew = part.imbalance["edges"]
    return _halo(
        problem,
        part,
        sum(part.halo),
        "partition + halo, pull",
        "b sum_p |B_p| (sum_l k_(l-1) + sum_(l>1) k_(l-1)) + 2 (P-1) |W| b",
        f"{sum(part.halo)} rows cross {part.parts} parts ({part.method}), edges {skew:.2f}x uneven",
        "none",
        Staleness(),
    )


def _push(problem: Problem, part: Partition) -> Strategy | None:
    if any(layer.kind == "A" for layer in problem.layers):
        return None  # a softmax needs two rounds or a merge; partial sums alone are not enough
    return _halo(
        problem,
        part,
        sum(part.push),
        "partition + halo, push",
        "as pull, with distinct remote destinations in place of sources",
        f"partial sums for {sum(part.push)} remote rows instead of {sum(part.halo)} pulled ones",
        "none",
    )


def _either(problem: Problem, part: Partition) -> Strategy | None:
    if any(layer.kind == "A" for layer in problem.layers) or part.best >= min(sum(part.halo), sum(part.push)):
        return None
    return _halo(
        problem,
        part,
        part.best,
        "partition + halo, pull or push per pair",
        "sum over pairs of min(pull, push)",
        f"each pair of parts takes its smaller side: {part.best} rows",
        "none",
    )


def _stale(problem: Problem, part: Partition) -> Strategy:
    return _halo(
        problem,
        part,
        sum(part.halo),
        STALE,
        "bytes as pull; time max(compute, exchange); T^R = 1 for features and gradients, all other T = 0, all L = 1",
        "the exchange hides behind the next step's compute; "
        f"{part.cut / max(1, sum(part.edges)):.0%} of the edges read rows that are one step old",
        "full",
        Staleness.halo(1),
    )


def _sampling(problem: Problem, part: Partition) -> Strategy:
    P, stats = part.parts, problem.stats
    rounds = len(problem.forward_widths)
    fan = min(FANOUT, max(1.0, stats.mean_degree))
    batch = min(BATCH, max(1, ceil(problem.targets / P)))
    nodes, frontier = float(batch), float(batch)
    for _ in range(rounds):
        frontier = min(frontier * fan, stats.num_nodes)
        nodes = min(nodes + frontier, stats.num_nodes)
    steps = ceil(problem.targets / (batch * P)) if problem.targets else 1
    share = nodes / max(1, stats.num_nodes)
    compute = problem.compute(share, share) * steps
    fetch = nodes * problem.layers[0].width_in * B * (1 - 1 / P) if problem.layers else 0.0
    total = steps * P * (fetch + problem.allreduce(P))
    wire = steps * _wire(problem, fetch + problem.allreduce(P), 3 * (P - 1))
    memory = problem.fixed + problem.features / P + problem.activations * share
    return Strategy(
        "data-parallel sampling",
        P,
        total,
        steps * 3 * (P - 1) * P,
        steps,
        memory,
        compute,
        wire,
        compute + wire,
        False,
        f"{steps} steps of {batch} seeds see {share:.0%} of the graph each; gradients are estimates",
        "steps P (c^L k b (1 - hit) + 2 (P-1)/P |W| b)",
    )


def _feature(problem: Problem, part: Partition) -> Strategy:
    P, n = part.parts, problem.stats.num_nodes
    per_worker = B * n * problem.width * (P - 1) / P**2 * 2
    rounds = 2 * problem.rounds
    wire = _wire(problem, per_worker + problem.allreduce(P), rounds * (P - 1))
    compute = problem.compute(1 / P, 1 / P)
    memory = _split_memory(problem, 1 / P, 0.0)
    return Strategy(
        "feature-parallel",
        P,
        P * (per_worker + problem.allreduce(P)),
        rounds * P * (P - 1),
        rounds + 1,
        memory,
        compute,
        wire,
        compute + wire,
        True,
        "rows are cut into columns: perfectly even whatever the graph, but all of them are redistributed twice a round",
        "2 n k (P-1)/P^2 b per worker and round",
    )


def _one_and_a_half(problem: Problem, part: Partition) -> Strategy | None:
    P, n = part.parts, problem.stats.num_nodes
    copies = max(2, round(sqrt(P)))
    if P < 4 or P % copies:
        return None
    per_worker = B * problem.width * (n / copies + n * copies / P)
    wire = _wire(problem, per_worker + problem.allreduce(P), problem.rounds * (P // copies))
    compute = problem.compute(1 / P, 1 / P)
    memory = problem.fixed + (problem.features + problem.activations) * copies / P
    return Strategy(
        "1.5-D, replicated",
        P,
        P * (per_worker + problem.allreduce(P)),
        problem.rounds * P * (P // copies),
        problem.rounds + 1,
        memory,
        compute,
        wire,
        compute + wire,
        True,
        f"{copies} copies of every block: fewer words, {copies}x the memory",
        "n k / c + n k c / P words per worker",
    )


def _pipeline(problem: Problem, part: Partition) -> Strategy | None:
    P, n = part.parts, problem.stats.num_nodes
    stages = len(problem.layers)
    if stages < 2 or stages < P:
        return None
    width = max(layer.width_out for layer in problem.layers)
    moved = B * n * width * (P - 1) * (2 if problem.train else 1)
    chunks = 4 * P
    compute = problem.compute(1 / P, 1 / P) * (chunks + P - 1) / chunks
    wire = _wire(problem, moved / max(1, P - 1), chunks * 2)
    memory = problem.fixed / P + problem.features + problem.activations / P
    return Strategy(
        "pipelined by layers",
        P,
        moved,
        chunks * (P - 1) * 2,
        2 * (P - 1),
        memory,
        compute,
        wire,
        max(compute, wire),
        True,
        f"{P} stages of whole layers over {chunks} chunks; layers are rarely equally heavy",
        "n k b per stage boundary",
    )


MANY: tuple[Callable[[Problem, Partition], Strategy | None], ...] = (
    _sampling,
    _pull,
    _push,
    _either,
    _stale,
    _feature,
    _one_and_a_half,
    _pipeline,
)


def strategies(problem: Problem, partitions: list[Partition]) -> list[Strategy]:
    """Every strategy for every P, fastest first; those that do not fit the memory come last."""
    found = [_single(problem, partitions[0])] if partitions else []
    for part in partitions:
        if part.parts > 1:
            found += [s for make in MANY if (s := make(problem, part)) is not None]
    return sorted(found, key=lambda s: (s.memory > problem.machine.memory, s.seconds))
