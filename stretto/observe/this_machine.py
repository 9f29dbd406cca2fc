"""The machine file of this machine: its rates (stretto.machine), and what only ops and layers show.

That is the fused attention and the host code around the ops of a model. All of it is measured once per CPU, thread
count and version, and kept beside the tuner's choices.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import StrettoError, fail
from stretto.graph import Graph
from stretto.machine import facts, store
from stretto.machine import link as between
from stretto.machine.file import Machine, check
from stretto.machine.probing import DEGREE, LEAST, Probe, Rows, probing
from stretto.machine.timing import call_clock, repeated
from stretto.observe.models import make
from stretto.observe.workload import Workload
from stretto.ops import OPS, attention
from stretto.plug.accelerate import accelerate

logger = logging.getLogger("stretto")

KIND = "analysis-17"
BUSY = 0.75  # share of the cores that others may take before a measurement is doubted
HEADS = 4
TINY = ("gcn", "sage", "gat")  # models whose steps on eight nodes are host code alone


def get(
    machine: Machine | str | Path = "auto",
    *,
    again: bool = False,
    device: torch.device | str = "cpu",
    link: bool = False,
) -> Machine:
    """A Machine: as passed, from a file, or this one ("auto": measured once and kept; again: measured now).

    device: the part of this machine that is meant, its processor or its card. link: with the link between two of its
    processes, which takes some seconds more, also once.
    """
    if isinstance(machine, Machine):
        check(machine.to_dict(), "analyze: 'machine'")
        return machine
    if not isinstance(machine, (str, Path)):
        fail(f"analyze: 'machine' is {machine!r}, wanted \"auto\", a machine file or a Machine")
    if str(machine) != "auto":
        return Machine.load(machine)
    kind = torch.device(device).type
    about = {**facts.describe(), "analysis": KIND, "device": kind}
    saved = {} if again else store.read(KIND, about)
    if "machine" not in saved:
        saved = {"machine": json.loads(json.dumps(probe(device=kind).to_dict()))}  # as it comes back from the file
        store.add(KIND, about, saved)
    if link and kind == "cpu" and saved["machine"].get("link", "assumed") == "assumed":
        saved = {"machine": {**saved["machine"], **_link()}}
        store.add(KIND, about, saved)
    result = Machine(**saved["machine"])
    if result.busy > BUSY * facts.cores():
        logger.warning("stretto: this machine was busy when it was measured (load %.1f): measure again", result.busy)
    return result


def _link() -> dict[str, Any]:
    """The link between two processes of this machine, as fields; none where it cannot be measured."""
    try:
        return {**between.link(), "link": "measured"}
    except StrettoError as error:
        logger.warning("stretto: the link between two processes was not measured (%s): it is assumed", error)
        return {}


def probe(threads: int | None = None, device: torch.device | str = "cpu") -> Machine:
    """Measure this machine with `threads` threads (None: as many as torch uses now), or its card; about ten seconds."""
    with probing(threads, device) as probes:
        machine = probes.machine()
        machine.attention, machine.attention_grad = _attention(probes)
        # Last, since it keeps freed memory.
        machine.host, machine.host_far, machine.kernel, machine.kernel_far = _host(probes)
    return machine


def _attention(probes: Probe) -> tuple[Rows, Rows]:
    """The fused kernel, forward and backward, for narrow and wide heads: (flops per edge, near, far)."""
    edges, device = probes.sizes.edges, probes.device
    n = edges // DEGREE
    graph = Graph.of(probes.places(n, 2, edges), n)
    left, right = torch.randn(n, HEADS, device=device), torch.randn(n, HEADS, device=device)
    forward_rates: Rows = []
    backward_rates: Rows = []
    for width in (8, 64):
        value = torch.randn(n, HEADS, width, requires_grad=True, device=device)
        per_edge = float(OPS["attention"].flops(graph, value, left, right, None, form="gat")) / edges

        def forward(value: Tensor = value) -> Any:
            return attention(graph, value, left, right)

        def both(value: Tensor = value) -> Any:
            with torch.enable_grad():
                out = attention(graph, value, left, right)
                assert isinstance(out, Tensor)
                return torch.autograd.grad(out, value, out.detach())

        ahead, whole = probes.rates(1.0, forward), probes.rates(1.0, both)
        back = [1 / max(1 / w - 1 / a, 1e-9) for w, a in zip(whole[:2], ahead[:2], strict=True)]
        forward_rates.append((per_edge, *(per_edge * edges * rate for rate in ahead[:2])))
        backward_rates.append((2 * per_edge, *(2 * per_edge * edges * rate for rate in back)))
    return forward_rates, backward_rates


def _host(probes: Probe) -> tuple[float, float, float, float]:
    """Seconds around an op of tiny GNNs, near and far; and around one of our kernels, beyond an op's."""
    stock, fast = (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)
    with torch.enable_grad():
        for name in TINY:
            model = make(name, 4, 4, 4).to(probes.device)
            stock = _sum(stock, _tiny(probes, model))
            fast = _sum(fast, _tiny(probes, accelerate(model)))
    ops, _, near, far = stock
    fast_ops, kernels, fast_near, fast_far = fast
    host, host_far = near / ops, max(near, far) / ops
    if not kernels:
        return host, host_far, 0.0, 0.0
    beyond = max(0.0, fast_near - fast_ops * host) / kernels
    return host, host_far, beyond, max(beyond, (fast_far - fast_ops * host_far) / kernels)


def _tiny(probes: Probe, model: nn.Module) -> tuple[float, float, float, float]:
    """Ops and kernels of a step on a graph of eight nodes, and its seconds, near and far."""

    class Data:
        x = probes.ones(8, 4).normal_()
        edge_index = torch.arange(8, device=probes.device).repeat(2, 1)
        num_nodes = 8

    work = Workload(model, Data())
    for _ in range(LEAST):
        work.run()
    trace = work.trace(pooled=True)
    kernels = sum(op.ours for op in trace)
    clock = call_clock(probes.device)  # here it is the host that counts
    far = repeated(work.run, least=LEAST, before=probes.touch, clock=clock)
    near = repeated(work.run, least=LEAST, seconds=0.05, clock=clock)
    return len(trace.ops), kernels, near.median, far.median


def _sum(first: tuple[float, ...], second: tuple[float, ...]) -> tuple[float, float, float, float]:
    a, b, c, d = (x + y for x, y in zip(first, second, strict=True))
    return a, b, c, d
