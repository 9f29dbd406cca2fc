"""What a layer could save without changing its result: product order, fusion, hoisting, caching, chain or power."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from stretto.analyze.classify import Layer
from stretto.analyze.specs import Size
from stretto.analyze.trace import OpRecord, Trace

MOVES = ("gather", "scatter", "spmm")
SUMS = ("add", "sub", "neg", "cat", "clone", "copy")  # of rows: a product may be done before instead of after


@dataclass(frozen=True)
class Rewrite:
    """One re-association and the work it saves per step, in flops and bytes."""

    layer: str
    rule: str  # order, fuse, hoist, cache A X, cache norm, chain, power
    flops: float
    bytes: float
    sentence: str
    ops: tuple[int, ...] = ()  # those it changes
    left: float = 0.0  # share of their flops that remains; of hoisted products that is nodes over edges


def _places(ops: list[OpRecord]) -> tuple[int, ...]:
    return tuple(op.index for op in ops)


def _edge_wide(op: OpRecord, edges: set[int]) -> bool:
    return bool(op.outputs) and bool(set(op.outputs[0].shape) & edges) and op.outputs[0].floating


def _message(op: OpRecord, layer: Layer, edges: set[int]) -> bool:
    """Whether the op makes a row for every edge: a neighbour times its weight."""
    if op.cost.family != "pointwise" or not _edge_wide(op, edges):
        return False
    return bool(op.outputs[0].numel >= layer.aggregated * max(edges & set(op.outputs[0].shape)) > max(edges))


def rewrites(trace: Trace, layers: list[Layer], edges: set[int], num_nodes: int) -> list[Rewrite]:
    """Every rule that applies, by layer. trace: at the real sizes; edges: the numbers of edges it may show."""
    found: list[Rewrite] = []
    for layer in layers:
        inside = set(layer.ops)
        ops = [op for op in trace if op.index in inside or (op.site is not None and op.site in inside)]
        found += _order(layer, ops) + _fuse(layer, ops, edges) + _hoist(layer, trace, ops, edges, num_nodes)
        found += _cache(layer, ops, edges) + _power(layer, trace, edges, num_nodes)
    return found


def _order(layer: Layer, ops: list[OpRecord]) -> list[Rewrite]:
    """(A X) W against A (X W): aggregate at the narrower width."""
    if layer.kind != "C" or layer.type != "L" or "amax" in layer.reduces or "amin" in layer.reduces:
        return []
    narrow = min(layer.width_in, layer.width_out)
    if not narrow or layer.aggregated <= narrow:
        return []
    ratio = narrow / layer.aggregated
    wide = [op for op in ops if op.cost.family in MOVES]
    flops, moved = (sum(float(getattr(op.cost, what)) for op in wide) * (1 - ratio) for what in ("flops", "bytes"))
    text = f"multiply by W first: rows of {narrow} instead of {layer.aggregated} values are aggregated"
    return [Rewrite(layer.path, "order", flops, moved, text, _places(wide), ratio)]


def _fuse(layer: Layer, ops: list[OpRecord], edges: set[int]) -> list[Rewrite]:
    """gather, weight and scatter in one pass: nothing as long as the edges is written or read back."""
    if layer.kind not in ("C", "A"):
        return []
    messages = [op for op in ops if _edge_wide(op, edges) and op.cost.family in ("gather", "pointwise")]
    wide = [op for op in messages if op.outputs[0].numel >= layer.aggregated * max(edges & set(op.outputs[0].shape))]
    if not wide:
        return []
    moved = 2.0 * sum(float(op.outputs[0].nbytes) for op in wide)
    what = "1 tensor" if len(wide) == 1 else f"{len(wide)} tensors"
    verb = "is" if len(wide) == 1 else "are"
    text = f"{what} of {layer.aggregated} values per edge {verb} made; a fused product makes none"
    return [Rewrite(layer.path, "fuse", 0.0, moved, text, _places(wide), 1.0)]


def _hoist(layer: Layer, trace: Trace, ops: list[OpRecord], edges: set[int], num_nodes: int) -> list[Rewrite]:
    """Products on the edges that are linear in what was gathered from the nodes: do them once per node."""
    products = [op for op in ops if op.cost.family == "gemm" and op.phase == "forward" and _edge_wide(op, edges)]
    found = [op for op in products if _from_nodes(op, trace, edges)]
    if not found:
        return []
    rows = found[0].outputs[0].shape[0]
    saved = sum(float(op.cost.flops) for op in found) * (1 - num_nodes / rows)
    what = "1 product runs" if len(found) == 1 else f"{len(found)} products run"
    text = f"{what} on {rows} edges, linear in what was gathered from the nodes: {num_nodes} nodes are enough"
    return [Rewrite(layer.path, "hoist", saved, 0.0, text, _places(found))] if saved > 0 else []


def _from_nodes(op: OpRecord, trace: Trace, edges: set[int]) -> bool:
    """Whether only sums and concatenations lie between gathered rows and this product's edge-wide input."""
    wanted, gathered = list(op.deps), False
    while wanted:
        before = trace.ops[wanted.pop()]
        if not (set(before.outputs[0].shape) & edges if before.outputs else False):
            continue  # the weight
        name = before.name.split("::")[1].split(".")[0].strip("_")
        if before.cost.family == "gather":
            gathered = True
        elif before.is_view or name in SUMS:
            wanted += before.deps
        else:
            return False
    return gathered


def _cache(layer: Layer, ops: list[OpRecord], edges: set[int]) -> list[Rewrite]:
    found = []
    if layer.constant_input and layer.kind == "C":
        spent = [op for op in ops if op.phase == "forward" and (op.cost.family in MOVES or _message(op, layer, edges))]
        flops, moved = (sum(float(getattr(op.cost, what)) for op in spent) for what in ("flops", "bytes"))
        what = "A X" if layer.hops <= 1 else f"A^{layer.hops} X"
        text = f"{what} does not depend on any parameter: computed once, it is the same in every step"
        found.append(Rewrite(layer.path, "cache A X", flops, moved, text, _places(spent)))
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
        found.append(Rewrite(layer.path, "cache norm", flops, moved, text, _places(spent)))
    return found


def _power(layer: Layer, trace: Trace, edges: set[int], num_nodes: int) -> list[Rewrite]:
    """Several hops: products with X one after the other, or a power of A first."""
    if layer.type not in ("P", "R") or layer.hops < 2:
        return []
    choice, chain, power = chain_or_power(num_nodes, max(edges), layer.aggregated, layer.hops)
    text = f"{layer.hops} products with {layer.aggregated} columns cost {chain:.3g}, the power of A first {power:.3g}"
    return [Rewrite(layer.path, choice, 2 * max(0.0, chain - power), 0.0, text)]


def chain_or_power(num_nodes: int, num_edges: int, width: int, hops: int) -> tuple[str, float, float]:
    """Which is cheaper for A^T X: T products with X, or A^T first (as published). -> (choice, chain, power) in work."""
    chain = float(hops * num_edges * width)
    power = float(num_edges * num_nodes * log2(max(hops, 2)))
    return ("chain" if chain <= power else "power"), chain, power


def chosen(ways: list[Rewrite], what: str = "flops") -> list[Rewrite]:
    """The rules of one layer that go together and save most. Caching A X makes order and fusion of it pointless."""
    by_rule = {way.rule: way for way in ways}
    cached = [by_rule[rule] for rule in ("cache A X",) if rule in by_rule]
    product = [by_rule[rule] for rule in ("order", "fuse") if rule in by_rule]
    saved = [sum(getattr(way, what) for way in some) for some in (cached, product)]
    rest = [by_rule[rule] for rule in ("hoist", "cache norm") if rule in by_rule]
    return [*(cached if cached and saved[0] >= saved[1] else product), *rest]


def saved_flops(way: Rewrite, trace: Trace, num_nodes: Size) -> Size:
    """Flops that the rule saves in a trace, of numbers or of symbols."""
    if way.rule == "hoist":
        return sum(trace.ops[i].cost.flops * (1 - num_nodes / trace.ops[i].outputs[0].shape[0]) for i in way.ops)
    return sum(trace.ops[i].cost.flops for i in way.ops) * (1 - way.left)
