"""What a run of `stretto bench gpu` has measured so far, and how it is written down."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.suites import results
from stretto.machine.timing import Timing

logger = logging.getLogger("stretto")

OURS, STOCK, CSR, COMPILED = "stretto", "stock edge_index", "stock torch CSR", "torch.compile of stock"
# kind of a row that is written down -> the part of the run that makes it
PARTS = {"ceiling": "ops", "graph": "ops", "spmm": "ops", "layer": "layers,big", "parts": "layers", "step": "steps"}


@dataclass
class Sheet:
    """The rows measured so far, and how long measuring may take."""

    budget: float
    start: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Mapping[str, results.Figure]] = field(default_factory=list)  # of each row

    def add(self, timings: Mapping[str, Timing] | None = None, **row: Any) -> None:
        """One record, also to the log. timings: what its milliseconds are medians of."""
        self.rows.append(row)
        self.figures.append(results.figures(timings or {}))
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        logger.info("%s", json.dumps(shown))

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() - self.start > self.budget


def to_rows(sheet: Sheet) -> list[results.Row]:
    """What was timed, as it is written down; targets and summaries follow from it."""
    found = []
    for row, figures in zip(sheet.rows, sheet.figures, strict=True):
        if row["kind"] not in PARTS:
            continue
        if row["kind"] == "ceiling":
            figures = {row["name"]: (row["rate"],) * 3}
        elif row["kind"] == "graph":
            figures = {OURS: (row["build_s"] * 1e3,) * 3}
        elif row["kind"] == "parts":
            figures = {name: (ms,) * 3 for name, ms in row["ms"].items()}
        sizes = {name: row[name] for name in ("width", "dtype", "widths", "layers") if name in row}
        case = {"kind": row["kind"], "graph": row.get("graph", ""), "name": row.get("model", row.get("name", "spmm"))}
        case["size"] = ", ".join(f"{value} layers" if name == "layers" else str(value) for name, value in sizes.items())
        skipped = [(OURS, row["skipped"])] if "skipped" in row else []
        gib = {f"{name} GiB": value for name, value in row.get("gib", {}).items()}
        others = {f"{name} ms": figures[name][0] for name in (CSR, COMPILED, "stretto max") if name in figures}
        found.append(
            results.row(
                "gpu",
                case,
                figures,
                device="cuda",
                command=f"stretto bench gpu --only {PARTS[row['kind']]}",
                stock=next((name for name in (STOCK, "cusparse", "torch") if name in figures), ""),
                rivals=[name for name in figures if not name.startswith(OURS)],
                unit=row.get("unit", "ms"),
                note="; ".join(f"{name}: {why}" for name, why in [*row.get("failed", {}).items(), *skipped]),
                more={"error": row.get("error"), **gib, **others},
            )
        )
    return found
