"""analyze(model, data): trace a probe, lift it to the real sizes, and put all findings into a Report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.analyze.depth import depth
from stretto.analyze.graph_stats import Partitioner, graph_stats
from stretto.analyze.layer_costs import layer_costs, text
from stretto.analyze.report import Report
from stretto.analyze.rewrites import rewrites
from stretto.analyze.strategies import refusals, strategies
from stretto.analyze.strategy import Problem
from stretto.errors import expect
from stretto.machine.file import Machine
from stretto.memory import allocator
from stretto.observe import this_machine
from stretto.observe.inputs import Inputs, inputs_of
from stretto.observe.layer import Layer
from stretto.observe.look import Look, look
from stretto.observe.nested import leaves
from stretto.observe.predict import shares, step_seconds
from stretto.observe.specs import matrices
from stretto.observe.trace import Trace
from stretto.observe.workload import Workload

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

    data: a PyG Data or HeteroData, a loader (its first batch is looked at), or forward's arguments as a tuple. machine:
    "auto" (this one, measured once), a machine file, or a Machine. mode: "train" or "infer". step(model, data) -> loss
    replaces the default step. The model is left as it was.
    """
    fine = isinstance(procs, Sequence) and len(procs) and all(type(p) is int and p >= 1 for p in procs)
    expect(bool(fine), f"analyze: 'procs' is {procs!r}, wanted a list of numbers from 1, such as [1, 2, 4]")
    procs = list(dict.fromkeys(procs))
    subject = inputs_of(model, data)
    data, sizes = subject.data, subject.sizes
    workload = Workload(model, data, mode, step)
    computer = this_machine.get(machine, device=workload.device, link=max(procs) > 1)
    stats = graph_stats(subject.edge_index, sizes.n)
    seen = look(workload, subject)
    trace, layers = seen.trace, seen.layers
    ways = rewrites(trace, layers, sizes, seen.plain, seen.edges)
    on_edges = _on_edges(seen)
    steps = depth(trace, stats.max_degree, symbolic=seen.symbolic)
    seconds = step_seconds(trace, computer)
    targets = sizes.t if sizes.t and mode == "train" else sizes.n  # without gradients every node is one
    memory = _memory(model, subject, seen, computer, mode)
    splitter = Partitioner(subject.edge_index, sizes.n)
    partitions = [splitter.best(p) for p in procs]
    problem = Problem(
        stats=stats,
        layers=tuple(layers),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        **shares(trace, computer, on_edges),
        activations=max(0.0, trace.peak_bytes - memory["gradients"]),
        fixed=memory["parameters"] + memory["gradients"],
        features=memory["inputs"],
        machine=computer,
        train=mode == "train",
        targets=targets,
        graphs=max(1, sizes.g),
        edge_products=_edge_products(trace, layers, on_edges),
        b=_value_bytes(model),
    )
    return Report(
        model=type(model).__name__,
        mode=mode,
        graph=stats,
        layers=layers,
        costs=layer_costs(seen, stats, ways),
        trace=trace,
        lifted=seen.lifted,
        remarks=[*subject.remarks, *seen.remarks],
        symbolic=_formulas(seen.symbolic),
        split=_split(trace, on_edges),
        depth=steps,
        machine=computer,
        memory=memory,
        partitions=partitions,
        strategies=strategies(problem, partitions),
        refusals=refusals(problem, partitions),
        rewrites=ways,
        seconds=seconds,
        memory_kept=allocator.is_kept(),
        workload=workload,
        inputs=subject,
        on_edges=on_edges,
        problem=problem,
    )


def _value_bytes(model: nn.Module) -> int:
    """Bytes of what workers exchange: activations and gradients are of the parameters' type."""
    return max((p.element_size() for p in model.parameters() if p.is_floating_point()), default=4)


def _formulas(symbolic: Trace | None) -> dict[str, str]:
    return {} if symbolic is None else {"flops formula": text(symbolic.flops), "bytes formula": text(symbolic.bytes)}


def _on_edges(seen: Look) -> list[bool]:
    """Op by op, whether it has a tensor, or a matrix, as long as the edges (in the data, nodes may be as many)."""
    return [
        op.cost.family != "view"
        and bool(
            {size for spec in (*op.inputs, *op.outputs) for size in spec.shape} & seen.edges
            or matrices((op.args, op.kwargs))
        )
        for op in seen.plain.ops
    ]


def _edge_products(trace: Trace, layers: list[Layer], on_edges: list[bool]) -> bool:
    """Whether a layer multiplies rows of edges by a weight."""
    inside = {i for layer in layers for i in layer.ops}
    known = zip(trace.ops, on_edges, strict=True)
    return any(sparse and op.index in inside and op.cost.family == "gemm" for op, sparse in known)


def _split(trace: Trace, on_edges: list[bool]) -> dict[str, dict[str, float]]:
    """Flops and bytes of ops over edges (sparse), and of all others (dense)."""
    result = {name: {"flops": 0.0, "bytes": 0.0} for name in ("sparse", "dense")}
    for op, sparse in zip(trace.ops, on_edges, strict=True):
        part = result["sparse" if sparse else "dense"]
        part["flops"] += float(op.cost.flops)
        part["bytes"] += float(op.cost.bytes)
    return result


def _tensors(data: Any) -> list[Tensor]:
    """Every tensor of the data, of all types."""
    values = data.to_dict() if hasattr(data, "to_dict") else data if isinstance(data, dict) else vars(data)
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def _memory(model: nn.Module, subject: Inputs, seen: Look, machine: Machine, mode: str) -> dict[str, float]:
    parameters = float(sum(p.numel() * p.element_size() for p in model.parameters()))
    learned = float(sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad))
    inputs = float(sum(v.numel() * v.element_size() for v in _tensors(subject.data)))
    trace = seen.trace
    total = parameters + inputs + trace.peak_bytes
    taken = zip(seen.plain.takes, trace.takes, strict=True)
    long = ((spec, size) for (*_, spec, _), (*_, size) in taken if spec is not None)
    edge_wide = float(sum(size for spec, size in long if set(spec.shape[:1]) & seen.edges))
    return {
        "parameters": parameters,
        "gradients": learned if mode == "train" else 0.0,
        "inputs": inputs,
        "activations": float(trace.peak_bytes),  # gradients of parameters included: the step allocates them
        "edge tensors made": edge_wide,
        "total": total,
        "fits": float(total <= machine.memory),
    }
