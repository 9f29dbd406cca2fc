"""The loader in use: a training epoch, inference over many nodes, the first batch and the memory of a pass.

Stock PyG needs pyg-lib or torch-sparse to sample. Where neither is there, its own loader and model run over our
sampler, which makes it faster than it is; the label says so. Ours runs each layer on what the next one reads
(run_trimmed); beside it stand whole batches through the same model, and stock with PyG's trim_to_layer.
"""

import copy
import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.loader as pyg
import torch_geometric.typing
from torch import Tensor
from torch_geometric.nn.models import GraphSAGE

from benchmarks.suites.loader_setting import OURS, Row, Setting, per_batch
from stretto import accelerate
from stretto.cli.convert import read
from stretto.errors import expect, fail
from stretto.loader import NeighborLoader, NeighborSampler, run_trimmed
from stretto.machine.timing import Timing, measure
from stretto.plug.inference import inference as run_inference

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, CLASSES, WORKERS = 256, 16, 2
NODES, FANOUT = 4096, 20  # of inference


def _stock(data: Any, fanout: list[int], batch: int, workers: int, nodes: Any = None) -> tuple[str, Any]:
    """PyG's loader, over its own sampler where it has one."""
    options: dict[str, Any] = {"input_nodes": nodes, "batch_size": batch, "num_workers": workers}
    if torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE:
        library = "pyg-lib" if torch_geometric.typing.WITH_PYG_LIB else "torch-sparse"
        return f"stock, {library}", pyg.NeighborLoader(data, fanout, **options)
    sampler: Any = NeighborSampler(data, fanout)
    return "stock over our sampler", pyg.NeighborLoader(data, fanout, neighbor_sampler=sampler, **options)


def _whole(model: Any, batch: Any) -> Tensor:
    """Every layer over every node of the batch, as PyG's examples have it."""
    result: Tensor = model(batch.x, batch.edge_index)
    return result[: batch.batch_size]


def _cut(model: Any, batch: Any) -> Tensor:
    """With PyG's trim_to_layer."""
    hops = {
        "num_sampled_nodes_per_hop": batch.num_sampled_nodes,
        "num_sampled_edges_per_hop": batch.num_sampled_edges,
    }
    result: Tensor = model(batch.x, batch.edge_index, **hops)
    return result[: batch.batch_size]


def _train(model: Any, run: Callable[[Any, Any], Tensor], loader: Any) -> Callable[[], float]:
    optimizer = torch.optim.Adam(model.parameters())

    def epoch() -> float:
        loss = torch.zeros(())
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(run(model, batch), batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    return epoch


def epoch(setting: Setting) -> list[Row]:
    """GraphSAGE-256 over some batches, loader included: ours (loader and accelerate) beside stock."""
    nodes = torch.cat(setting.seeds)
    torch.manual_seed(0)
    plain = GraphSAGE(setting.data.x.size(1), HIDDEN, len(setting.fanout), CLASSES)
    fast = accelerate(copy.deepcopy(plain))
    name, stock = _stock(setting.data, setting.fanout, setting.batch, 0, nodes)
    ours = NeighborLoader(
        setting.data, setting.fanout, input_nodes=nodes, batch_size=setting.batch, num_threads=setting.threads
    )
    batch = next(iter(ours))
    with torch.no_grad():
        a, b = _whole(plain.eval(), batch), run_trimmed(fast.eval(), batch)
    expect(torch.allclose(a, b, rtol=1e-3, atol=1e-4), "epoch: accelerated and stock outputs differ")
    calls = {
        OURS: _train(fast, run_trimmed, ours),
        f"{OURS}, trim_to_layer": _train(accelerate(copy.deepcopy(plain)), _cut, ours),
        f"{OURS}, whole batches": _train(accelerate(copy.deepcopy(plain)), _whole, ours),
        name: _train(plain, _whole, stock),
        f"{name}, trim_to_layer": _train(copy.deepcopy(plain), _cut, stock),
    }
    timings = measure(calls, repeats=max(2, setting.repeats // 2))
    return [
        Row("training epoch, SAGE-256", who, per_batch(t, setting.batches), setting.batch, "seeds")
        for who, t in timings.items()
    ]


def inference(setting: Setting) -> list[Row]:
    """Sampled inference over some nodes, ours beside stock; exact and layer-wise over all nodes."""
    n = int(setting.data.num_nodes)
    nodes = torch.arange(min(NODES, n))
    fanout = [FANOUT] * len(setting.fanout)
    torch.manual_seed(0)
    plain = GraphSAGE(setting.data.x.size(1), HIDDEN, len(fanout), CLASSES).eval()
    fast = accelerate(copy.deepcopy(plain)).eval()
    name, stock = _stock(setting.data, fanout, setting.batch, 0, nodes)

    @torch.no_grad()
    def by_stock(run: Callable[[Any, Any], Tensor]) -> Any:
        return torch.cat([run(plain, b) for b in stock])

    def by_ours() -> Any:
        return run_inference(fast, setting.data, num_neighbors=fanout, input_nodes=nodes, batch_size=setting.batch)

    calls: dict[str, Callable[[], object]] = {
        OURS: by_ours,
        name: partial(by_stock, _whole),
        f"{name}, trim_to_layer": partial(by_stock, _cut),
    }
    timings = measure(calls, repeats=5)
    label = f"sampled inference, per {nodes.numel()} nodes"
    rows = [Row(label, who, t, nodes.numel(), "seeds") for who, t in timings.items()]
    whole = measure({"layer-wise": lambda: run_inference(fast, setting.data)}, repeats=2)["layer-wise"]
    sampled = Timing(tuple(s * n / nodes.numel() for s in timings[OURS].samples))
    rows.append(Row("inference over all nodes", OURS, whole, n, "seeds"))
    rows.append(Row("inference over all nodes", "sampled, by extrapolation", sampled, n, "seeds"))
    return rows


def first_batch(setting: Setting) -> list[Row]:
    """Processes of their own: from constructing the loader to its first batch, memory in a pass and at most."""
    found: dict[str, list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "data.pt")  # made once: a large random graph takes longer than its first batch
        torch.save(setting.data, path)
        for _ in range(max(1, setting.repeats // 2)):
            for ours in (True, False):
                who, *values = _measured(setting, path, ours)
                found.setdefault(who, []).append(tuple(values))
    rows: list[list[Row]] = [[], [], []]
    for who, runs in found.items():
        took, held, peak = zip(*runs, strict=True)
        rows[0].append(Row("first batch", who, Timing(took)))
        rows[1].append(Row("memory of a pass", who, Timing(took), max(held), "bytes held"))
        rows[2].append(Row("peak memory, construction included", who, Timing(took), max(peak), "bytes held"))
    return [row for group in rows for row in group]


def _measured(setting: Setting, path: str, ours: bool) -> tuple[str, float, float, float]:
    code = (
        "from benchmarks.suites.loader_models import in_process\n"
        f"in_process({path!r}, {setting.fanout}, {setting.batch}, {ours})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        fail(f"bench loader: the process of its own failed: {done.stderr.strip().splitlines()[-1]}")
    took, held, peak, who = done.stdout.splitlines()[-1].split(maxsplit=3)
    return who, float(took), float(held), float(peak)


def in_process(path: str, fanout: list[int], batch: int, ours: bool) -> None:
    """Write to standard output: seconds to the first batch, bytes held during 20 more, bytes at most, and whose.

    The most is that of the 20 batches, children included, or what this process took while the loader was made.
    """
    import time

    data = read(path)
    # What malloc keeps of reading the data would hide as much of what a loader takes: it goes back first.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    base = held_bytes()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew
    resident = _status("VmRSS")
    start = time.perf_counter()
    loader: Any
    if ours:
        who, loader = OURS, NeighborLoader(data, fanout, num_threads=WORKERS, batch_size=batch)
    else:
        who, loader = _stock(data, fanout, batch, WORKERS)
        who += f", {WORKERS} workers"
    constructing = _status("VmHWM") - resident
    batches = iter(loader)
    next(batches)
    took = time.perf_counter() - start
    most = 0.0
    for _ in itertools.islice(batches, 20):  # one batch at a time, as a training loop holds it
        most = max(most, held_bytes() - base)
    sys.stdout.write(f"{took} {most} {max(most, constructing)} {who}\n")


def held_bytes() -> float:
    """Memory of this process and its children, pages that several share counted once (PSS).

    Pages of files are left out: how much of a library is counted depends on who else has it loaded just now.
    """
    return float(sum(_pss(pid) for pid in (os.getpid(), *_children())))


def _status(name: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def _children() -> Iterator[int]:
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            yield from map(int, file.read().split())


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    except OSError:  # it has ended meanwhile
        return 0
