"""What a GPU must reach beside stock, in one table, and what the rows of a run say about each line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Row = dict[str, Any]


Line = tuple[str, float, Callable[[list[float]], float], list[float]]  # name, wanted (below 0: at most), fold, figures


def targets(rows: Iterable[Row], ours: str, stock: str, csr: str, compiled: str) -> Iterator[Row]:
    """The name of every line that the rows have figures for, and what was wanted, got and met.

    ours, stock, csr, compiled: what the rows call these candidates.
    """
    every = list(rows)
    layers = [*_attention(every, ours, stock, compiled), *_sums(every, stock, csr)]
    for name, wanted, fold, values in [*layers, *_steps(every, stock)]:
        if values:
            got = fold(values)
            met = got >= wanted if wanted > 0 else got <= -wanted
            yield {"name": name, "wanted": abs(wanted), "got": got, "met": met}


def _attention(rows: list[Row], ours: str, stock: str, compiled: str) -> Iterator[Line]:
    for model, wanted in (("gat", 12.0), ("gatv2", 12.0), ("transformer", 10.0)):
        mark = {"graph": "g1", "model": model}
        yield f"{model} layer vs {stock}", wanted, min, _figures(rows, "layer", "speedup", stock, **mark)
        yield f"{model} layer, memory vs {stock}", 15.0, min, _figures(rows, "layer", "memory_ratio", stock, **mark)
        for graph in ("g2", "g3"):
            mark = {"graph": graph, "model": model}
            yield f"{model} on {graph}, at most ms", -250.0, max, _figures(rows, "layer", "ms", ours, **mark)
            yield f"{model} on {graph}, at most GiB", -14.0, max, _figures(rows, "layer", "gib", ours, **mark)
    for model, layers in itertools.product(("gat", "gatv2"), (2, 3)):
        values = _figures(rows, "step", "speedup", compiled, model=model, layers=layers)
        yield f"{model} step, {layers} layers, vs {compiled}", 3.5, min, values


def _sums(rows: list[Row], stock: str, csr: str) -> Iterator[Line]:
    for model in ("gcn", "sage", "gin", "sage-max"):
        mark = {"graph": "g1", "model": model}
        yield f"{model} layer vs {stock}", 5.0, min, _figures(rows, "layer", "speedup", stock, **mark)
        yield f"{model} layer vs {csr}", 1.5, min, _figures(rows, "layer", "speedup", csr, **mark)
    for dtype, wanted in (("float32", 1.0), ("bfloat16", 1.6)):
        yield f"spmm {dtype} vs cusparse, least of all", wanted, min, _figures(rows, "spmm", "speedup", dtype=dtype)


def _steps(rows: list[Row], stock: str) -> Iterator[Line]:
    best = [min(row["speedup"].values()) for row in rows if row.get("kind") == "step" and row.get("speedup")]
    yield f"steps vs {stock}, geometric mean", 6.0, geomean, _figures(rows, "step", "speedup", stock)
    yield "steps vs best stock, geometric mean", 2.0, geomean, best


def _figures(rows: list[Row], kind: str, field: str, against: str = "", **marks: object) -> list[float]:
    """The figure of every row with these marks, where it has one."""
    result = []
    for row in rows:
        if row.get("kind") == kind and all(row.get(name) == value for name, value in marks.items()):
            value = row.get(field)
            value = value.get(against) if isinstance(value, dict) and against else value
            result += [float(value)] if isinstance(value, (int, float)) else []
    return result


def geomean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))
