"""A partitioned training step in real processes (torch.distributed, gloo), every byte, message and wait counted.

Each worker owns a part of the nodes and the edges into them. Before a layer it pulls the rows of its remote sources,
after it keeps its own rows; in the backward pass gradients travel the other way; weights' gradients are summed around
a ring. The result is compared with one process before any number counts.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto import memory
from stretto.analyze.graph_stats import Partitioner
from stretto.analyze.workload import Workload, arguments, scalar
from stretto.errors import fail

LIMIT = 240.0  # seconds until workers that do not answer are ended
ALLOWED = 1e-4  # relative error of the loss and of the gradients


@dataclass
class Traffic:
    """What one worker sent."""

    bytes: int = 0
    messages: int = 0
    syncs: int = 0

    def exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> None:
        """Send and receive at once, and wait: one synchronisation."""
        handles = [dist.irecv(tensor, peer) for peer, tensor in receives]
        for peer, tensor in sends:
            handles.append(dist.isend(tensor, peer))
            self.bytes += tensor.numel() * tensor.element_size()
            self.messages += 1
        for handle in handles:
            if handle is not None:
                handle.wait()

    def ring_sum(self, values: Tensor) -> None:
        """values [W], summed over all workers in place: P - 1 steps to add up the chunks, P - 1 to hand them round."""
        rank, size = dist.get_rank(), dist.get_world_size()
        chunks = list(values.tensor_split(size))
        before, after = (rank - 1) % size, (rank + 1) % size
        for turn in range(2 * (size - 1)):
            adding = turn < size - 1
            out = (rank - turn) % size if adding else (rank + 1 - (turn - size + 1)) % size
            into = (out - 1) % size
            taken = torch.empty_like(chunks[into])
            self.exchange([(after, chunks[out].contiguous())], [(before, taken)])
            chunks[into].copy_(chunks[into] + taken if adding else taken)
        self.syncs += 1


@dataclass
class Halo:
    """Rows to send to and to receive from every peer, and the local graph over [own | halo] rows."""

    own: Tensor  # [n_p] global ids
    edge_index: Tensor  # local ids
    sends: list[tuple[int, Tensor]]  # peer -> rows among own
    receives: list[tuple[int, int, int]]  # peer, first and last position among the halo rows
    size: int  # of the halo

    @staticmethod
    def of(edge_index: Tensor, owner: np.ndarray, rank: int, parts: int, *, degrees: bool) -> Halo:
        """degrees: halo rows get as many incoming edges as they have in the whole graph, for layers that count them."""
        source, target = (row.numpy() for row in edge_index)
        local = np.full(owner.size, -1, np.int64)
        own = np.flatnonzero(owner == rank)
        local[own] = np.arange(own.size)
        receives, sends, start, remote = [], [], own.size, []
        for peer in range(parts):
            lacking = np.unique(source[(owner[target] == rank) & (owner[source] == peer)])
            theirs = np.unique(source[(owner[target] == peer) & (owner[source] == rank)])
            if peer == rank:
                continue
            local[lacking] = np.arange(start, start + lacking.size)
            if lacking.size:
                receives.append((peer, start - own.size, start - own.size + lacking.size))
            if theirs.size:
                sends.append((peer, torch.from_numpy(local[theirs])))
            start += lacking.size
            remote.append(lacking)
        mine = owner[target] == rank
        edges = np.stack([local[source[mine]], local[target[mine]]])
        if degrees and own.size:
            counts = np.bincount(target, minlength=owner.size)[np.concatenate(remote)] if remote else np.zeros(0, int)
            rows = np.repeat(np.arange(own.size, start), counts)
            edges = np.concatenate([edges, np.stack([np.zeros_like(rows), rows])], axis=1)
        return Halo(torch.from_numpy(own), torch.from_numpy(edges), sends, receives, start - own.size)


class _Pull(torch.autograd.Function):
    """x [own, k] -> [own + halo, k]; backward sends the halo's gradients home and adds them there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo, traffic: Traffic) -> Tensor:
        ctx.halo, ctx.traffic, ctx.own = halo, traffic, x.size(0)
        rows = x.new_empty(halo.size, *x.shape[1:])
        traffic.exchange(
            [(peer, x[places].contiguous()) for peer, places in halo.sends],
            [(peer, rows[first:last]) for peer, first, last in halo.receives],
        )
        traffic.syncs += 1
        return torch.cat([x, rows])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        own, rows = grad[: ctx.own].clone(), grad[ctx.own :]
        back = [(peer, grad.new_empty(places.numel(), *grad.shape[1:])) for peer, places in ctx.halo.sends]
        ctx.traffic.exchange([(peer, rows[a:b].contiguous()) for peer, a, b in ctx.halo.receives], back)
        ctx.traffic.syncs += 1
        for (_, taken), (_, places) in zip(back, ctx.halo.sends, strict=True):
            own.index_add_(0, places, taken)
        return own, None, None


def _hook(layers: list[nn.Module], halo: Halo, traffic: Traffic) -> None:
    for layer in layers:

        def before(module: nn.Module, args: Any) -> Any:
            return (_Pull.apply(args[0], halo, traffic), *args[1:])

        def after(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out[: halo.own.numel()]

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def _part(data: Any, halo: Halo) -> Any:
    part = data.clone()
    for key, value in data.to_dict().items():
        if isinstance(value, Tensor) and key != "edge_index" and value.dim() and value.size(0) == data.num_nodes:
            part[key] = value[halo.own]
    part.edge_index, part.num_nodes = halo.edge_index, halo.own.numel()
    return part


def _share(out: Tensor, data: Any, total: int) -> Tensor:
    """This worker's share of the loss that one process would compute."""
    mask = data.train_mask if "train_mask" in data else torch.ones(out.size(0), dtype=torch.bool)
    if not bool(mask.any()):
        return out.sum() * 0.0
    return scalar(out, data) * (int(mask.sum()) / total)


def _worker(rank: int, parts: int, folder: str, repeats: int) -> None:
    """One process: a step to warm up and count, then timed ones; results go to a file."""
    torch.set_num_threads(1)
    memory.switch(True)  # no worker should pay for new memory in every step: the prediction does not either
    given = torch.load(Path(folder, "given.pt"), weights_only=False)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=parts)
    try:
        model, data = given["model"], given["data"]
        halo = Halo.of(data.edge_index, given["owner"], rank, parts, degrees=given["degrees"])
        traffic, part = Traffic(), _part(data, halo)
        modules = dict(model.named_modules())
        _hook([modules[path] for path in given["layers"]], halo, traffic)
        total = int(data.train_mask.sum()) if "train_mask" in data else data.num_nodes
        model.train()
        samples = []
        for turn in range(repeats + 1):
            model.zero_grad(set_to_none=True)
            dist.barrier()
            start = time.perf_counter()
            loss = _share(model(*arguments(model, part)), part, total)
            loss.backward()
            weights = [p for p in model.parameters() if p.requires_grad]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in weights])
            traffic.ring_sum(flat)
            samples.append(time.perf_counter() - start)
            if not turn:
                counted = dataclasses.asdict(traffic)
        result = {
            "traffic": counted,
            "gradient": flat,
            "loss": float(loss),
            "seconds": statistics.median(samples[1:] or samples),
        }
        torch.save(result, Path(folder, f"result{rank}.pt"))
    finally:
        dist.destroy_process_group()


PINGS, PAYLOAD = 50, 1 << 22  # messages of eight bytes, and one of these


def _link(rank: int, parts: int, folder: str) -> None:
    """One side of a conversation: short messages to and fro, then long ones."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=parts)
    try:
        taken = {}
        for name, values, turns in (("short", 2, PINGS), ("long", PAYLOAD // 4, 5)):
            tensor, samples = torch.zeros(values), []
            for _ in range(turns + 1):
                start = time.perf_counter()
                for sender in (0, 1):
                    dist.send(tensor, 1 - rank) if rank == sender else dist.recv(tensor, 1 - rank)
                samples.append((time.perf_counter() - start) / 2)
            taken[name] = statistics.median(samples[1:])
        torch.save(taken, Path(folder, f"result{rank}.pt"))
    finally:
        dist.destroy_process_group()


@cache
def link() -> tuple[float, float]:
    """Seconds of a message between two processes of this machine, and bytes per second of a long one; measured once."""
    with tempfile.TemporaryDirectory() as folder:
        taken = _processes(folder, 2, ["link"])[0]
    return taken["short"], PAYLOAD / max(taken["long"] - taken["short"], 1e-9)


def run_pull(
    workload: Workload, layers: list[str], splitter: Partitioner, parts: int, method: str, *, repeats: int = 3
) -> dict[str, Any]:
    """Run the step on `parts` processes: bytes, messages and synchronisations counted, seconds of the slowest worker.

    Fails where the workers' gradients are not those of one process.
    """
    workload.run()
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    wanted = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
    workload.model.zero_grad(set_to_none=True)
    error = float("inf")
    for degrees in (False, True):
        found = _spawn(workload, layers, splitter.assign(parts, method), parts, degrees, repeats)
        error = float((found[0]["gradient"] - wanted).norm() / wanted.norm().clamp_min(1e-12))
        if error <= ALLOWED:
            return {
                "bytes": sum(f["traffic"]["bytes"] for f in found),
                "messages": sum(f["traffic"]["messages"] for f in found),
                "syncs": max(f["traffic"]["syncs"] for f in found),
                "seconds": max(f["seconds"] for f in found),
                "error": error,
            }
    fail(f"validate: on {parts} workers the gradients differ by {error:.1e} from one process's, allowed {ALLOWED:.0e}")


def _spawn(
    workload: Workload, layers: list[str], owner: np.ndarray, parts: int, degrees: bool, repeats: int
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        given = {"model": workload.model, "data": workload.data, "owner": owner, "layers": layers, "degrees": degrees}
        torch.save(given, Path(folder, "given.pt"))
        return _processes(folder, parts, [str(repeats)])


def _processes(folder: str, parts: int, words: list[str]) -> list[dict[str, Any]]:
    """Run this file once per worker; what each left in the folder."""
    command = [sys.executable, "-m", "stretto.analyze.workers", folder, str(parts)]
    children = [subprocess.Popen([*command, str(rank), *words], stderr=subprocess.PIPE) for rank in range(parts)]
    end = time.monotonic() + LIMIT
    try:
        errors = [child.communicate(timeout=max(0.1, end - time.monotonic()))[1] for child in children]
    except subprocess.TimeoutExpired:
        fail(f"validate: {parts} workers did not finish within {LIMIT:.0f} s")
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, error in zip(children, errors, strict=True):
        if child.returncode:
            lines = error.decode(errors="replace").strip().splitlines()
            fail(f"validate: a worker ended with status {child.returncode}: {lines[-1] if lines else 'no message'}")
    return [torch.load(Path(folder, f"result{rank}.pt"), weights_only=False) for rank in range(parts)]


if __name__ == "__main__":  # a process of its own: the caller's script is not run again
    folder, parts, rank, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if what == "link":
        _link(rank, parts, folder)
    else:
        _worker(rank, parts, folder, int(what))
