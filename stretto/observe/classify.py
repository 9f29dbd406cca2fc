"""The class of each layer, found from what it does: convolutional, attentional or message-passing; linear, polynomial
or rational in the adjacency matrix.

Labels flow along the traced ops. A gathered node tensor is a copy; a factor that depends on features or parameters and
is narrower than what it multiplies is attention; anything else done to features at the edges is message-passing.
Kinds are C, A, MP; types L, P, R.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from stretto.observe.layer import KINDS, PICK, Layer, together
from stretto.observe.lift import Sizes
from stretto.observe.specs import Spec, matrices, storage_key
from stretto.observe.trace import OpRecord, Trace

LINEAR = (
    "add",
    "sub",
    "neg",
    "mul",
    "div",
    "sum",
    "mean",
    "cat",
    "stack",
    "clone",
    "copy",
    "rsub",
    "to_copy",
    "view",
    "native_dropout",
)


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


def layer_paths(model: nn.Module, trace: Trace) -> list[str]:
    """Paths of the modules that aggregate over edges, outermost first."""
    from torch_geometric.nn import MessagePassing

    named = {name for name, _ in model.named_modules()}
    ran = {name for op in trace for name, _ in op.calls}  # one layer of several owners has a path by each
    result = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, MessagePassing) and (name in named or name in ran)
    ]
    if not result:  # also of the model's own forward, whose path is ""
        result = [op.path for op in trace if op.phase == "forward" and op.cost.family in ("scatter", "spmm")]
    paths: list[str] = []
    for path in dict.fromkeys(result):
        if not any(path == p or path.startswith(p + ".") for p in paths):
            paths.append(path)
    return sorted(paths, key=lambda path: not path)  # what is in a layer is not the model's own


def owner(path: str, layers: list[str]) -> str | None:
    """The layer a module belongs to."""
    return next((layer for layer in layers if not layer or path == layer or path.startswith(layer + ".")), None)


class _Reader:
    """Walks the forward ops once."""

    def __init__(self, model: nn.Module, trace: Trace, sizes: Sizes, features: set[int], learned: set[int]) -> None:
        self.trace = trace
        self.paths = layer_paths(model, trace)
        self.whole = sizes.nodes, sizes.edges - {0}
        self.nodes, self.edges = self.whole
        self.labels: dict[int, Label] = {}
        for key in features:
            self.labels[key] = Label(feat=True)
        for key in learned:
            self.labels[key] = Label(learned=True)
        modules = dict(model.named_modules(remove_duplicate=False))
        self.names = {path: type(modules[path]).__name__ if path in modules else "?" for path in self.paths}
        self.calls: dict[str, dict[int, Layer]] = {path: {} for path in self.paths}

    def read(self) -> list[Layer]:
        for op in self.trace:
            path = owner(op.path, self.paths)
            if path is not None and op.phase == "forward":
                self._call(op, path).ops.append(op.index)
        sizes = {id(call): self._sizes(call) for calls in self.calls.values() for call in calls.values()}
        for op in self.trace:
            if op.phase != "forward":
                continue
            path = owner(op.path, self.paths)
            call = None if path is None else self._call(op, path)
            self.nodes, self.edges = self.whole if call is None else sizes[id(call)]
            self._op(op, call, "\0outside" if call is None else f"{path}\0{id(call)}")
        for calls in self.calls.values():
            if len(calls) > 1 and 0 in calls and not calls[0].hops:
                del calls[0]  # of a model that is a layer itself: what is around it, such as the loss
        layers = {
            path: together(Layer(path, self.names[path]), [*calls.values()]) for path, calls in self.calls.items()
        }
        if len(layers) > 1 and "" in layers and not layers[""].hops:
            del layers[""]  # it adds up nodes, not edges: a pooling
        return list(layers.values())

    def _op(self, op: OpRecord, layer: Layer | None, path: str) -> None:
        before = [(spec, self.labels.get(spec.key, Label())) for spec in op.inputs]
        for spec, label in before:
            if layer is not None and label.feat and label.layer != path and set(spec.shape) & self.nodes:
                layer.width_in = max(layer.width_in, self._row(spec))
                layer.learned_input |= spec.grad
        inputs = [
            (spec, label if label.layer == path else replace(label.entering(path), grad=spec.grad))
            for spec, label in before
        ]
        if op.is_view:
            for spec in op.outputs:
                self.labels[spec.key] = inputs[0][1] if inputs else Label()
            return
        drawn = _draws(op) or any(label.drawn for _, label in inputs)
        label = self._label(op, inputs, layer, path)
        for spec in op.outputs:
            self.labels[spec.key] = replace(label, layer=path, drawn=drawn)
        if layer is not None and op.outputs and op.outputs[0].floating and set(op.outputs[0].shape) & self.nodes:
            layer.width_out = self._row(op.outputs[0])

    def _call(self, op: OpRecord, path: str) -> Layer:
        """The call of a layer that the op belongs to."""
        count = next((count for name, count in op.calls if name == path), 0)
        return self.calls[path].setdefault(count, Layer(path, self.names[path]))

    def _sizes(self, call: Layer) -> tuple[set[int], set[int]]:
        """Numbers of nodes and of edges there. A layer may have a graph of its own: pooled, or the edges of one type.
        Its gathers and scatters show it; its edges may be as many as nodes elsewhere, its self-loops as a row is
        wide."""
        nodes, edges = self.whole
        ops = [self.trace.ops[i] for i in call.ops]
        widths = {s.shape[-1] for op in ops for s in op.outputs if s.floating and len(s.shape) > 1}
        result = [pair for op in ops if (pair := self._rows_and_entries(op)) and pair[1] not in widths]
        own = result and not any(rows in nodes and entries in edges for rows, entries in result)
        nodes, edges = (set(), set()) if own else (set(nodes), set(edges))
        for rows, entries in result:
            if rows not in edges and entries not in nodes and rows != entries:
                nodes.add(rows)
                edges.add(entries)
        return nodes, edges

    def _rows_and_entries(self, op: OpRecord) -> tuple[int, int] | None:
        """Of a gather or a scatter: rows of what is read or added to, and how many of them."""
        if op.cost.family not in ("gather", "scatter") or not op.outputs or len(op.inputs) < 2:
            return None
        target = op.inputs[0] if op.cost.family == "gather" else op.outputs[0]
        index = next((spec for spec in op.inputs if spec.dtype == torch.int64), None)
        if index is None or not target.shape or not index.shape:
            return None
        dim = next((d for d, size in enumerate(target.shape) if size in self.whole[0]), 0)
        rows, entries = target.shape[dim], max(index.shape)
        return (rows, entries) if rows and entries else None

    def _row(self, spec: Spec) -> int:
        """Values per node or edge."""
        size = next((s for s in spec.shape if s in self.edges or s in self.nodes), 1)
        return int(spec.numel // max(size, 1))

    def _label(self, op: OpRecord, inputs: list[tuple[Spec, Label]], layer: Layer | None, path: str) -> Label:
        # Which rows are taken may depend on features (a pooling's scores); the values taken do not by that.
        values = [label for spec, label in inputs if spec.floating]
        feat = any(label.feat for label in values)
        learned = any(label.learned for label in values)
        grad = any(label.grad for label in values)
        base = Label(feat, learned, grad, layer=path, drawn=any(label.drawn for _, label in inputs))
        if op.cost.family in ("create", "draw"):  # as long as its input, but with values of its own
            return Label(layer=path)
        if self._looks_up(op, inputs):
            return Label(feat=True, learned=True, grad=base.grad, layer=path)
        if not inputs or layer is None:
            return base
        family = op.cost.family
        hops = max((label.hops for _, label in inputs if label.feat), default=0)
        if family == "gather":
            source, label = inputs[0]
            if label.feat and label.kind != "node" and set(source.shape) & self.edges:
                # Messages in another order, or one picked for every node: a median sorts them.
                return label if self._on_edges(op) else self._aggregate(op, source, label, base, layer)
            return self._gather(inputs[0], base, layer)
        if family == "scatter":
            source, label = inputs[-1]
            return self._aggregate(op, source, label, base, layer)
        if family in ("spmm", "sddmm") or op.name.startswith("stretto::"):
            return self._fused(op, inputs, base, layer)
        if not self._on_edges(op):
            return self._on_nodes(op, inputs, base, hops, layer)
        return self._edge_op(op, [(s, label) for s, label in inputs if s.floating], base, hops, layer)

    def _looks_up(self, op: OpRecord, inputs: list[tuple[Spec, Label]]) -> bool:
        """Whether every node gets a row of a learned table: an embedding by what the node is."""
        if op.cost.family != "gather" or not op.outputs[0].shape or op.outputs[0].shape[0] not in self.nodes:
            return False
        spec, label = inputs[0]
        return spec.floating and label.learned and not label.feat

    def _on_edges(self, op: OpRecord) -> bool:
        shape = op.outputs[0].shape if op.outputs else ()
        return bool(set(shape) & self.edges)

    def _gather(self, table: tuple[Spec, Label], base: Label, layer: Layer) -> Label:
        spec, label = table
        if not (label.feat and spec.floating):
            return replace(base, feat=label.feat, learned=label.learned, kind="C" if label.feat else "node")
        return Label(True, label.learned, label.grad, "C", label.bent, label.hops, roots=label.roots)

    def _edge_op(self, op: OpRecord, inputs: list[tuple[Spec, Label]], base: Label, hops: int, layer: Layer) -> Label:
        name = op.name.split("::")[1].split(".")[0].strip("_")
        live = [(s, label) for s, label in inputs if label.feat]
        if not live:
            constant = not (base.learned or base.drawn)
            if op.cost.family == "pointwise" and op.outputs[0].floating and constant and name in ("mul", "ones"):
                layer.norm = True
            return base
        if op.cost.family == "sort":  # messages still, in another order
            return live[0][1]
        same = {label.kind for _, label in live}
        if name in ("sub", "div"):  # by what was added up of it: a softmax over neighbours, which is no hop
            hops = min(label.hops for _, label in live)
        if name in ("mul", "div"):
            wide = max(inputs, key=lambda pair: pair[0].numel)
            narrow = next((pair for pair in inputs if pair is not wide), None)
            if narrow is None or not (narrow[1].feat or narrow[1].learned):
                return replace(wide[1], feat=True)
            if not wide[1].feat:
                return replace(base, kind="MP", bent=True, hops=hops)
            if narrow[0].numel < wide[0].numel and wide[1].kind in ("C", "A"):
                return replace(wide[1], feat=True, learned=True, grad=base.grad, kind="A")
            return replace(base, kind="MP", hops=hops, bent=True)
        if name in LINEAR and len(live) == 1 and len({label.feat for _, label in inputs}) == 1:
            return live[0][1]
        return replace(base, kind="MP" if same else "node", hops=hops, bent=name not in LINEAR)

    def _on_nodes(self, op: OpRecord, inputs: list[tuple[Spec, Label]], base: Label, hops: int, layer: Layer) -> Label:
        name = op.name.split("::")[1].split(".")[0].strip("_")
        bent = any(label.bent for _, label in inputs if label.feat)
        roots = frozenset().union(*(label.roots for _, label in inputs)) if inputs else frozenset()
        if op.cost.family not in ("gemm", "copy", "create", "draw", "view") and name not in LINEAR and base.feat:
            bent = True
        if name in ("add", "sub") and hops:
            # The same tensor added after every hop is a restart: the iteration solves a linear system.
            old = {label.origin or spec.key for spec, label in inputs if label.feat and label.hops == 0}
            if any(tensor in old and at < hops for tensor, at in roots):
                layer.type = "R"
            roots = roots | {(tensor, hops) for tensor in old}
        origin = 0
        if not hops and not bent:
            source = next(((spec, label) for spec, label in inputs if label.feat), None)
            origin = 0 if source is None else source[1].origin or source[0].key
        return replace(base, bent=bent, hops=hops, roots=roots, origin=origin)

    def _aggregate(self, op: OpRecord, source: Spec, label: Label, base: Label, layer: Layer) -> Label:
        reduce = str(op.args[4]) if "scatter_reduce" in op.name and len(op.args) > 4 else "sum"
        reduce = PICK if op.cost.family == "gather" else reduce
        if not label.feat or not set(source.shape) & self.edges or label.kind == "node":
            return base
        width = self._row(source)
        if width > layer.aggregated:  # what came before was narrower: scores, degrees
            layer.kind, layer.hops, layer.reduces, layer.later, layer.aggregated = "-", 0, [], {}, width
        if width == layer.aggregated:
            # Bent after an earlier hop: that was the node's own update, and the message is a copy all the same.
            kind = "MP" if label.bent and label.kind == "C" and label.learned and not label.hops else label.kind
            layer.kind = max(layer.kind, kind, key=KINDS.index)
            layer.reduces.append(reduce)
            layer.later |= {label.hops: (width, label.grad)} if label.hops else {}
            layer.hops = max(layer.hops, label.hops + 1)
            layer.bent |= label.bent and label.hops > 0
            layer.constant_input |= label.kind == "C" and not (label.learned or base.drawn)
        return Label(True, base.learned, base.grad, hops=label.hops + 1, roots=label.roots)

    def _fused(self, op: OpRecord, inputs: list[tuple[Spec, Label]], base: Label, layer: Layer) -> Label:
        kernel = op.name.split("::")[1]
        if kernel.startswith(("sddmm", "edge_softmax", "gather")):
            return replace(base, kind="A" if base.feat else "node")
        x = inputs[0] if op.name.startswith("stretto::") else inputs[-1]
        spec, label = x
        weighted = any(other.feat or other.learned for other_spec, other in inputs if other_spec.key != spec.key)
        edge_valued = any(set(other_spec.shape) & self.edges for other_spec, _ in inputs)
        if not label.feat or not matrices(op.args):
            return base
        if self._row(spec) >= layer.aggregated:
            layer.kind = (
                "A"
                if kernel.startswith("attention") or (weighted and edge_valued)
                else "MP"
                if label.kind == "MP"
                else "C"
            )
            layer.aggregated = self._row(spec)
            layer.later |= {label.hops: (layer.aggregated, label.grad)} if label.hops else {}
            layer.hops = max(layer.hops, label.hops + 1)
            layer.bent |= label.bent and label.hops > 0
            layer.reduces.append("sum")
            layer.constant_input |= not (label.learned or base.drawn)
        return Label(True, base.learned, base.grad, hops=label.hops + 1, roots=label.roots)


def _draws(op: OpRecord) -> bool:
    """Whether the op makes random numbers."""
    return op.cost.family == "draw" or op.name.startswith("aten::native_dropout")


def _tables(model: nn.Module, trace: Trace, num_nodes: int) -> set[int]:
    """Storages of the parameters that hold a learned row for every node, such as the table of an Embedding.

    A parameter with as many rows that is the right factor of a product is a weight, and is left out.
    """
    products = [op for op in trace if op.cost.family == "gemm" and op.phase == "forward"]
    weights = {op.inputs[-1].key for op in products if op.inputs}
    long = {storage_key(p) for p in model.parameters() if p.dim() > 1 and num_nodes and p.size(0) == num_nodes}
    return long - weights


def classify(model: nn.Module, trace: Trace, sizes: Sizes, data: Any, num_nodes: int = 0) -> list[Layer]:
    """The layers of the model in the order they first ran. trace, sizes: of `data`, which may be a probe; num_nodes: of
    the data it stands for."""
    learned = {storage_key(p) for p in model.parameters()}
    tables = _tables(model, trace, num_nodes or sizes.n)
    features = {
        storage_key(value)
        for store in getattr(data, "node_stores", [data])
        for name, value in (store.items() if hasattr(store, "items") else store.to_dict().items())
        if hasattr(value, "is_floating_point")
        and value.is_floating_point()
        and value.dim()
        and value.size(0) in sizes.nodes
        and not name.endswith("mask")
    }
    reader = _Reader(model, trace, sizes, features, learned)
    if tables:
        reader.whole[0].add(num_nodes or sizes.n)
        reader.labels |= {key: Label(feat=True, learned=True) for key in tables}
    return reader.read()
