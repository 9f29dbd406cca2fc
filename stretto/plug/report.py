"""What was accelerated, with which plan, and what was not and why: report() and explain()."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

from stretto import kernels, settings
from stretto.compile import CHOOSER, Plan, normalise
from stretto.compile.choose import Decision
from stretto.compile.plan import ways
from stretto.layers import AGGREGATIONS, CONTAINERS, CONVS, generic, messages
from stretto.layers.base import Record, record_of, why_stock
from stretto.layers.classes import STOCK, class_of, fast_of, stock_of
from stretto.ops.spmm import chosen
from stretto.plug.accelerate import expect_model, is_patched


@dataclass(frozen=True)
class Row:
    """One layer: its name in the model, its class, whether it ran fast, how, or why not."""

    layer: str
    conv: str
    path: str  # "fast", "stock", "compiled" (the user's torch.compile of stock) or "not run yet"
    plan: str
    kernel: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Rows of layers; prints as a table."""

    rows: list[Row]

    def to_dict(self) -> dict[str, list[dict[str, str]]]:
        return {"layers": [asdict(row) for row in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        fast = sum(row.path == "fast" for row in self.rows)
        head = f"{fast} of {len(self.rows)} layers ran fast"
        return (
            head
            + "\n"
            + table(
                ("layer", "conv", "path", "plan", "kernel", "reason"),
                [(r.layer, r.conv, r.path, r.plan, r.kernel, r.reason) for r in self.rows],
            )
        )

    __repr__ = __str__


def report(model: torch.nn.Module) -> Report:
    """What each message-passing layer of the model did when it last ran, or was last compiled by the user."""
    expect_model("report", model)
    rows = []
    for name, module in _told(model):
        kind = class_of(module)
        of_others = _made_of_others(module)
        record = of_others or record_of(module)
        if of_others is None and not _is_known(kind) and not generic.is_patched(kind):
            reason = "not accelerated: call accelerate(model)"
            if isinstance(module, Aggregation) and fast_of(kind) is None:
                reason = "no fast path for this class"
            elif fast_of(kind) is None:
                why = f"no fast path for this class ({generic.why_not(kind)})"
                reason = _joined(why, generic.stock_edge_update(kind))
            if type(getattr(module, "aggr_module", None)) in STOCK:
                reason += "; its aggregation runs over the cached index"
            rows.append(Row(name, kind.__name__, "stock", "", "", reason))
            continue
        path = record.path or "not run yet"
        product = kind not in STOCK and kind not in CONVS  # of a class that is not in our tables
        reason = record.reason or (why_stock(module, aggregates_itself=product) or "")
        if product:
            reason = _joined(reason, generic.stock_edge_update(kind))
        kernel = {"fast": kernels.name_of(_device_of(module)), "compiled": "torch.compile"}.get(path, "")
        rows.append(Row(name, kind.__name__, path, record.plan, kernel, reason))
    return Report(rows)


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _told(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, module) of every row of a report: layers, and aggregations that belong to no layer."""
    parts: set[int] = set()  # what is inside a layer or an aggregation is told of with it
    for name, module in _uncompiled(model).named_modules():
        kind = class_of(module)
        ours = stock_of(kind) is not None or (is_patched() and kind in CONVS)
        layer = (
            not isinstance(module, tuple(CONTAINERS))
            and not isinstance(module, Aggregation)
            and (isinstance(module, MessagePassing) or ours)
        )
        if layer or (isinstance(module, Aggregation) and id(module) not in parts):
            if isinstance(module, (Aggregation, MessagePassing)):
                parts.update(id(m) for m in module.modules())
            yield name or "(model)", module


def _made_of_others(module: torch.nn.Module) -> Record | None:
    """What the parts of an aggregation without a fast path of its own (MultiAggregation) did, or None: no such part."""
    parts = [m for m in module.modules() if isinstance(m, Aggregation) and _is_known(type(m))]
    if not isinstance(module, Aggregation) or _is_known(type(module)) or not parts:
        return None
    ran = [record for part in parts if (record := record_of(part)).path]
    return next((record for record in ran if record.path != "fast"), ran[0] if ran else Record())


def _is_known(kind: type) -> bool:
    """Whether modules of this class run our code, by accelerate() or by patch()."""
    return stock_of(kind) is not None or (is_patched() and (kind in CONVS or kind in AGGREGATIONS))


@dataclass(frozen=True)
class Candidate:
    """One plan of a layer, with what it is predicted to take and what it took."""

    plan: str
    predicted_ms: float | None  # None: a layer with one plan, of which nothing need be predicted
    measured_ms: float | None  # where there was a choice, in steps of training; else the forward of this call
    chosen: bool
    spmm_widths: list[int]
    kept_bytes: int
    kernels: list[str] = field(default_factory=list)  # of the chosen plan's aggregations, where several were tried


@dataclass(frozen=True)
class Explanation:
    """A layer's plans, cheapest predicted first, and the memory it avoids against stock, which builds every message."""

    layer: str
    conv: str
    how: str
    candidates: list[Candidate]
    avoided_bytes: int
    reason: str = ""
    backend: str = ""  # whose kernels: an instruction set, Triton, plain PyTorch
    forward_ms: float | None = None  # of this call; None: the layer ran inside another one's plan, or in torch.compile
    normalisation: str = ""  # of A, where it has one: the ways that can be best on these kernels, and the others


@dataclass(frozen=True)
class Explanations:
    """One explanation per layer; prints as tables."""

    layers: list[Explanation] = field(default_factory=list)

    def to_dict(self) -> dict[str, list[dict[str, Any]]]:
        return {"layers": [asdict(layer) for layer in self.layers]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        parts = []
        for layer in self.layers:
            where = f" on {layer.backend}" if layer.backend else ""
            took = "" if layer.forward_ms is None else f"; forward took {layer.forward_ms:.2f} ms"
            avoided = f"; {layer.avoided_bytes / 2**20:.1f} MiB of messages never built" if layer.avoided_bytes else ""
            told = f"chosen by {layer.how}" if len(layer.candidates) > 1 else layer.reason or layer.how
            parts.append(
                f"{layer.layer} ({layer.conv}){where}: {told}{took}{avoided}"
                + _plans(layer)
                + _line("normalisation of A", layer.normalisation)
            )
        return "\n\n".join(parts)

    __repr__ = __str__


def explain(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Explanations:
    """Run the model once on the given input and tell, per layer, every plan there is, its cost, and the one chosen."""
    expect_model("explain", model)
    told = [(name, module) for name, module in _told(model) if not isinstance(module, Aggregation)]
    compiled = _uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None
    with messages.observed([] if compiled else [module for _, module in told]) as seen:
        model(*args, **kwargs)
    return Explanations([_explained(name, module, seen.get(id(module))) for name, module in told])


def _explained(name: str, module: torch.nn.Module, seen: messages.Seen | None) -> Explanation:
    record, kind = record_of(module), class_of(module)
    x = None if seen is None else seen.features
    device = _device_of(module) if x is None else x.device
    decision = CHOOSER.decision(record.key) if record.key is not None else None
    running = None if decision is None else _running(record, decision)
    forward = None if seen is None else seen.seconds * 1e3
    how, reason, candidates = record.path or "stock", record.reason or ("" if record.plan else "stock"), []
    if decision is not None and running is not None:
        how, candidates = decision.how, _candidates(decision, running, device, 4 if x is None else x.element_size())
    elif record.path == "fast":
        how, candidates = "the only plan", [Candidate(record.plan, None, forward, True, [], 0)]
    return Explanation(
        name,
        kind.__name__,
        how,
        candidates,
        messages.avoided(module, stock_of(kind) or kind, record, seen),
        reason,
        kernels.name_of(device) if record.path == "fast" else "",
        forward,
        "" if decision is None else _normalisation(decision.candidates[0]),
    )


def _running(record: Record, decision: Decision) -> Plan | None:
    """The plan of a decision that the layer ran last; None where it ran another one, of which nobody decided."""
    plans = sorted((plan for _, plan in decision.ranking.predicted), key=lambda plan: -len(plan.name))
    return next((plan for plan in plans if record.plan.startswith(plan.name)), None)  # a fold is told behind the plan


def _candidates(decision: Decision, running: Plan, device: torch.device, size: int) -> list[Candidate]:
    found = []
    for seconds, plan in decision.ranking.predicted:
        measured = decision.ranking.measured.get(plan)
        widths = [w.width for w in plan.works(decision.sizes, size) if w.kind == "spmm"]
        by_spmm = plan is running and isinstance(plan, Plan) and not settings.torch_kernels()
        variants = (
            sorted({name for w in set(widths) for name in chosen(w, kernels.backend(device).variants)})
            if by_spmm
            else []
        )
        took = None if measured is None else measured * 1e3
        kept = plan.kept_bytes(decision.sizes, size)
        found.append(Candidate(plan.name, seconds * 1e3, took, plan is running, widths, kept, variants))
    return found


def _plans(layer: Explanation) -> str:
    """The table of a layer's plans, on lines of its own; nothing for a layer that ran as stock."""
    rows = [
        (
            "->" if c.chosen else "",
            c.plan,
            "" if c.predicted_ms is None else f"{c.predicted_ms:.2f}",
            "" if c.measured_ms is None else f"{c.measured_ms:.2f}",
            " ".join(map(str, c.spmm_widths)),
            f"{c.kept_bytes / 2**20:.1f}" if c.spmm_widths else "",
            " ".join(c.kernels),
        )
        for c in layer.candidates
    ]
    heads = ("", "plan", "predicted ms", "measured ms", "aggregation widths", "kept MiB", "kernels")
    return "\n" + table(heads, rows) if rows else ""


def _normalisation(plan: Any) -> str:
    if not isinstance(plan, Plan):
        return ""
    fuses = not settings.torch_kernels()
    kept = ways(fuses)
    dropped = [how for how in normalise.MEANING if how not in kept and (fuses or how != normalise.FUSED)]
    text = "; ".join(normalise.MEANING[how] for how in kept)
    return text + (f" ({' and '.join(dropped)} read or write more, whatever the input)" if dropped else "")


def _line(head: str, text: str) -> str:
    return f"\n{head}: {text}" if text else ""


def _uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile(model) wraps; any other as it is."""
    return model._modules.get("_orig_mod") or model


def _device_of(module: torch.nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Plain columns, as wide as their widest cell; empty columns are left out."""
    used = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = [tuple(heads[i] for i in used), *(tuple(row[i] for i in used) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
