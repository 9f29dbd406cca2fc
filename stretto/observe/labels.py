"""What is known of a tensor's values, and how it follows through the ops of a layer.

A gathered node tensor is a copy; a factor that depends on features or parameters and is narrower than what it
multiplies is attention; anything else done to features at the edges is message-passing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.observe.layer import PICK, Layer
from stretto.observe.specs import Spec, matrices
from stretto.observe.trace import OpRecord

# Ops that act on every value alike, so that what goes through them is a linear map of what came in.
LINEAR = ("add", "sub", "neg", "mul", "div", "sum", "mean", "cat", "stack", "clone", "copy", "rsub", "to_copy", "view",
          "native_dropout")  # fmt: skip


@dataclass(frozen=True)
class Label:
    """What is known of a tensor's values."""

    feat: bool = False  # depends on the features
    learned: bool = False  # depends on parameters
    grad: bool = False  # gradients go back to it: some of those parameters are not frozen
    kind: str = "node"  # node, C, A, MP: how far the message has come
    bent: bool = False  # passed through something non-linear inside this layer
    hops: int = 0  # aggregations behind it inside this layer
    layer: str = "\0input"
    roots: frozenset[tuple[int, int]] = frozenset()  # tensors added to it after an aggregation, and after how many
    origin: int = 0  # the tensor it is a linear map of, before any aggregation
    drawn: bool = False  # depends on random numbers, which are others in every step

    def entering(self, layer: str) -> Label:
        """As another layer sees it."""
        return self if self.layer == layer else Label(self.feat, self.learned, self.grad, layer=layer, drawn=self.drawn)


Inputs = Sequence[tuple[Spec, Label]]


@dataclass(frozen=True)
class Rows:
    """The numbers of rows that tensors over nodes and over edges have."""

    nodes: set[int]
    edges: set[int]

    def width(self, spec: Spec) -> int:
        """Values per node or edge."""
        size = next((s for s in spec.shape if s in self.edges or s in self.nodes), 1)
        return int(spec.numel // max(size, 1))

    def over_edges(self, specs: Sequence[Spec]) -> bool:
        """Whether the first of these tensors is one over edges."""
        return bool(specs) and bool(set(specs[0].shape) & self.edges)

    def over_nodes(self, specs: Sequence[Spec]) -> bool:
        """Whether the first of these tensors is one over nodes."""
        return bool(specs) and bool(set(specs[0].shape) & self.nodes)


def label_of(op: OpRecord, inputs: Inputs, layer: Layer | None, path: str, rows: Rows) -> Label:
    """The label of an op's results. layer: the call that the op is part of, which is told what it aggregates."""
    base = _joined(inputs, path)
    if op.cost.family in ("create", "draw"):  # as long as its input, but with values of its own
        return Label(layer=path)
    if _looks_up(op, inputs, rows):
        return Label(feat=True, learned=True, grad=base.grad, layer=path)
    if not inputs or layer is None:
        return base
    if op.cost.family == "gather":
        return _gathered(op, inputs, base, layer, rows)
    if op.cost.family == "scatter":
        return _aggregated(op, inputs[-1], base, layer, rows)
    if op.cost.family in ("spmm", "sddmm") or op.ours:
        return _fused(op, inputs, base, layer, rows)
    if rows.over_edges(op.outputs):
        return _on_edges(op, [pair for pair in inputs if pair[0].floating], base, _hops(inputs), layer)
    return _on_nodes(op, inputs, base, _hops(inputs), layer)


def _joined(inputs: Inputs, path: str) -> Label:
    """What any of the inputs depends on. Which rows are taken may depend on features (a pooling's scores); the values
    taken do not by that."""
    values = [label for spec, label in inputs if spec.floating]
    return Label(
        feat=any(label.feat for label in values),
        learned=any(label.learned for label in values),
        grad=any(label.grad for label in values),
        layer=path,
        drawn=any(label.drawn for _, label in inputs),
    )


def _hops(inputs: Inputs) -> int:
    return max((label.hops for _, label in inputs if label.feat), default=0)


def _looks_up(op: OpRecord, inputs: Inputs, rows: Rows) -> bool:
    """Whether every node gets a row of a learned table: an embedding by what the node is."""
    if op.cost.family != "gather" or not op.outputs[0].shape or op.outputs[0].shape[0] not in rows.nodes:
        return False
    spec, label = inputs[0]
    return spec.floating and label.learned and not label.feat


def _gathered(op: OpRecord, inputs: Inputs, base: Label, layer: Layer, rows: Rows) -> Label:
    """Rows of nodes for the edges; or messages in another order, or one picked for every node: a median sorts them."""
    spec, label = inputs[0]
    if label.feat and label.kind != "node" and rows.over_edges([spec]):
        return label if rows.over_edges(op.outputs) else _aggregated(op, inputs[0], base, layer, rows)
    if not (label.feat and spec.floating):
        return replace(base, feat=label.feat, learned=label.learned, kind="C" if label.feat else "node")
    return Label(True, label.learned, label.grad, "C", label.bent, label.hops, roots=label.roots)


def _on_edges(op: OpRecord, inputs: Inputs, base: Label, hops: int, layer: Layer) -> Label:
    live = [label for _, label in inputs if label.feat]
    if not live:
        constant = not (base.learned or base.drawn)
        if op.cost.family == "pointwise" and op.outputs[0].floating and constant and op.base in ("mul", "ones"):
            layer.norm = True
        return base
    if op.cost.family == "sort":  # messages still, in another order
        return live[0]
    if op.base in ("sub", "div"):  # by what was added up of it: a softmax over neighbours, which is no hop
        hops = min(label.hops for label in live)
    if op.base in ("mul", "div"):
        return _scaled(inputs, base, hops)
    if op.base in LINEAR and len(live) == 1 and len({label.feat for _, label in inputs}) == 1:
        return live[0]
    return replace(base, kind="MP", hops=hops, bent=op.base not in LINEAR)


def _scaled(inputs: Inputs, base: Label, hops: int) -> Label:
    """Messages times something: a constant leaves them as they are, a learned factor for a whole row is attention."""
    wide = max(inputs, key=lambda pair: pair[0].numel)
    narrow = next((pair for pair in inputs if pair is not wide), None)
    if narrow is None or not (narrow[1].feat or narrow[1].learned):
        return replace(wide[1], feat=True)
    if wide[1].feat and narrow[0].numel < wide[0].numel and wide[1].kind in ("C", "A"):
        return replace(wide[1], feat=True, learned=True, grad=base.grad, kind="A")
    return replace(base, kind="MP", bent=True, hops=hops)


def _on_nodes(op: OpRecord, inputs: Inputs, base: Label, hops: int, layer: Layer) -> Label:
    live = [(spec, label) for spec, label in inputs if label.feat]
    straight = op.base in LINEAR or op.cost.family in ("gemm", "copy", "create", "draw", "view")
    bent = any(label.bent for _, label in live) or (base.feat and not straight)
    roots = frozenset().union(*(label.roots for _, label in inputs))
    if op.base in ("add", "sub") and hops:
        old = {label.origin or spec.key for spec, label in live if label.hops == 0}
        roots = _restarted(old, roots, hops, layer)
    origin = 0
    if live and not hops and not bent:
        spec, label = live[0]
        origin = label.origin or spec.key
    return replace(base, bent=bent, hops=hops, roots=roots, origin=origin)


def _restarted(old: set[int], roots: frozenset[tuple[int, int]], hops: int, layer: Layer) -> frozenset[tuple[int, int]]:
    """Tensors added to the sums after so many hops. The same one after every hop is a restart: the iteration solves a
    linear system."""
    if any(tensor in old and at < hops for tensor, at in roots):
        layer.type = "R"
    return roots | {(tensor, hops) for tensor in old}


def _aggregated(op: OpRecord, source: tuple[Spec, Label], base: Label, layer: Layer, rows: Rows) -> Label:
    """Messages added up, or one of them picked."""
    spec, label = source
    if not label.feat or not rows.over_edges([spec]) or label.kind == "node":
        return base
    reduce = str(op.args[4]) if op.base.startswith("scatter_reduce") and len(op.args) > 4 else "sum"
    width = rows.width(spec)
    if width > layer.aggregated:  # what came before was narrower: scores, degrees
        layer.kind, layer.hops, layer.reduces, layer.later, layer.aggregated = "-", 0, [], {}, width
    if width == layer.aggregated:
        # Bent after an earlier hop: that was the node's own update, and the message is a copy all the same.
        kind = "MP" if label.bent and label.kind == "C" and label.learned and not label.hops else label.kind
        layer.widen(kind)
        layer.aggregate(PICK if op.cost.family == "gather" else reduce, label.hops, label.grad, label.bent)
        layer.constant_input |= label.kind == "C" and not (label.learned or base.drawn)
    return Label(True, base.learned, base.grad, hops=label.hops + 1, roots=label.roots)


def _fused(op: OpRecord, inputs: Inputs, base: Label, layer: Layer, rows: Rows) -> Label:
    """A kernel that gathers, weighs and adds up at once; sddmm and the softmax of edges make values of edges."""
    if op.cost.family in ("sddmm", "softmax"):
        return replace(base, kind="A" if base.feat else "node")
    spec, label = inputs[0] if op.ours else inputs[-1]
    if not label.feat or not matrices(op.args):
        return base
    if rows.width(spec) >= layer.aggregated:
        weighted = any(other.feat or other.learned for input, other in inputs if input.key != spec.key)
        on_edges = any(rows.over_edges([input]) for input, _ in inputs)
        attends = op.cost.family == "attention" or (weighted and on_edges)
        layer.kind = "A" if attends else "MP" if label.kind == "MP" else "C"
        layer.aggregated = rows.width(spec)
        layer.aggregate("sum", label.hops, label.grad, label.bent)
        layer.constant_input |= not (label.learned or base.drawn)
    return Label(True, base.learned, base.grad, hops=label.hops + 1, roots=label.roots)
