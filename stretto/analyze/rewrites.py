"""What a layer could save without changing its result: product order, fusion, hoisting, caching, chain or power."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.analyze.classify import Layer
from stretto.analyze.trace import OpRecord, Trace


@dataclass(frozen=True)
class Rewrite:
    """One re-association and the work it saves per step, in flops and bytes."""

    layer: str
    rule: str  # order, fuse, hoist, cache A X, cache norm, chain
    flops: float
    bytes: float
    sentence: str


def _edge_wide(op: OpRecord, edges: set[int]) -> bool:
    return bool(op.outputs) and bool(set(op.outputs[0].shape) & edges) and op.outputs[0].floating


def rewrites(trace: Trace, layers: list[Layer], edges: set[int], num_nodes: int) -> list[Rewrite]:
    """Every rule that applies, by layer. trace: at the real sizes; edges: the numbers of edges it may show."""
    found: list[Rewrite] = []
    for layer in layers:
        inside = set(layer.ops)
        ops = [op for op in trace if op.index in inside or (op.site is not None and op.site in inside)]
        found += _order(layer, ops) + _fuse(layer, ops, edges) + _hoist(layer, ops, edges, num_nodes)
        found += _cache(layer, ops, edges)
    return found


def _order(layer: Layer, ops: list[OpRecord]) -> list[Rewrite]:
    """(A X) W against A (X W): aggregate at the narrower width."""
    if layer.kind != "C" or layer.type != "L" or "amax" in layer.reduces or "amin" in layer.reduces:
        return []
    narrow = min(layer.width_in, layer.width_out)
    if not narrow or layer.aggregated <= narrow:
        return []
    ratio = narrow / layer.aggregated
    wide = [op for op in ops if op.cost.family in ("gather", "scatter", "spmm")]
    flops, moved = (sum(float(getattr(op.cost, what)) for op in wide) * (1 - ratio) for what in ("flops", "bytes"))
    text = f"multiply by W first: rows of {narrow} instead of {layer.aggregated} values are aggregated"
    return [Rewrite(layer.path, "order", flops, moved, text)]


def _fuse(layer: Layer, ops: list[OpRecord], edges: set[int]) -> list[Rewrite]:
    """gather, weight and scatter in one pass: nothing as long as the edges is written or read back."""
    if layer.kind not in ("C", "A"):
        return []
    messages = [op for op in ops if _edge_wide(op, edges) and op.cost.family in ("gather", "pointwise")]
    wide = [op for op in messages if op.outputs[0].numel >= layer.aggregated * max(edges & set(op.outputs[0].shape))]
    if not wide:
        return []
    moved = 2.0 * sum(float(op.outputs[0].nbytes) for op in wide)
    text = f"{len(wide)} tensors of {layer.aggregated} values per edge are made; a fused product makes none"
    return [Rewrite(layer.path, "fuse", 0.0, moved, text)]


def _hoist(layer: Layer, ops: list[OpRecord], edges: set[int], num_nodes: int) -> list[Rewrite]:
    """The first product on the edges is linear in what was gathered: do it once per node."""
    first = next(
        (op for op in ops if op.cost.family == "gemm" and op.phase == "forward" and _edge_wide(op, edges)), None
    )
    if first is None or layer.kind != "MP":
        return []
    rows = first.outputs[0].shape[0]
    saved = float(first.cost.flops) * (1 - num_nodes / rows)
    text = f"the first product runs on {rows} edges; it is linear in x_i and x_j, so {num_nodes} nodes are enough"
    return [Rewrite(layer.path, "hoist", saved, 0.0, text)] if saved > 0 else []


def _cache(layer: Layer, ops: list[OpRecord], edges: set[int]) -> list[Rewrite]:
    found = []
    if layer.constant_input and layer.kind == "C":
        spent = [op for op in ops if op.cost.family in ("gather", "scatter", "spmm") and op.phase == "forward"]
        flops, moved = (sum(float(getattr(op.cost, what)) for op in spent) for what in ("flops", "bytes"))
        what = "A X" if layer.hops <= 1 else f"A^{layer.hops} X"
        text = f"{what} does not depend on any parameter: computed once, it is the same in every step"
        found.append(Rewrite(layer.path, "cache A X", flops, moved, text))
    if layer.norm:
        spent = [
            op
            for op in ops
            if op.phase == "forward"
            and _edge_wide(op, edges)
            and op.outputs[0].numel in edges
            and op.cost.family != "view"
        ]
        flops, moved = (sum(float(getattr(op.cost, what)) for op in spent) for what in ("flops", "bytes"))
        text = "edge weights are made from the graph alone in every step; made once, they can be kept"
        found.append(Rewrite(layer.path, "cache norm", flops, moved, text))
    return found


def chain_or_power(num_nodes: int, num_edges: int, width: int, hops: int) -> tuple[str, float, float]:
    """Which is cheaper for A^T X: T products with X, or A^T first (as published). -> (choice, chain, power) in work."""
    from math import log2

    chain = float(hops * num_edges * width)
    power = float(num_edges * num_nodes * log2(max(hops, 2)))
    return ("chain" if chain <= power else "power"), chain, power
