"""Strategies that cut matrices instead of the graph: columns, replicated blocks, grids of blocks, layers as stages.

Words of the communication-avoiding products are those of the CAGNET family (1-D, 1.5-D, 2-D, 3-D).
"""

from __future__ import annotations

from math import sqrt

from stretto.analyze.graph_stats import Partition
from stretto.analyze.strategy import B, Problem, Strategy, split_memory, wire


def feature(problem: Problem, part: Partition) -> Strategy:
    """Columns instead of rows."""
    P, n = part.parts, problem.stats.num_nodes
    per_worker = B * n * problem.width * (P - 1) / P**2 * 2
    rounds = 2 * problem.rounds
    moving = wire(problem, per_worker + problem.allreduce(P), rounds * (P - 1))
    compute = problem.compute(1 / P, 1 / P)
    memory = split_memory(problem, 1 / P, 0.0)
    return Strategy(
        "feature-parallel",
        P,
        P * (per_worker + problem.allreduce(P)),
        rounds * P * (P - 1),
        rounds + 1,
        memory,
        compute,
        moving,
        compute + moving,
        True,
        "rows are cut into columns: perfectly even whatever the graph, but all of them are redistributed twice a round",
        "2 n k (P-1)/P^2 b per worker and round",
    )


def one_and_a_half(problem: Problem, part: Partition) -> Strategy | str:
    """1.5-D: n k / c + n k c / P words per worker and round."""
    P, n = part.parts, problem.stats.num_nodes
    ways = [c for c in range(2, P) if P % c == 0]
    if not ways:
        return f"{P} workers cannot be shared out to copies evenly"
    copies = min(ways, key=lambda c: 1 / c + c / P)
    per_worker = B * problem.width * (n / copies + n * copies / P)
    moving = wire(problem, per_worker + problem.allreduce(P), problem.rounds * (P // copies))
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
        moving,
        compute + moving,
        True,
        f"{copies} copies of every block: fewer words, {copies}x the memory",
        "n k / c + n k c / P words per worker",
    )


def _grid(problem: Problem, part: Partition, name: str, words: float, side: int, copies: float, text: str) -> Strategy:
    """Matrices cut into blocks along both sides (and a third); words: per worker and step."""
    P = part.parts
    per_worker = B * words
    messages = problem.rounds * 2 * (side - 1)
    moving = wire(problem, per_worker + problem.allreduce(P), messages)
    compute = problem.compute(1 / P, 1 / P)
    return Strategy(
        name,
        P,
        P * (per_worker + problem.allreduce(P)),
        messages * P,
        problem.rounds * side + 1,
        problem.fixed + (problem.features + problem.activations) * copies / P,
        compute,
        moving,
        compute + moving,
        True,
        f"blocks on a grid of side {side}: no halo, so it does not depend on the cut; blocks of a graph are uneven",
        text,
    )


def two_d(problem: Problem, part: Partition) -> Strategy | str:
    """2-D: (n k + m) / sqrt(P) words per worker and round."""
    P, side = part.parts, round(sqrt(part.parts))
    if P < 4 or side * side != P:
        return f"{P} workers are no square"
    n, m = problem.stats.num_nodes, problem.stats.num_edges
    words = (n * problem.width + m * problem.rounds) / side
    return _grid(problem, part, "2-D", words, side, 1.0, "(n k + m) / sqrt(P) words per worker and round")


def three_d(problem: Problem, part: Partition) -> Strategy | str:
    """3-D: (n k + m) / P^(2/3) words per worker and round, in P^(1/3) times the memory."""
    P, side = part.parts, round(part.parts ** (1 / 3))
    if P < 8 or side**3 != P:
        return f"{P} workers are no cube"
    n, m = problem.stats.num_nodes, problem.stats.num_edges
    words = (n * problem.width + m * problem.rounds) / side**2
    return _grid(problem, part, "3-D", words, side, float(side), "(n k + m) / P^(2/3) words per worker and round")


def pipeline(problem: Problem, part: Partition) -> Strategy | str:
    """Layers as stages."""
    P, n = part.parts, problem.stats.num_nodes
    stages = len(problem.layers)
    if stages < 2 or stages < P:
        return f"{stages} layer{'s' * (stages != 1)} cannot be shared out to {P} stages"
    width = max(layer.width_out for layer in problem.layers)
    moved = B * n * width * (P - 1) * (2 if problem.train else 1)
    chunks = 4 * P
    compute = problem.compute(1 / P, 1 / P) * (chunks + P - 1) / chunks
    moving = wire(problem, moved / max(1, P - 1), chunks * 2)
    memory = problem.fixed / P + problem.features + problem.activations / P
    return Strategy(
        "pipelined by layers",
        P,
        moved,
        chunks * (P - 1) * 2,
        2 * (P - 1),
        memory,
        compute,
        moving,
        max(compute, moving),
        True,
        f"{P} stages of whole layers over {chunks} chunks; layers are rarely equally heavy",
        "n k b per stage boundary",
    )
