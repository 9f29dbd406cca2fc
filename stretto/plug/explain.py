"""Every plan there is of each layer, its cost, and the one chosen: explain()."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch_geometric.nn.aggr import Aggregation

from stretto import kernels, settings
from stretto.compile import CHOOSER, Order, Plan, normalise
from stretto.compile.choose import Decision
from stretto.compile.plan import ways
from stretto.layers import layer_of
from stretto.layers.base import record_of
from stretto.ops.spmm import chosen
from stretto.plug import messages
from stretto.plug.accelerate import expect_model
from stretto.plug.classes import class_of
from stretto.plug.report import device_of, table, told, uncompiled


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
    layers = [(name, module) for name, module in told(model) if not isinstance(module, Aggregation)]
    compiled = uncompiled(model) is not model or getattr(model, "_compiled_call_impl", None) is not None
    with messages.observed([] if compiled else [module for _, module in layers]) as seen:
        model(*args, **kwargs)
    return Explanations([_explained(name, module, seen.get(id(module))) for name, module in layers])


def _explained(name: str, module: Any, seen: messages.Seen | None) -> Explanation:
    record, kind = record_of(module), class_of(module)
    x = None if seen is None else seen.features
    device = device_of(module) if x is None else x.device
    way = record.way
    decision = None if way.key is None else CHOOSER.decision(way.key)
    forward = None if seen is None else seen.seconds * 1e3
    how, reason, candidates = record.path or "stock", record.reason or ("" if record.plan else "stock"), []
    if decision is not None and way.plan is not None:
        how, candidates = decision.how, _candidates(decision, way.plan, device, 4 if x is None else x.element_size())
    elif record.path == "fast":
        how, candidates = "the only plan", [Candidate(record.plan, None, forward, True, [], 0)]
    return Explanation(
        name,
        kind.__name__,
        how,
        candidates,
        messages.avoided(module, layer_of(kind), record, seen),
        reason,
        kernels.name_of(device) if record.path == "fast" else "",
        forward,
        "" if decision is None else _normalisation(decision.candidates[0]),
    )


def _candidates(decision: Decision, running: Plan | Order, device: torch.device, size: int) -> list[Candidate]:
    found = []
    for seconds, plan in decision.ranking.predicted:
        measured = decision.ranking.measured.get(plan)
        widths = [w.width for w in plan.works(decision.sizes, size) if w.kind == "spmm"]
        by_spmm = plan is running and isinstance(plan, Plan) and not settings.torch_kernels()
        known = kernels.backend(device).variants
        variants = sorted({name for w in set(widths) for name in chosen(w, known)}) if by_spmm else []
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
