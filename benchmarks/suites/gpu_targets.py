"""What a GPU must reach beside stock, in one table, and what the rows of a run say about each line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Row = dict[str, Any]


def targets(rows: Iterable[Row], ours: str, stock: str, csr: str, compiled: str) -> Iterator[Row]:
    """name, wanted, got and met of every line that the rows have figures for. The names are those of the candidates."""
    every = list(rows)

    def of(kind: str, field: str, against: str = "", **marks: object) -> list[float]:
        """The figure of every row with these marks, where it has one."""
        found = []
        for row in every:
            if row.get("kind") == kind and all(row.get(k) == v for k, v in marks.items()):
                value = row.get(field)
                value = value.get(against) if isinstance(value, dict) and against else value
                found += [float(value)] if isinstance(value, (int, float)) else []
        return found

    lines: list[tuple[str, float, Callable[[list[float]], float], list[float]]] = []
    for model, wanted in (("gat", 12.0), ("gatv2", 12.0), ("transformer", 10.0)):
        mark = {"graph": "g1", "model": model}
        lines.append((f"{model} layer vs {stock}", wanted, min, of("layer", "speedup", stock, **mark)))
        lines.append((f"{model} layer, memory vs {stock}", 15.0, min, of("layer", "memory_ratio", stock, **mark)))
        for graph in ("g2", "g3"):
            mark = {"graph": graph, "model": model}
            lines.append((f"{model} on {graph}, at most ms", -250.0, max, of("layer", "ms", ours, **mark)))
            lines.append((f"{model} on {graph}, at most GiB", -14.0, max, of("layer", "gib", ours, **mark)))
    for model in ("gat", "gatv2"):
        for layers in (2, 3):
            found = of("step", "speedup", compiled, model=model, layers=layers)
            lines.append((f"{model} step, {layers} layers, vs {compiled}", 3.5, min, found))
    for model in ("gcn", "sage", "gin", "sage-max"):
        mark = {"graph": "g1", "model": model}
        lines.append((f"{model} layer vs {stock}", 5.0, min, of("layer", "speedup", stock, **mark)))
        lines.append((f"{model} layer vs {csr}", 1.5, min, of("layer", "speedup", csr, **mark)))
    for dtype, wanted in (("float32", 1.0), ("bfloat16", 1.6)):
        lines.append((f"spmm {dtype} vs cusparse, least of all", wanted, min, of("spmm", "speedup", dtype=dtype)))
    steps = of("step", "speedup", stock)
    best = [min(row["speedup"].values()) for row in every if row.get("kind") == "step" and row.get("speedup")]
    lines.append((f"steps vs {stock}, geometric mean", 6.0, geomean, steps))
    lines.append(("steps vs best stock, geometric mean", 2.0, geomean, best))
    for name, wanted, fold, values in lines:
        if values:
            got = fold(values)
            met = got >= wanted if wanted > 0 else got <= -wanted
            yield {"name": name, "wanted": abs(wanted), "got": got, "met": met}


def geomean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))
