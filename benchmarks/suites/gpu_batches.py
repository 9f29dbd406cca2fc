"""Training steps on batches that a sampler hands over as bare edge_index, on one CUDA device, beside stock PyG.

`python -m benchmarks.suites.gpu_batches --csv FILE`. A batch is new every step (its tensors are copied), or the same
few come again and again; its edges are in the order of their destinations.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import stretto
from benchmarks.suites import results
from benchmarks.suites.gpu import Net
from benchmarks.suites.gpu_parts import timed
from benchmarks.suites.gpu_rows import OURS, STOCK
from stretto.errors import expect

SIZES = (  # nodes, edges
    (20_000, 60_000),
    (60_000, 200_000),
    (120_000, 400_000),
    (180_000, 700_000),
    (250_000, 1_000_000),
)
BATCHES = 10
logger = logging.getLogger("stretto")


def batches(nodes: int, edges: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """edge_index, x and y of some batches; a quarter of the nodes receive messages."""
    found = []
    for _ in range(BATCHES):
        target = torch.randint(0, nodes // 4, (edges,), device="cuda").sort().values
        pairs = torch.stack([torch.randint(0, nodes, (edges,), device="cuda"), target])
        found.append((pairs, torch.randn(nodes, 128, device="cuda"), torch.randint(0, 40, (nodes,), device="cuda")))
    return found


def stepper(net: Any, given: list[tuple[Tensor, Tensor, Tensor]], *, new: bool) -> Callable[[], None]:
    """A training step on the next batch."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    turn = itertools.cycle(given)

    def step() -> None:
        pairs, x, y = next(turn)
        if new:
            pairs, x = pairs.clone(), x.clone()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(x, pairs), y).backward()
        optimizer.step()

    return step


def run() -> Iterator[results.Row]:
    """2-layer nets, 128 -> 256 -> 40."""
    expect(torch.cuda.is_available(), "bench gpu_batches: no CUDA device here")
    for model, (nodes, edges), new in itertools.product(("sage", "gcn", "gat"), SIZES, (True, False)):
        torch.manual_seed(0)
        stock = Net(model, (128, 256, 40)).cuda()
        given = batches(nodes, edges)
        ours = stretto.accelerate(copy.deepcopy(stock))
        candidates: dict[str, Callable[[], object]] = {
            OURS: stepper(ours, given, new=new),
            STOCK: stepper(stock, given, new=new),
        }
        for _ in range(4 * BATCHES):
            candidates[OURS]()
        measured = results.figures(timed(candidates))
        case = {"model": model, "nodes": nodes, "edges": edges, "batches": "new" if new else "again"}
        yield results.row(
            "batches", case, measured, device="cuda", stock=STOCK,
            command="python -m benchmarks.suites.gpu_batches", more={"path": stretto.report(ours).rows[0].path},
        )  # fmt: skip


def main() -> None:
    """Rows to the log and to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for row in run():
        logger.info("%s", row)
        results.save(arguments.csv, [row])


if __name__ == "__main__":
    main()
