"""What was accelerated, with which plan, and what was not and why: report()."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

from stretto import kernels
from stretto.layers import AGGREGATIONS, CONVS
from stretto.layers.base import Record, record_of
from stretto.layers.layer import stock_of
from stretto.plug import generic
from stretto.plug.accelerate import expect_model, is_patched
from stretto.plug.by_hops import CONTAINERS
from stretto.plug.classes import KNOWN, class_of, fast_of
from stretto.plug.dispatch import known_reason


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
    for name, module in told(model):
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
            if stock_of(type(getattr(module, "aggr_module", None))) is not None:
                reason += "; its aggregation runs over the cached index"
            rows.append(Row(name, kind.__name__, "stock", "", "", reason))
            continue
        path = record.path or "not run yet"
        layer = KNOWN.get(stock_of(kind) or kind)
        reason = record.reason or known_reason(module, layer) or ""
        if layer is None:  # it runs as a product
            reason = _joined(reason, generic.stock_edge_update(kind))
        kernel = {"fast": kernels.name_of(device_of(module)), "compiled": "torch.compile"}.get(path, "")
        rows.append(Row(name, kind.__name__, path, record.plan, kernel, reason))
    return Report(rows)


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def told(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of every row of a report: layers, and aggregations that belong to no layer."""
    parts: set[int] = set()  # what is inside a layer or an aggregation is told of with it
    for name, module in uncompiled(model).named_modules():
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


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile(model) wraps; any other as it is."""
    return model._modules.get("_orig_mod") or model


def device_of(module: torch.nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Plain columns, as wide as their widest cell; empty columns are left out."""
    used = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = [tuple(heads[i] for i in used), *(tuple(row[i] for i in used) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
