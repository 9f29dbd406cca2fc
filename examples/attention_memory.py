"""The largest graph a GAT layer can be trained on in a given memory: stock PyG beside stretto.

    python examples/attention_memory.py [--memory-gib 8] [--plot attention_memory.png]

For growing random graphs one training step (forward and backward) of GATConv(128, 64, heads=4) is run in a process of
its own, which reports how far its memory rose. Memory grows in proportion to the edges; the table extends that line to
the given memory. Linux only: the peak is the kernel's own high-water mark.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch_geometric.nn import GATConv

from stretto import accelerate
from stretto.datasets.families import rmat

SCALES = (12, 13, 14, 15)  # 2**scale nodes, 10 draws of an edge per node
HEADS, WIDTH, INPUT = 4, 64, 128


def measure(which: str, scale: int) -> None:
    """One training step; prints edges and the rise of the peak in bytes."""
    edge_index, num_nodes = rmat(scale, 10 << scale)
    conv = GATConv(INPUT, WIDTH, heads=HEADS)
    if which == "stretto":
        accelerate(conv)
    x = torch.randn(num_nodes, INPUT, requires_grad=True)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    conv(x, edge_index).sum().backward()
    print(edge_index.size(1), _status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-gib", type=float, default=8.0)
    parser.add_argument("--plot", type=Path, default=None, help="file to write the plot to (needs matplotlib)")
    parser.add_argument("--measure", nargs=2, metavar=("WHICH", "SCALE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], int(options.measure[1]))
        return
    points: dict[str, list[tuple[int, int]]] = {"stock": [], "stretto": []}
    for which, found in points.items():
        for scale in SCALES:
            command = [sys.executable, __file__, "--measure", which, str(scale)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            edges, rise = map(int, done.stdout.split())
            found.append((edges, rise))
    budget = options.memory_gib * 2**30
    print(
        f"{'':10}" + "".join(f"{edges:>14,} edges" for edges, _ in points["stock"]) + f"{'per edge':>12}{'largest':>22}"
    )
    for which, found in points.items():
        (few, low), (many, high) = found[0], found[-1]
        per_edge = (high - low) / (many - few)
        row = "".join(f"{rise / 2**20:>16,.0f} MiB" for _, rise in found)
        print(f"{which:10}{row}{per_edge:>10,.0f} B{budget / per_edge:>16,.0f} edges")
    if options.plot:
        _plot(points, options.plot, options.memory_gib)


def _plot(points: dict[str, list[tuple[int, int]]], path: Path, memory_gib: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for which, found in points.items():
        pyplot.loglog([e for e, _ in found], [rise / 2**30 for _, rise in found], "o-", label=which)
    pyplot.axhline(memory_gib, linestyle="--", color="grey", label=f"{memory_gib:g} GiB")
    pyplot.xlabel("edges")
    pyplot.ylabel("memory of one training step of GATConv (GiB)")
    pyplot.legend()
    pyplot.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
