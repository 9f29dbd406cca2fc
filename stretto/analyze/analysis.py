"""analyze(model, data): trace a probe, lift it to the real sizes, and put all findings into a Report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from stretto import memory as memory_state
from stretto.analyze import machine_file, published
from stretto.analyze.classify import Layer
from stretto.analyze.given import Given, given
from stretto.analyze.graph_stats import GraphStats, Partitioner, graph_stats
from stretto.analyze.look import look
from stretto.analyze.machine_file import Machine
from stretto.analyze.predict import depth, step_seconds, times
from stretto.analyze.report import LayerCost, Report, inconsistencies
from stretto.analyze.rewrites import Rewrite, rewrites
from stretto.analyze.specs import matrices
from stretto.analyze.staleness import staleness_plan
from stretto.analyze.strategies import Problem, strategies
from stretto.analyze.taxonomy import taxonomy
from stretto.analyze.trace import Trace
from stretto.analyze.workload import Workload
from stretto.errors import expect

PROCS = (1, 2, 4, 8, 16)


def analyze(
    model: nn.Module,
    data: Any,
    *,
    procs: Sequence[int] = PROCS,
    machine: Machine | str | Path = "auto",
    mode: str = "train",
    step: Callable[[nn.Module, Any], Any] | None = None,
) -> Report:
    """Work, depth, parallelism, memory and communication of one step of `model` on `data`, for 1 to P workers.

    data: a PyG Data, or anything with x, edge_index, num_nodes. machine: "auto" (this one, measured once), a machine
    file, or a Machine. mode: "train" or "infer". step(model, data) -> loss replaces the default step.
    """
    fine = isinstance(procs, Sequence) and len(procs) and all(isinstance(p, int) and p >= 1 for p in procs)
    expect(bool(fine), f"analyze: 'procs' is {procs!r}, wanted a list of numbers from 1, such as [1, 2, 4]")
    subject = given(model, data)
    data, sizes = subject.data, subject.sizes
    workload = Workload(model, data, mode, step)
    computer = machine_file.get(machine, device=workload.device)
    stats = graph_stats(subject.edge_index, sizes.n)
    seen = look(workload, subject)
    trace, symbolic, layers = seen.trace, seen.symbolic, seen.layers
    edges = sizes.edges - {0}
    ways = rewrites(trace, layers, edges, sizes.n)
    steps = depth(trace, stats.max_degree)
    seconds = step_seconds(trace, computer)
    memory = _memory(model, subject, trace, computer, mode)
    splitter = Partitioner(subject.edge_index, sizes.n)
    partitions = [splitter.best(p) for p in procs]
    problem = Problem(
        stats=stats,
        layers=tuple(layers),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        step=seconds,
        on_edges=_on_edge_ops(trace, times(trace, computer), edges),
        around=computer.host * len(trace.ops),
        activations=float(trace.peak_bytes),
        fixed=memory["parameters"] + memory["gradients"],
        features=memory["inputs"],
        machine=computer,
        train=mode == "train",
        targets=sizes.t or sizes.n,
    )
    widths = [max(layer.width_in, layer.width_out) for layer in layers]
    hops = max((layer.hops for layer in layers), default=1)
    return Report(
        model=type(model).__name__,
        mode=mode,
        graph=stats,
        layers=layers,
        costs=[_layer_cost(layer, trace, symbolic, stats, ways) for layer in layers],
        trace=trace,
        lifted=seen.lifted,
        remarks=[*subject.remarks, *seen.remarks],
        symbolic=_formulas(symbolic),
        depth=steps,
        machine=computer,
        brent=[_brent(float(trace.flops), steps.steps, p) for p in procs],
        memory=memory,
        forms=taxonomy(model, stats, layers, data, sizes.t or sizes.n),
        partitions=partitions,
        strategies=strategies(problem, partitions),
        rewrites=ways,
        inconsistencies=inconsistencies(stats, max(widths, default=1), len(layers), hops),
        seconds=seconds,
        memory_kept=memory_state.is_kept(),
        workload=workload,
        given=subject,
        problem=problem,
        staleness=[
            staleness_plan(model, subject.edge_index, sizes.n, part, torch.from_numpy(splitter.assign(p, part.method)))
            for p, part in zip(procs, partitions, strict=True)
            if p > 1
        ],
    )


def _text(expression: Any) -> str:
    return str(sympy.expand(expression)).replace("**", "^").replace("*", " ")


def _formulas(symbolic: Trace | None) -> dict[str, str]:
    return {} if symbolic is None else {"flops formula": _text(symbolic.flops), "bytes formula": _text(symbolic.bytes)}


def _layer_cost(
    layer: Layer, trace: Trace, symbolic: Trace | None, stats: GraphStats, ways: list[Rewrite]
) -> LayerCost:
    inside = set(layer.ops)

    def mine(source: Trace) -> list[Any]:
        return [op.cost for op in source if op.index in inside or (op.site is not None and op.site in inside)]

    costs = mine(trace)
    flops, moved = float(sum(c.flops for c in costs)), float(sum(c.bytes for c in costs))
    own = [r for r in ways if r.layer == layer.path]
    row = published.find(layer.module, layer.kind)
    values = {
        "n": stats.num_nodes, "m": stats.num_edges, "d": max(stats.max_degree, 2), "L": 1, "K": 2,
        "T": max(layer.hops, 1),
        "k": max(layer.width_in, layer.width_out, 1), "c": 10,
    }  # fmt: skip
    known: dict[str, str | float] = {}
    if row is not None:
        known = {
            "work": str(row.work), "depth": str(row.depth), "implemented work": str(row.implemented_work),
            "work here": published.evaluate(row.work, values),
            "implemented work here": published.evaluate(row.implemented_work, values), "note": row.note,
        }  # fmt: skip
    return LayerCost(
        path=layer.path,
        module=layer.module,
        name=layer.name,
        published=known,
        flops=flops,
        bytes=moved,
        formula="" if symbolic is None else _text(sum(c.flops for c in mine(symbolic))),
        best_flops=max(0.0, flops - _largest(own, "flops")),
        best_bytes=max(0.0, moved - _largest(own, "bytes")),
        rewrites=[r.rule for r in own],
    )


def _largest(ways: list[Rewrite], what: str) -> float:
    """What the rules save together. Caching A X makes the order and the fusion of the same product pointless."""
    savings = {r.rule: getattr(r, what) for r in ways}
    product = max(savings.get("cache A X", 0.0), savings.get("order", 0.0) + savings.get("fuse", 0.0))
    return product + savings.get("hoist", 0.0) + savings.get("cache norm", 0.0)


def _on_edge_ops(trace: Trace, seconds: list[float], edges: set[int]) -> float:
    """Seconds of the ops that have a tensor, or a matrix, as long as the edges."""
    found = 0.0
    for op, taken in zip(trace.ops, seconds, strict=True):
        sizes = {size for spec in (*op.inputs, *op.outputs) for size in spec.shape}
        if op.cost.family != "view" and (sizes & edges or matrices((op.args, op.kwargs))):
            found += taken
    return found


def _brent(work: float, steps: float, workers: int) -> dict[str, float]:
    """Bounds on the time with P processors, in flops: max(W / P, D) <= T_P <= W / P + D."""
    low, high = max(work / workers, steps), work / workers + steps
    return {
        "workers": workers,
        "at least": low,
        "at most": high,
        "speedup at most": work / low,
        "at least ": work / high,
    }


def _tensors(data: Any) -> list[Tensor]:
    """Every tensor of the data, of all types."""
    values = data.to_dict() if hasattr(data, "to_dict") else data if isinstance(data, dict) else vars(data)
    found = [v for v in values.values() if isinstance(v, Tensor) and v.layout == torch.strided]
    return found + [t for v in values.values() if isinstance(v, dict) for t in _tensors(v)]


def _memory(model: nn.Module, given: Given, trace: Trace, machine: Machine, mode: str) -> dict[str, float]:
    parameters = float(sum(p.numel() * p.element_size() for p in model.parameters()))
    inputs = float(sum(v.numel() * v.element_size() for v in _tensors(given.data)))
    total = parameters + inputs + trace.peak_bytes
    edges = {size for size in given.sizes.edges if size > max(given.sizes.nodes)}
    edge_wide = float(sum(size for _, _, spec, size in trace.takes if spec is not None and set(spec.shape[:1]) & edges))
    return {
        "parameters": parameters,
        "gradients": parameters if mode == "train" else 0.0,
        "inputs": inputs,
        "activations": float(trace.peak_bytes),  # gradients of parameters included: the step allocates them
        "edge tensors made": edge_wide,
        "total": total,
        "fits": float(total < machine.memory),
    }
