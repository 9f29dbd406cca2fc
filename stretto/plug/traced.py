"""Models that to_hetero made: where it adds up the results of layers, relation by relation, they run side by side.

Such a model is a torch.fx GraphModule. accelerate() gives it a class of its own whose forward runs a copy of its graph;
there each sum over relations is one call (layers/relations.py). Layers, parameters and the model's own graph stay as
they are. A copy of the model (deepcopy, pickle) is what torch.fx makes of it: layers stay fast, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from stretto.layers import relations
from stretto.layers.base import note, note_fast
from stretto.layers.layer import STOCK
from stretto.plug import inside_compile
from stretto.plug.own_class import behind
from stretto.plug.stock import in_place_of, stock_wanted


@dataclass
class _Twin:
    """The graph with its sums as calls, and where each of its modules must be found for it to stand for the model."""

    run: fx.GraphModule
    places: list[tuple[torch.nn.Module, str, torch.nn.Module]]  # owner, name, module

    def stands(self) -> bool:
        return all(owner._modules.get(name) is module for owner, name, module in self.places)


_twins: WeakKeyDictionary[torch.nn.Module, _Twin] = WeakKeyDictionary()


class Together(torch.nn.Module):
    """The sum (or mean) of what several layers of a model give for their arguments, and of further results."""

    def __init__(self, layers: list[torch.nn.Module], count: int, mean: bool) -> None:
        super().__init__()
        self.layers = tuple(layers)  # a tuple: they are the model's, not ours to register
        self.share = 1.0 / count if mean else 1.0

    def forward(self, calls: Any, others: Any) -> Tensor:
        parts, alone = [], list(others)
        for layer, (args, kwargs) in zip(self.layers, calls, strict=True):
            of = relations.summands(layer, args, kwargs)
            if of is None:
                alone.append(layer(*args, **kwargs))
            else:
                parts.append((layer, of, args, kwargs))
        if len(parts) < 2 or not relations.alike([of for _, of, _, _ in parts]):
            alone += [layer(*args, **kwargs) for layer, _, args, kwargs in parts]
            parts = []
        out = relations.total([(layer, of) for layer, of, _, _ in parts], self.share) if parts else None
        for value in alone:
            value = value if self.share == 1.0 else value * self.share
            out = value if out is None else out + value
        assert out is not None
        return out


def fast_class(module: Any) -> type | None:
    """The class that accelerate() gives to a model of to_hetero, or None where there is nothing to add up."""
    twin = _twin(module) if isinstance(module, fx.GraphModule) else None
    if twin is None:
        return None
    _twins[module] = twin
    kind: Any = type(module)
    body = {
        "forward": in_place_of(kind.forward, _forward),
        "recompile": _recompile,
        STOCK: kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,  # torch.fx knows the classes of single modules by it
    }
    return type(kind.__name__, (kind,), body)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        inside_compile.note(self)
        return _stock_of(self).forward(self, *args, **kwargs)
    twin = _twins.get(self)
    if twin is None or torch.jit.is_tracing() or stock_wanted() or not twin.stands():
        return _stock_of(self).forward(self, *args, **kwargs)
    note_fast(self)
    sums = [m for m in twin.run.children() if type(m) is Together]
    note(self, f"{sum(len(m.layers) for m in sums)} relations side by side in {len(sums)} sums")
    return twin.run.forward(*args, **kwargs)


def _stock_of(module: Any) -> Any:
    """The class that torch.fx made for a model of ours."""
    return vars(behind(type(module)))[STOCK]


def _recompile(self: Any) -> Any:
    """What GraphModule.recompile does, which torch.fx also calls to pickle: it writes the new forward onto the module's
    class. That must be the model's own, or ours would be gone, and call itself."""
    now, ours = type(self), cast(Any, behind(type(self)))
    self.__class__ = _stock_of(self)
    try:
        code = self.recompile()
        ours.forward = in_place_of(type(self).forward, _forward)
        twin = _twin(self)  # the graph may be another
    finally:
        self.__class__ = now
    if twin is None:
        _twins.pop(self, None)
    else:
        _twins[self] = twin
    return code


def _twin(module: fx.GraphModule) -> _Twin | None:
    """The module with every sum over relations as one call, or None if there is none."""
    if any(node.op == "get_attr" for node in module.graph.nodes):
        return None  # a buffer may be replaced by another tensor; the twin would keep the old one
    graph, layers = fx.Graph(), dict(module.named_modules())
    graph.output(graph.graph_copy(module.graph, {}))
    sums: dict[str, Together] = {}
    for node in list(graph.nodes):
        leaves, mean = _addends(node)
        joined = [leaf for leaf in leaves if _summed(leaf, layers)]
        if len(joined) < 2:
            continue
        name = f"together_{len(sums)}"
        sums[name] = Together([layers[str(leaf.target)] for leaf in joined], len(leaves), mean)
        calls = tuple((leaf.args, leaf.kwargs) for leaf in joined)
        with graph.inserting_before(node):
            made = graph.create_node("call_module", name, (calls, tuple(x for x in leaves if x not in joined)))
        node.replace_all_uses_with(made)
    if not sums:
        return None
    places = _places(module, graph)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op != "output" and (_continues(node) or _summed(node, layers, users=0)):
            graph.erase_node(node)
    return _Twin(fx.GraphModule({**layers, **sums}, graph), places)


def _addends(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """What a node adds up, where it is the whole of a sum or the mean of one, and which; else nothing."""
    mean = node.op == "call_function" and node.target is torch.div and len(node.args) == 2
    root = node.args[0] if mean else node
    if not isinstance(root, fx.Node) or not _is_sum(root) or (not mean and any(map(_continues, node.users))):
        return [], mean
    leaves = _leaves(root)
    if mean and (node.args[1] != len(leaves) or len(root.users) > 1):
        return [], mean
    return leaves, mean


def _places(module: torch.nn.Module, graph: fx.Graph) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(owner, name, module) of every step on the way to a module the graph calls."""
    result: dict[tuple[int, str], tuple[torch.nn.Module, str, torch.nn.Module]] = {}
    for node in graph.nodes:
        owner: Any = module
        for name in str(node.target).split(".") if node.op == "call_module" else ():
            child = owner._modules.get(name)
            if child is None:
                break  # one of the sums
            result[id(owner), name] = (owner, name, child)
            owner = child
    return list(result.values())


def _is_sum(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.add and len(node.args) == 2 and not node.kwargs


def _continues(user: fx.Node) -> bool:
    """Whether a larger sum, or the mean made of it, is at work further on."""
    return _is_sum(user) or (user.op == "call_function" and user.target is torch.div)


def _leaves(node: fx.Node) -> list[fx.Node]:
    """What a tree of additions adds up; a partial sum that someone else reads is a leaf."""
    result: list[fx.Node] = []
    for part in node.args:
        assert isinstance(part, fx.Node)
        result += _leaves(part) if _is_sum(part) and len(part.users) == 1 else [part]
    return result


def _summed(leaf: fx.Node, layers: dict[str, torch.nn.Module], users: int = 1) -> bool:
    """Whether a node is a layer that is a sum of products, read by its sum alone."""
    layer = layers.get(str(leaf.target)) if leaf.op == "call_module" else None
    return layer is not None and len(leaf.users) == users and relations.known(layer) is not None
