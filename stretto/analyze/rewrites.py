"""What a layer could save without changing its result: product order, fusion, hoisting, caching."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction

import sympy

from stretto.compile.rules import LAWS
from stretto.observe.layer import PICK, Layer
from stretto.observe.lift import Sizes
from stretto.observe.specs import Size, Spec
from stretto.observe.trace import OpRecord, Trace

# Rule -> the planner's law behind it; the others make something once, or in one pass, and move no product.
LAW = {"order": "associativity", "hoist": "associativity"}
MOVES = ("gather", "scatter", "spmm")
SUMS = ("add", "sub", "neg", "cat", "clone", "copy")  # of rows: a product may be done before instead of after


@dataclass(frozen=True)
class Rewrite:
    """One re-association and the work it saves per step, in flops and bytes."""

    layer: str
    rule: str  # order, fuse, hoist, cache A X, cache norm
    flops: float
    bytes: float
    sentence: str
    ops: tuple[int, ...] = ()  # those it changes
    left: float = 0.0  # share of their flops that remains; of hoisted products, nodes over edges of the rest do too

    @property
    def law(self) -> str:
        """The identity it follows from, "(A X) W = A (X W)"; empty where it is none of the planner's."""
        return str(LAWS[LAW[self.rule]]) if self.rule in LAW else ""


def _places(ops: list[OpRecord]) -> tuple[int, ...]:
    return tuple(op.index for op in ops)


def _edge_wide(op: OpRecord, edges: set[int]) -> bool:
    return bool(op.outputs) and bool(set(op.outputs[0].shape) & edges) and op.outputs[0].floating


def _message(op: OpRecord, layer: Layer, edges: set[int]) -> bool:
    """Whether the op makes a row for every edge: a neighbour times its weight."""
    if op.cost.family != "pointwise" or not _edge_wide(op, edges):
        return False
    return bool(op.outputs[0].numel >= layer.aggregated * max(edges & set(op.outputs[0].shape)) > max(edges))


def rewrites(trace: Trace, layers: list[Layer], sizes: Sizes, plain: Trace, edges: Collection[int]) -> list[Rewrite]:
    """Every rule that applies, by layer. trace: at the real sizes, which `sizes` are; plain: the same ops on sizes that
    tell nodes from edges; edges: the numbers of edges there."""
    result: list[Rewrite] = []
    edges = set(edges)
    for layer in layers:
        by_call: list[Rewrite] = []
        for call in layer.calls:
            inside = set(call.ops)
            ops = [op for op in plain if op.index in inside or (op.site is not None and op.site in inside)]
            by_call += _order(call, trace, plain, ops) + _fuse(call, trace, ops, edges)
            by_call += _hoist(call, trace, plain, ops, edges, sizes.n)
            by_call += _cache(call, trace, ops, edges)
        result += _merged(by_call, len(layer.calls))
    return result


def _merged(ways: list[Rewrite], calls: int) -> list[Rewrite]:
    """One of every rule, for all calls of a layer that it leaves as much of."""
    result = []
    for first in {way.rule: way for way in reversed(ways)}.values():
        same = [way for way in ways if (way.rule, way.left) == (first.rule, first.left)]
        said = f" (in {len(same)} of {calls} calls)" if calls > 1 else ""
        flops, moved = sum(way.flops for way in same), sum(way.bytes for way in same)
        places = tuple(i for way in same for i in way.ops)
        result.append(Rewrite(first.layer, first.rule, flops, moved, first.sentence + said, places, first.left))
    return sorted(result, key=lambda way: [other.rule for other in ways].index(way.rule))


def _real(trace: Trace, ops: Iterable[OpRecord]) -> list[OpRecord]:
    """The same ops at the sizes of another trace."""
    return [trace.ops[op.index] for op in ops]


def _order(layer: Layer, trace: Trace, plain: Trace, ops: list[OpRecord]) -> list[Rewrite]:
    """(A X) W against A (X W): aggregate at the narrower width."""
    if layer.kind != "C" or layer.type != "L" or set(layer.reduces) - {"sum", "mean"}:
        return []
    result = _product_after(layer, plain, ops) or _product_before(layer, plain, ops)
    if result is None or result[0] >= layer.aggregated:
        return []
    narrow, between, what = result
    shrink = between | {op.index for op in ops if op.site in between and op.phase == "backward"}
    wide = _real(trace, (op for op in ops if op.index in shrink and _as_wide(op, layer.aggregated)))
    ratio = narrow / layer.aggregated
    flops, moved = (sum(float(getattr(op.cost, what)) for op in wide) * (1 - ratio) for what in ("flops", "bytes"))
    text = f"{what}: rows of {narrow} instead of {layer.aggregated} values are aggregated"
    return [Rewrite(layer.path, "order", flops, moved, text, _places(wide), ratio)]


Found = tuple[int, set[int], str] | None  # width of the product's other side, ops that work at its width then, advice


def _product_after(layer: Layer, trace: Trace, ops: list[OpRecord]) -> Found:
    """The product with a weight that takes the sum over neighbours."""
    for op in ops:
        if op.phase == "forward" and _by_weight(op, trace) and op.inputs[-1].shape[0] == layer.aggregated:
            before = _linear_before(trace, _made(op.inputs[-2], op, trace), set(layer.ops), layer.aggregated)
            if before and _sums(before, layer, trace):
                return int(op.inputs[-1].shape[1]), before, "multiply by W first"
    return None


def _product_before(layer: Layer, trace: Trace, ops: list[OpRecord]) -> Found:
    """The product with a weight that made the rows which are then gathered and summed."""
    sums = [op for op in ops if op.phase == "forward" and op.cost.family in ("scatter", "spmm")]
    for op in reversed([op for op in sums if _as_wide(op, layer.aggregated)]):
        between = _linear_before(trace, [op.index], set(layer.ops), layer.aggregated)
        for product in (trace.ops[i] for i in between or ()):
            if _by_weight(product, trace) and product.inputs[-1].shape[1] == layer.aggregated:
                return int(product.inputs[-1].shape[0]), (between or set()) - {product.index}, "aggregate first"
    return None


def _sums(between: set[int], layer: Layer, trace: Trace) -> bool:
    """Whether rows are summed there, and none picked out of the sums: what is picked may have a weight of its own."""
    at = [i for i in between if _as_wide(trace.ops[i], layer.aggregated)]
    sums = [i for i in at if trace.ops[i].cost.family in ("scatter", "spmm")]
    return bool(sums) and all(i < min(sums) for i in at if trace.ops[i].cost.family == "gather")


def _as_wide(op: OpRecord, width: int) -> bool:
    """Whether rows of this width are what it makes."""
    return bool(op.outputs) and bool(op.outputs[0].shape) and op.outputs[0].shape[-1] == width


def _made(spec: Spec, op: OpRecord, trace: Trace) -> list[int]:
    """The ops that made an input."""
    return [i for i in op.deps if spec.key in {out.key for out in trace.ops[i].outputs}]


def _by_weight(op: OpRecord, trace: Trace) -> bool:
    """Whether the op multiplies rows by a matrix that the step does not compute."""
    if op.cost.family != "gemm" or len(op.inputs) < 2 or any(len(spec.shape) != 2 for spec in op.inputs[-2:]):
        return False
    wanted = _made(op.inputs[-1], op, trace)
    while wanted:
        before = trace.ops[wanted.pop()]
        if before.cost.family != "view":
            return False
        wanted += before.deps
    return True


def _linear_before(trace: Trace, wanted: list[int], inside: set[int], width: int) -> set[int] | None:
    """The ops of a layer that led there and act on every column alike, up to its input and to products with a weight;
    None: others are among them."""
    result: set[int] = set()
    while wanted:
        op = trace.ops[wanted.pop()]
        if op.index in result or op.index not in inside or not op.outputs or not op.outputs[0].floating:
            continue
        product = _by_weight(op, trace)
        alike = op.cost.family in (*MOVES, "view", "create") or op.base in SUMS
        if product or alike or (op.base in ("mul", "div") and _scales(op, width)):
            result.add(op.index)
            wanted += () if product else op.deps
        elif _as_wide(op, width):
            return None  # any other op that is narrower makes one value per row, as a weight of edges
    return result


def _scales(op: OpRecord, width: int) -> bool:
    """Whether a product of elements multiplies whole rows: all but one factor have the same value along a row."""
    whole = [s for s in op.inputs if s.shape and s.shape[-1] == width and s.stride[-1] != 0 and s.numel > 1]
    return len(whole) <= 1


def _fuse(layer: Layer, trace: Trace, ops: list[OpRecord], edges: set[int]) -> list[Rewrite]:
    """gather, weight and scatter in one pass: nothing as long as the edges is written or read back."""
    if layer.kind not in ("C", "A") or PICK in layer.reduces:
        return []
    messages = [op for op in ops if _edge_wide(op, edges) and op.cost.family in ("gather", "pointwise")]
    wide = [op for op in messages if op.outputs[0].numel >= layer.aggregated * max(edges & set(op.outputs[0].shape))]
    if not wide:
        return []
    moved = 2.0 * sum(float(op.outputs[0].nbytes) for op in _real(trace, wide))
    what = "1 tensor" if len(wide) == 1 else f"{len(wide)} tensors"
    verb = "is" if len(wide) == 1 else "are"
    text = f"{what} of {layer.aggregated} values per edge {verb} made; a fused product makes none"
    return [Rewrite(layer.path, "fuse", 0.0, moved, text, _places(wide), 1.0)]


def _hoist(
    layer: Layer, trace: Trace, plain: Trace, ops: list[OpRecord], edges: set[int], num_nodes: int
) -> list[Rewrite]:
    """Products on the edges that are linear in what was gathered from the nodes: do them once per node."""
    products = [op for op in ops if op.cost.family == "gemm" and op.phase == "forward" and _edge_wide(op, edges)]
    shares = {op.index: _from_nodes(op, plain, edges) for op in products}
    result = _real(trace, (op for op in products if shares[op.index]))
    if not result:
        return []
    rows = result[0].outputs[0].shape[0]
    known = sum(float(op.cost.flops) for op in result)
    share = sum(float(op.cost.flops) * shares[op.index] for op in result) / known
    saved = known * share * (1 - num_nodes / rows)
    what = "1 product runs" if len(result) == 1 else f"{len(result)} products run"
    text = f"{what} on {rows} edges, linear in what was gathered from the nodes: {num_nodes} nodes are enough"
    if share < 1:
        text += f" for {share:.0%} of the columns"
    return [Rewrite(layer.path, "hoist", saved, 0.0, text, _places(result), 1 - share)] if saved > 0 else []


def _from_nodes(op: OpRecord, trace: Trace, edges: set[int]) -> float:
    """Share of this product's columns that only sums and concatenations separate from rows gathered from nodes."""
    long = [spec for spec in op.inputs if spec.floating and set(spec.shape) & edges]
    if len(long) != 1:  # a weight for every edge: a product for every node would have to have them all
        return 0.0
    return _gathered(long[0], op, trace, edges)


def _gathered(spec: Spec, op: OpRecord, trace: Trace, edges: set[int]) -> float:
    """Share of the columns of this input that were gathered from nodes: of a sum the least of its terms'."""
    made = _made(spec, op, trace)
    if not made:
        return 0.0  # values of edges, as they were given
    before = trace.ops[made[-1]]
    long = [s for s in before.inputs if s.floating and set(s.shape) & edges]
    if before.cost.family == "gather":
        return float(not set(before.inputs[0].shape[:1]) & edges)
    if not long or not (before.cost.family == "view" or before.base in SUMS):
        return 0.0
    shares = [_gathered(s, before, trace, edges) for s in long]
    if before.base == "cat" and len({s.shape[0] for s in long}) == 1:
        whole = sum(s.row for s in long)
        return float(sum(share * s.row for share, s in zip(shares, long, strict=True)) / whole)
    return min(shares)


def _cache(layer: Layer, trace: Trace, ops: list[OpRecord], edges: set[int]) -> list[Rewrite]:
    result = []
    if layer.constant_input and layer.kind == "C":
        spent = [op for op in ops if op.phase == "forward" and (op.cost.family in MOVES or _message(op, layer, edges))]
        flops, moved = (sum(float(getattr(op.cost, what)) for op in _real(trace, spent)) for what in ("flops", "bytes"))
        what = "A X" if layer.hops <= 1 else f"A^{layer.hops} X"
        text = f"{what} does not depend on any parameter: computed once, it is the same in every step"
        result.append(Rewrite(layer.path, "cache A X", flops, moved, text, _places(spent)))
    if layer.norm:
        spent = [
            op
            for op in ops
            if op.phase == "forward"
            and _edge_wide(op, edges)
            and op.outputs[0].numel in edges
            and op.cost.family != "view"
        ]
        flops, moved = (sum(float(getattr(op.cost, what)) for op in _real(trace, spent)) for what in ("flops", "bytes"))
        text = "edge weights are made from the graph alone in every step; made once, they can be kept"
        result.append(Rewrite(layer.path, "cache norm", flops, moved, text, _places(spent)))
    return result


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
    gone = 1 - sympy.Rational(Fraction(way.left).limit_denominator(1 << 20))  # a share of widths: as such, not as 0.857
    if way.rule == "hoist":
        at_nodes = [trace.ops[i].cost.flops * (1 - num_nodes / trace.ops[i].outputs[0].shape[0]) for i in way.ops]
        return sum(at_nodes) * gone
    return sum(trace.ops[i].cost.flops for i in way.ops) * gone
