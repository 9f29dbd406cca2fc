"""Whether a layer, or what stands inside it, does more than its class says: someone watches it, or has changed it."""

from __future__ import annotations

import operator
import types
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch_geometric.nn import aggr as stock_aggr

from stretto.layers.layer import Conv, is_stock, stock_of
from stretto.ops.batched import transformed

# What a fast function does in place of. PyG writes some of them itself, from templates.
METHODS = ("message", "aggregate", "update", "propagate", "edge_update", "message_and_aggregate")
LIBRARIES = ("torch.", "torch_geometric.", "stretto.")
MISMATCH = "results differed from stock in shadow mode"

# The types of a weight that a module multiplies with and nothing else: a class derived from Tensor (quantised values,
# an adapter) computes by itself.
_PLAIN = (type(None), torch.nn.Parameter, Tensor, torch.nn.parameter.UninitializedParameter)


def hooked(*modules: Any) -> bool:
    """Whether someone watches a module's calls, or has put another forward on it or on its class (torch's or PyG's), or
    a weight that is no parameter (another network's result) or computes by itself."""
    return any(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        or "forward" in m.__dict__
        or "weight" in m.__dict__
        or "bias" in m.__dict__
        or type(m._parameters.get("weight")) not in _PLAIN
        or replaced_forward(type(m))
        for m in modules
    )


_EVERYWHERE = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def watched_everywhere() -> bool:
    """Whether someone watches the calls of all modules, those inside a layer too. Not we, who follow what runs."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("stretto.")
        for hooks in _EVERYWHERE
        if hooks
        for hook in hooks.values()
    )


class _Looked:
    """The methods of a class of PyG as they were last, and which of them is not PyG's any more."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.names = tuple(name for name in ("forward", *METHODS) if hasattr(kind, name))
        self.read = operator.attrgetter(*self.names)
        self.last: Any = None
        self.replaced = ""

    def now(self) -> str:
        found = self.read(self.kind)
        if found != self.last:
            self.last = found
            self.replaced = next((name for name in self.names if not _of_library(getattr(self.kind, name))), "")
        return self.replaced


_looked: WeakKeyDictionary[type, _Looked] = WeakKeyDictionary()


def replaced(kind: type) -> str:
    """The name of a method that someone has put onto the class of PyG that a layer is of, or derived from; else ""."""
    found = _looked.get(kind)
    if found is None:
        stock = next((base for base in kind.__mro__ if base.__module__.startswith("torch_geometric.")), kind)
        found = _looked[kind] = _Looked(stock)
    return found.now()


def replaced_forward(kind: Any) -> bool:
    """Whether someone has put another forward onto a class of torch or PyG."""
    stock: Any = stock_of(kind) or kind
    return stock.__module__.startswith(LIBRARIES) and not _of_library(stock.forward)


def _of_library(method: Any) -> bool:
    """Whether a method is PyG's or torch's, or ours in its place: a user's may have its name and module, but has other
    globals."""
    return isinstance(method, types.FunctionType) and method.__globals__.get("__name__", "").startswith(LIBRARIES)


# PyG's per-instance hooks: any of them means that someone looks at the messages, so they must exist.
_HOOKS = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "_aggregate_forward_pre_hooks",
    "_aggregate_forward_hooks",
    "_message_and_aggregate_forward_pre_hooks",
    "_message_and_aggregate_forward_hooks",
    "_edge_update_forward_pre_hooks",
    "_edge_update_forward_hooks",
)


def why_stock(conv: Conv, *, aggregates_itself: bool = False) -> str | None:
    """Why a layer must run as stock whatever its input, or None. aggregates_itself: the caller reads aggr_module."""
    state = conv.__dict__
    if state.get("_explain"):
        return "an explainer is on"
    for name in _HOOKS:
        if state.get(name):
            return f"a hook is registered ({name.strip('_')})"
    if state.get("_decomposed_layers", 1) > 1:
        return "decomposed_layers > 1"
    for name in METHODS:
        if name in state and not _left_by_explainer(conv, state[name]):
            return f"{name}() was replaced on the instance"
    name = replaced(type(conv))
    if name:
        return f"{name}() was replaced on the class"
    if state.get("_stretto_mismatch"):
        return MISMATCH
    if state.get("node_dim", -2) not in (-2, 0):
        return f"node_dim is {state['node_dim']}"
    return _why_surroundings() or (None if aggregates_itself else _why_aggregation(conv))


def _why_surroundings() -> str | None:
    """Why no layer may run fast now, or None."""
    if watched_everywhere():
        return "a hook on all modules is registered"
    if torch.jit.is_tracing():
        return "TorchScript tracing"
    if transformed():
        return "inside a transform of torch.func, or of forward-mode differentiation"
    return None


# The class of the aggr_module that PyG gives to a layer with this `aggr`.
AGGR_MODULES = {
    "add": stock_aggr.SumAggregation,
    "sum": stock_aggr.SumAggregation,
    "mean": stock_aggr.MeanAggregation,
    "max": stock_aggr.MaxAggregation,
    "min": stock_aggr.MinAggregation,
}


def _why_aggregation(conv: Conv) -> str | None:
    """Why a layer's aggregation is another than its `aggr` says, or None."""
    module = conv._modules.get("aggr_module")
    if module is None:
        return None
    aggr = conv.aggr
    wanted = AGGR_MODULES.get(aggr) if type(aggr) is str else None
    if wanted is not None and not is_stock(module, wanted):
        return f"aggr is {aggr}, but aggr_module was replaced by a {type(module).__name__}"
    if hooked(module):
        return "a hook is registered on aggr_module, or its forward was replaced"
    return None


def _left_by_explainer(conv: Conv, method: Any) -> bool:
    """Whether an attribute is the class's own method, put on the instance when PyG switched an explainer off."""
    classes = [vars(kind) for kind in type(conv).__mro__]
    own = [found.get(name) for found in classes for name in ("_jinja_propagate", "_jinja_edge_updater")]
    return getattr(method, "__func__", None) in [f for f in own if f is not None]
