"""The class of each layer, found from what it does: convolutional, attentional or message-passing; linear, polynomial
or rational in the adjacency matrix.

Labels flow along the traced ops (labels.py). Kinds are C, A, MP; types L, P, R.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.observe.labels import Label, Rows, label_of
from stretto.observe.layer import Layer, together
from stretto.observe.lift import Sizes
from stretto.observe.specs import storage_key
from stretto.observe.trace import OpRecord, Trace


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


def classify(model: nn.Module, trace: Trace, sizes: Sizes, data: Any, num_nodes: int = 0) -> list[Layer]:
    """The layers of the model in the order they first ran. trace, sizes: of `data`, which may be a probe; num_nodes: of
    the data it stands for."""
    reader = _Reader(model, trace, Rows(sizes.nodes, sizes.edges - {0}))
    reader.labels |= {storage_key(value): Label(feat=True) for value in _features(data, sizes)}
    reader.labels |= {storage_key(p): Label(learned=True) for p in model.parameters()}
    tables = _tables(model, trace, num_nodes or sizes.n)
    if tables:
        reader.whole.nodes.add(num_nodes or sizes.n)
        reader.labels |= {key: Label(feat=True, learned=True) for key in tables}
    return reader.read()


def _features(data: Any, sizes: Sizes) -> list[Tensor]:
    """The real numbers that the data has for its nodes."""
    return [
        value
        for store in getattr(data, "node_stores", [data])
        for name, value in (store.items() if hasattr(store, "items") else store.to_dict().items())
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim()
        and value.size(0) in sizes.nodes
        and not name.endswith("mask")
    ]


def _tables(model: nn.Module, trace: Trace, num_nodes: int) -> set[int]:
    """Storages of the parameters that hold a learned row for every node, such as the table of an Embedding.

    A parameter with as many rows that is the right factor of a product is a weight, and is left out.
    """
    products = [op for op in trace if op.cost.family == "gemm" and op.phase == "forward"]
    weights = {op.inputs[-1].key for op in products if op.inputs}
    long = {storage_key(p) for p in model.parameters() if p.dim() > 1 and num_nodes and p.size(0) == num_nodes}
    return long - weights


class _Reader:
    """Walks the forward ops once. whole: the rows of tensors over the nodes and edges of the data."""

    def __init__(self, model: nn.Module, trace: Trace, whole: Rows) -> None:
        self.trace, self.whole = trace, whole
        self.paths = layer_paths(model, trace)
        self.labels: dict[int, Label] = {}
        modules = dict(model.named_modules(remove_duplicate=False))
        self.names = {path: type(modules[path]).__name__ if path in modules else "?" for path in self.paths}
        self.calls: dict[str, dict[int, Layer]] = {path: {} for path in self.paths}

    def read(self) -> list[Layer]:
        """The layers of the model."""
        forward = [(op, owner(op.path, self.paths)) for op in self.trace if op.phase == "forward"]
        for op, path in forward:
            if path is not None:
                self._call(op, path).ops.append(op.index)
        rows = {id(call): self._rows(call) for calls in self.calls.values() for call in calls.values()}
        for op, path in forward:
            if path is None:
                self._op(op, None, "\0outside", self.whole)
            else:
                call = self._call(op, path)
                self._op(op, call, f"{path}\0{id(call)}", rows[id(call)])
        return self._layers()

    def _layers(self) -> list[Layer]:
        """All calls of a layer as one."""
        for calls in self.calls.values():
            if len(calls) > 1 and 0 in calls and not calls[0].hops:
                del calls[0]  # of a model that is a layer itself: what is around it, such as the loss
        layers = {p: together(Layer(p, self.names[p]), [*calls.values()]) for p, calls in self.calls.items()}
        if len(layers) > 1 and "" in layers and not layers[""].hops:
            del layers[""]  # it adds up nodes, not edges: a pooling
        return list(layers.values())

    def _call(self, op: OpRecord, path: str) -> Layer:
        """The call of a layer that the op belongs to."""
        count = next((count for name, count in op.calls if name == path), 0)
        return self.calls[path].setdefault(count, Layer(path, self.names[path]))

    def _op(self, op: OpRecord, layer: Layer | None, path: str, rows: Rows) -> None:
        """Label what the op makes, and note how wide the rows are that its layer takes in and gives back."""
        before = [(spec, self.labels.get(spec.key, Label())) for spec in op.inputs]
        for spec, label in before:
            if layer is not None and label.feat and label.layer != path and rows.over_nodes([spec]):
                layer.width_in = max(layer.width_in, rows.width(spec))
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
        label = replace(label_of(op, inputs, layer, path, rows), layer=path, drawn=drawn)
        self.labels |= {spec.key: label for spec in op.outputs}
        if layer is not None and rows.over_nodes(op.outputs) and op.outputs[0].floating:
            layer.width_out = rows.width(op.outputs[0])

    def _rows(self, call: Layer) -> Rows:
        """Numbers of nodes and of edges there. A layer may have a graph of its own: pooled, or the edges of one type.
        Its gathers and scatters show it; its edges may be as many as nodes elsewhere, its self-loops as a row is
        wide."""
        ops = [self.trace.ops[i] for i in call.ops]
        widths = {s.shape[-1] for op in ops for s in op.outputs if s.floating and len(s.shape) > 1}
        pairs = [pair for op in ops if (pair := self._rows_and_entries(op)) and pair[1] not in widths]
        known = any(rows in self.whole.nodes and entries in self.whole.edges for rows, entries in pairs)
        nodes, edges = (set(self.whole.nodes), set(self.whole.edges)) if known or not pairs else (set(), set())
        for rows, entries in pairs:
            if rows not in edges and entries not in nodes and rows != entries:
                nodes.add(rows)
                edges.add(entries)
        return Rows(nodes, edges)

    def _rows_and_entries(self, op: OpRecord) -> tuple[int, int] | None:
        """Of a gather or a scatter: rows of what is read or added to, and how many of them."""
        if op.cost.family not in ("gather", "scatter") or not op.outputs or len(op.inputs) < 2:
            return None
        target = op.inputs[0] if op.cost.family == "gather" else op.outputs[0]
        index = next((spec for spec in op.inputs if spec.dtype == torch.int64), None)
        if index is None or not target.shape or not index.shape:
            return None
        dim = next((d for d, size in enumerate(target.shape) if size in self.whole.nodes), 0)
        rows, entries = target.shape[dim], max(index.shape)
        return (rows, entries) if rows and entries else None


def _draws(op: OpRecord) -> bool:
    """Whether the op makes random numbers."""
    return op.cost.family == "draw" or op.base == "native_dropout"
