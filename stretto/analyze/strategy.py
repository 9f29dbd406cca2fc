"""A way to run a step on P workers: what it is given (Problem), and what it costs (Strategy).

Conventions. b bytes per value, as the parameters have. Halo exchange moves the input rows of every round of
aggregation, forward always and backward for layers whose input depends on parameters: of a plain stack all but the
first. The all-reduce of |W| parameters moves 2 (P - 1) / P |W| b per worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.analyze.graph_stats import GraphStats
from stretto.dist import Schedule, Staleness
from stretto.machine.file import Machine
from stretto.observe.layer import PICK, Layer

ATTENTION = "attention needs its softmax over all neighbours: two rounds or a merge, not partial sums alone"
PICKS = "a median needs all neighbours sorted: those of parts do not add up to it"


@dataclass(frozen=True)
class Problem:
    """What all strategies are given."""

    stats: GraphStats
    layers: tuple[Layer, ...]
    parameters: int  # values
    step: float  # seconds of a full-batch step on one worker
    on_edges: float  # of which in ops on edges
    around: float  # of which host code around the ops: every worker runs all of it
    activations: float  # bytes a full-batch step takes, gradients of parameters not included
    fixed: float  # bytes of parameters and their gradients
    features: float  # bytes of the input
    machine: Machine
    train: bool
    targets: int
    graphs: int = 1  # that share no edges
    edge_products: bool = False  # some layer multiplies rows of edges by a weight
    b: int = 4  # bytes of a value

    @property
    def attends(self) -> bool:
        """Whether a layer has a softmax over neighbours."""
        return any(layer.kind == "A" for layer in self.layers)

    @property
    def not_in_parts(self) -> str:
        """Why neighbours cannot be aggregated part by part; empty: they can."""
        return ATTENTION if self.attends else PICKS if any(PICK in layer.reduces for layer in self.layers) else ""

    @property
    def forward_widths(self) -> list[int]:
        """Width of what each round of aggregation reads, in order."""
        return [width for layer in self.layers for width, _ in layer.rounds]

    @property
    def backward_widths(self) -> list[int]:
        """The same for gradients; an input that no parameter is behind needs none."""
        if not self.train:
            return []
        return [width for layer in self.layers for width, learned in layer.rounds if learned]

    @property
    def rounds(self) -> int:
        """Exchanges of a step."""
        return len(self.forward_widths) + len(self.backward_widths)

    @property
    def width(self) -> int:
        """Values per node that all rounds together exchange."""
        return sum(self.forward_widths) + sum(self.backward_widths)

    def edge_share(self, edges: float, rows: float) -> float:
        """Share of the work on edges of a part: by its edges; without any, layers have self-loops of their own."""
        all_edges, all_rows = self.stats.num_edges, self.stats.num_nodes
        return edges / all_edges if all_edges else rows / max(1, all_rows)

    def compute(self, edges: float, nodes: float) -> float:
        """Seconds of a worker that has these shares of the edges and of the nodes, while the others run too."""
        alone = self.around + self.on_edges * edges + (self.step - self.on_edges - self.around) * nodes
        return alone * self.machine.beside

    def allreduce(self, workers: int) -> float:
        """Bytes per worker."""
        return 2 * (workers - 1) / workers * self.parameters * self.b if self.train else 0.0

    def turns(self, workers: int) -> int:
        """Messages of a worker in the all-reduce, round a ring; there is none where nothing is trained."""
        return 2 * (workers - 1) if self.train else 0


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
    schedule: Schedule | None = None  # and who waits for whom, where it is not the usual one
    fits: bool = True  # into the machine's memory
    here: bool = True  # the machine has so many workers


@dataclass(frozen=True)
class Refusal:
    """A strategy that does not apply, and why."""

    name: str
    workers: int
    reason: str


def wire(problem: Problem, bytes_per_worker: float, messages: float) -> float:
    """Seconds of one worker's messages."""
    link = problem.machine
    return messages * link.link_latency + bytes_per_worker / link.link_bandwidth


def side_by_side(problem: Problem, compute: float, moving: float) -> float:
    """Seconds of computing while an exchange is under way: as much of it passes unseen as the machine hides."""
    return compute + moving - min(compute, problem.machine.hidden * moving)


def split_memory(problem: Problem, share: float, halo: float) -> float:
    """Bytes of a worker that holds this share of the rows, and so many bytes of others'."""
    return problem.fixed + (problem.features + problem.activations) * share + halo


def priced(
    problem: Problem,
    name: str,
    workers: int,
    *,
    sent: float,
    messages: int,
    waits: int,
    compute: float,
    memory: float,
    reason: str,
    formula: str,
    busiest: float | None = None,
) -> Strategy:
    """A strategy whose workers compute and exchange in turn, then sum up gradients.

    sent, messages: of all workers in a step, without those of that sum. busiest: what the worker that moves most
    brings in; None: all move as much.
    """
    messages += workers * problem.turns(workers)
    busiest = sent / workers if busiest is None else busiest
    moving = wire(problem, busiest + problem.allreduce(workers), messages / workers)
    return Strategy(
        name=name,
        workers=workers,
        bytes=sent + workers * problem.allreduce(workers),
        messages=messages,
        syncs=waits + problem.train,
        memory=memory,
        compute=compute,
        communicate=moving,
        seconds=compute + moving,
        exact=True,
        reason=reason,
        formula=formula,
    )
