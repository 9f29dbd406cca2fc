"""The largest graph a GAT layer can be trained on in a given memory: stock PyG beside stretto.

    python examples/attention_memory.py [--memory-gib 8] [--confirm 1.0] [--plot attention_memory.png]

On growing random graphs GATConv(128, 64, heads=4) is trained for two steps, each graph in a process of its own, which
reports its peak above an idle process: features, edge_index, weights and gradients are in it. A line through these
points foretells the largest graph. A graph of that size is then made and trained on; the table shows what it took, and
a smaller one is tried where it took too much. --confirm 0.25 does so for a quarter of the memory, 0 not at all.
Linux only: the peak is the kernel's own high-water mark.
"""

import argparse
import ctypes
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch_geometric.nn import GATConv

from stretto import accelerate
from stretto.datasets.families import rmat
from stretto.kernels import native

NODES = (8192, 16384, 32768, 65536)  # 10 draws of an edge per node
HEADS, WIDTH, INPUT = 4, 64, 128
STEPS = 2  # the second finds what the first has left
AIM = 0.98  # of the memory: what a line through smaller graphs foretells is not exact
TRIES = 3


@dataclass
class Point:
    """A graph that was trained on, and the bytes it took."""

    nodes: int
    edges: int
    taken: int


def graph(num_nodes: int) -> torch.Tensor:
    """A power-law graph of any number of nodes: R-MAT of the next power of two, some neighbours made one -> [2, E]."""
    scale = (num_nodes - 1).bit_length()
    return rmat(scale, 10 * num_nodes)[0] * num_nodes >> scale


def measure(which: str, num_nodes: int) -> None:
    """Train; prints edges and the bytes taken at the peak."""
    conv = GATConv(INPUT, WIDTH, heads=HEADS)
    _train(conv, which, torch.randn(64, INPUT), graph(64))  # libraries are loaded and threads started before one counts
    trim = ctypes.CDLL(None).malloc_trim
    trim(0)  # what the first step took to calibrate this machine is no part of training
    idle = _status("VmRSS")
    edge_index = graph(num_nodes)
    x = torch.randn(num_nodes, INPUT)
    trim(0)  # nor is what making the graph took
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(STEPS):
        _train(conv, which, x, edge_index)
    print(edge_index.size(1), _status("VmHWM") - idle)


def _train(conv: GATConv, which: str, x: torch.Tensor, edge_index: torch.Tensor) -> None:
    if which == "stretto":
        accelerate(conv)
    x.requires_grad_()
    conv(x, edge_index).sum().backward()
    x.grad = None
    conv.zero_grad()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def point(which: str, num_nodes: int) -> Point:
    """measure() in a process of its own."""
    command = [sys.executable, __file__, "--measure", which, str(num_nodes)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{which} on {num_nodes:,} nodes ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    edges, taken = map(int, done.stdout.split())
    return Point(num_nodes, edges, taken)


def foretold(points: list[Point], memory: float) -> int:
    """The nodes of the largest graph that fits, by the line through the points."""
    slope, start = np.polyfit([p.nodes for p in points], [p.taken for p in points], 1)
    if slope <= 0:
        sys.exit(f"memory does not grow over {points[0].nodes} to {points[-1].nodes} nodes: wanted larger graphs")
    return max(int((memory - start) / slope), 64)


def confirmed(which: str, points: list[Point], memory: float) -> Point:
    """A graph that really is trained on in this memory: as foretold, or smaller where that took too much."""
    nodes = foretold(points, AIM * memory)
    for _ in range(TRIES):
        found = point(which, nodes)
        if found.taken <= memory:
            return found
        nodes = int(nodes * AIM * memory / found.taken)
    sys.exit(f"{which}: {found.nodes:,} nodes still take {found.taken / 2**30:.2f} GiB after {TRIES} tries")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-gib", type=float, default=8.0)
    parser.add_argument("--confirm", type=float, default=1.0, help="part of the memory for which a real graph is made")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="sizes of the graphs that are measured")
    parser.add_argument("--plot", type=Path, default=Path("attention_memory.png"), help="where the plot goes")
    parser.add_argument("--measure", nargs=2, metavar=("WHICH", "NODES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if native.library() is None:
        sys.exit(f"native kernels are off, so there is nothing to compare: {native.why_not()}")
    if options.measure:
        measure(options.measure[0], int(options.measure[1]))
        return
    memory = options.memory_gib * 2**30
    if options.confirm * memory > _available():
        sys.exit(f"{_available() / 2**30:.1f} GiB are free: wanted a smaller --memory-gib or --confirm")
    points = {which: [point(which, nodes) for nodes in options.nodes] for which in ("stock", "stretto")}
    columns = "".join(f"{p.edges:>15,} edges" for p in points["stock"])
    print(f"{'':8}{columns}{'per edge':>10}{f'in {options.memory_gib:g} GiB, foretold':>26}")
    for which, found in points.items():
        taken = "".join(f"{p.taken / 2**20:>17,.0f} MiB" for p in found)
        per_edge = (found[-1].taken - found[0].taken) / (found[-1].edges - found[0].edges)
        edges = foretold(found, memory) * found[-1].edges / found[-1].nodes
        print(f"{which:8}{taken}{per_edge:>8,.0f} B{edges:>20,.0f} edges", flush=True)
    real = {}
    for which in points if options.confirm > 0 else ():
        limit = options.confirm * memory
        real[which] = confirmed(which, points[which], limit)
        size = f"{real[which].nodes:,} nodes and {real[which].edges:,} edges"
        print(f"{which:8}trained on {size} in {real[which].taken / 2**30:.2f} of {limit / 2**30:g} GiB", flush=True)
    if not real:
        print("no graph of the size foretold was made: --confirm is 0")
    _plot(points, real, options.plot, options.memory_gib)


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _plot(points: dict[str, list[Point]], real: dict[str, Point], path: Path, memory_gib: float) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for which, found in points.items():
        line = [*found, *([real[which]] if which in real else [])]
        pyplot.loglog([p.edges for p in line], [p.taken / 2**30 for p in line], "o-", label=which)
    pyplot.axhline(memory_gib, linestyle="--", color="grey", label=f"{memory_gib:g} GiB")
    pyplot.xlabel("edges")
    pyplot.ylabel("memory of training GATConv, inputs included (GiB)")
    pyplot.legend()
    pyplot.savefig(path, dpi=150, bbox_inches="tight")
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
