"""Strategies that cut matrices instead of the graph: columns, replicated blocks, grids of blocks, layers as stages.

Words of the communication-avoiding products are those of the CAGNET family (1-D, 1.5-D, 2-D, 3-D).
"""

from __future__ import annotations

from math import ceil, sqrt

from stretto.analyze.graph_stats import Partition, replicas
from stretto.analyze.strategy import Problem, Strategy, priced, side_by_side, split_memory, wire


def feature(problem: Problem, part: Partition) -> Strategy | str:
    """Columns instead of rows."""
    if problem.attends or problem.edge_products:
        what = "the score of an edge" if problem.attends else "a product on edges"
        return f"{what} needs whole rows, and here every worker has some of their columns"
    P, n, widths = part.parts, problem.stats.num_nodes, problem.forward_widths
    if min(widths, default=P) < P:
        return f"rows of {min(widths)} values cannot be cut into {P} columns"
    skew = max((ceil(width / P) * P / width for width in widths), default=1.0)
    return priced(
        problem,
        "feature-parallel",
        P,
        sent=problem.b * n * problem.width * (P - 1) / P * 2,
        messages=P * 2 * problem.rounds * (P - 1),
        waits=2 * problem.rounds,
        compute=problem.compute(skew / P, skew / P),
        memory=split_memory(problem, 1 / P, 0.0),
        reason=f"rows are cut into columns, {skew:.2f}x uneven whatever the graph, but all move twice a round",
        formula="2 n k (P-1)/P^2 b per worker and round",
    )


def one_and_a_half(problem: Problem, part: Partition) -> Strategy | str:
    """1.5-D: n k / c + n k c / P words per worker and round."""
    P, n = part.parts, problem.stats.num_nodes
    copies = replicas(P)
    if not copies:
        return "so many workers cannot be shared out to copies evenly"
    return problem.not_in_parts or priced(
        problem,
        "1.5-D, replicated",
        P,
        sent=P * problem.b * problem.width * (n / copies + n * copies / P),
        messages=P * problem.rounds * (P // copies),
        waits=problem.rounds,
        reason=f"{copies} copies of every block: fewer words, {copies}x the memory; edges {part.blocks[0]:.2f}x uneven",
        formula="n k / c + n k c / P words per worker",
        **_in_blocks(problem, P, copies, part.blocks[0]),
    )


def two_d(problem: Problem, part: Partition) -> Strategy | str:
    """2-D: (n k + m) / sqrt(P) words per worker and round."""
    side = round(sqrt(part.parts))
    if side < 2 or side**2 != part.parts:
        return "so many workers are no square"
    return problem.not_in_parts or _grid(problem, "2-D", side, copies=1, skew=part.blocks[1])


def three_d(problem: Problem, part: Partition) -> Strategy | str:
    """3-D: (n k + m) / P^(2/3) words per worker and round, in P^(1/3) times the memory."""
    side = round(part.parts ** (1 / 3))
    if side < 2 or side**3 != part.parts:
        return "so many workers are no cube"
    return problem.not_in_parts or _grid(problem, "3-D", side, copies=side, skew=part.blocks[2])


def _grid(problem: Problem, name: str, side: int, *, copies: int, skew: float) -> Strategy:
    """Matrices cut into blocks along both sides, and along a third with a copy for each of its blocks."""
    P, n, m = side**2 * copies, problem.stats.num_nodes, problem.stats.num_edges
    return priced(
        problem,
        name,
        P,
        sent=P * problem.b * (n * problem.width + m * problem.rounds) / (side * copies),
        messages=P * problem.rounds * 2 * (side - 1),
        waits=problem.rounds * side,
        reason=f"blocks on a grid of side {side}: no halo, so it does not depend on the cut; edges {skew:.2f}x uneven",
        formula=f"(n k + m) / {'sqrt(P)' if copies == 1 else 'P^(2/3)'} words per worker and round",
        **_in_blocks(problem, P, copies, skew),
    )


def _in_blocks(problem: Problem, workers: int, copies: int, skew: float) -> dict[str, float]:
    """What a worker computes and holds of matrices in blocks, each of which is there so many times."""
    blocks = (problem.features + problem.activations) * copies / workers
    return {"compute": problem.compute(skew / workers, 1 / workers), "memory": problem.fixed + blocks}


def pipeline(problem: Problem, part: Partition) -> Strategy | str:
    """Layers as stages."""
    P, n = part.parts, problem.stats.num_nodes
    stages = len(problem.layers)
    if stages < 2 or stages < P:
        return f"{stages} layer{'s' * (stages != 1)} cannot be shared out to so many stages"
    width = max(layer.width_out for layer in problem.layers)
    ways = 2 if problem.train else 1  # rows forward, their gradients back
    moved = problem.b * n * width * (P - 1) * ways
    chunks = 4 * P
    host = problem.compute(0.0, 0.0) / P * chunks  # of a stage: the code around its layers runs for every chunk
    work = problem.compute(1 / P, 1 / P) - problem.compute(0.0, 0.0)
    compute = (work + host) * (chunks + P - 1) / chunks
    moving = wire(problem, moved / max(1, P - 1), chunks * ways)
    exact = problem.graphs >= chunks  # a chunk of one graph would have to wait for the rows of all others
    stale = "" if exact else "; a chunk reads rows of the other chunks as they were a step before"
    return Strategy(
        name="pipelined by layers",
        workers=P,
        bytes=moved,
        messages=chunks * (P - 1) * ways,
        syncs=ways * (P - 1),
        memory=problem.fixed / P + problem.features + problem.activations / P,
        compute=compute,
        communicate=moving,
        seconds=side_by_side(problem, compute, moving),
        exact=exact,
        reason=f"{P} stages of whole layers over {chunks} chunks; layers are rarely equally heavy{stale}",
        formula="n k b per stage boundary",
    )
