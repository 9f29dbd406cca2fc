"""What every accelerated layer shares: the guards, the fall-back to stock, and the record of what happened.

A layer is accelerated by a function fast(conv, *args, **kwargs) that computes what conv.forward would, or raises
Decline before it has changed anything; stock then runs, and report() says why.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr as stock_aggr
from torch_geometric.nn.dense import Linear

from stretto import settings
from stretto.compile import Order, Plan
from stretto.errors import fail
from stretto.kernels import DTYPES, has_own_memory
from stretto.kernels.looks import note_trained
from stretto.layers.declines import Decline as Decline  # layers ask base for these
from stretto.layers.declines import Quiet as Quiet
from stretto.layers.declines import Small as Small
from stretto.layers.declines import same_type, why_unusual
from stretto.layers.own_class import METHODS, replaced
from stretto.layers.watched import hooked, watched_everywhere
from stretto.ops import advice
from stretto.ops.autograd_state import again_in_backward, saved_elsewhere
from stretto.ops.batched import transformed

logger = logging.getLogger("stretto")


@dataclass
class Record:
    """What a layer did last: path "fast", "stock" or "compiled", the plan and its signature, or the reason."""

    path: str = ""
    reason: str = ""
    plan: str = ""
    key: Hashable = None
    calls: int = 0
    avoided: int = 0  # bytes of messages that stock would have built; where the chooser knows, it tells
    begun: bool = False  # by a lazy layer's first call, which may be run again in backward (torch.utils.checkpoint)
    strict: str = ""  # the layer's name in the model that accelerate(strict=True) was asked for; "": it may fall back


_records: weakref.WeakKeyDictionary[torch.nn.Module, Record] = weakref.WeakKeyDictionary()
_said: set[str] = set()


def record_of(module: torch.nn.Module) -> Record:
    """The record of a layer; kept beside it, never inside it."""
    found = _records.get(module)
    if found is None:
        found = _records[module] = Record()
    return found


def strict_of(module: torch.nn.Module) -> str:
    """The layer's name in its model where a call that would run as stock raises, else ""."""
    found = _records.get(module)
    return "" if found is None else found.strict


def set_strict(module: torch.nn.Module, name: str) -> None:
    """From now on a call that would run as stock raises, with this name; "": it does not."""
    if strict_of(module) != name:
        record_of(module).strict = name


def refuse(conv: Any, record: Record, reason: str) -> None:
    """Raise where accelerate(strict=True) was promised that this layer would not run as stock."""
    if is_lazy(conv):
        return  # its first call gives a lazy layer its shape, and only stock's can
    fail(
        f"layer {record.strict!r} ({type(conv).__name__}): strict=True, but this call would run as stock: {reason}. "
        "accelerate(model) without strict allows it from now on"
    )


def is_lazy(conv: Any) -> bool:
    """Whether a layer has yet to learn its channels from its first input."""
    return any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in conv.parameters())


def note_plan(module: torch.nn.Module) -> Callable[[Hashable, Plan], None]:
    """What compile.linear calls with its choice."""
    record = record_of(module)

    def note(key: Hashable, plan: Plan) -> None:
        record.key, record.plan = key, plan.name

    return note


def note_fixed(module: torch.nn.Module, plan: str) -> None:
    """What a layer does where there is nothing to choose."""
    record = record_of(module)
    record.key, record.plan = None, plan


def note_attention(module: torch.nn.Module, plan: str, num_edges: int, columns: int, x: Tensor) -> None:
    """What a layer without a choice of plans does, and the messages [edges, columns] it does not build."""
    record = record_of(module)
    record.plan, record.avoided = plan, num_edges * columns * x.element_size()


def note_order(module: torch.nn.Module, order: Order, key: Hashable) -> None:
    """The order of evaluation chosen for a layer that has several, and what the decision is kept under."""
    record = record_of(module)
    record.key, record.plan = key, order.name


Fast = Callable[..., Any]
_plain = threading.local()


def stock_wanted() -> bool:
    """Whether this thread is computing what stock computes, to compare with: then nothing of ours may run inside."""
    return getattr(_plain, "on", False)


def accelerated_forward(stock: type, fast: Fast, stock_forward: Any = None) -> Callable[..., Any]:
    """A forward that runs fast(self, ...) where it may, elsewhere stock's own: the one given, or what it is by then."""
    from stretto.layers import adjacency, bound, inside_compile, shadow  # they import this module

    name, like = stock.__name__, stock.forward  # type: ignore[attr-defined]

    def by_then(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    stock_forward = stock_forward or by_then

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            inside_compile.note(self)
            return stock_forward(self, *args, **kwargs)
        if stock_wanted():
            return stock_forward(self, *args, **kwargs)
        out = bound.step(self, args, kwargs, usual)
        if out is not bound.MISS:
            return out
        return usual(self, *args, **kwargs)

    def usual(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = record_of(self)
        record.calls += 1
        for given in (*args, *kwargs.values()):
            if given.__class__ is Tensor and given.requires_grad:
                note_trained(given)  # also where this call keeps nothing of it
        least = adjacency.SMALL.get(name, 0)  # the first thing looked at: where it decides, the rest costs too much
        if least and len(args) > 1 and few_on_device(args[1], min(least, adjacency.PASSING)):
            if record.reason != SMALL:
                _tell(self, record, SMALL)
            return all_stock(stock_forward, self, args, kwargs)
        reason = why_stock(self) or why_unusual(args, kwargs)
        if record.begun and reason is None:
            record.begun = again_in_backward()
            reason = LAZY if record.begun else None
        if reason is None:
            off = settings.get("STRETTO_SHADOW") == "0"
            watch = None if off else shadow.watch(self, record, args, kwargs, record.calls)
            try:
                out = owned(fast(self, *args, **kwargs))
            except Quiet:
                return stock_forward(self, *args, **kwargs)
            except Small as decline:
                _tell(self, record, decline.reason)
                return all_stock(stock_forward, self, args, kwargs)
            except Decline as decline:
                reason = decline.reason
            except torch.OutOfMemoryError as error:
                advice.add(error, type(self).__name__, rows_of(args))
                raise
            else:
                record.path, record.reason = "fast", ""
                if off:
                    bound.meet(self, args, record)
                return out if watch is None else watch.judged(out, fast, stock_forward)
        _tell(self, record, reason)
        record.begun = record.begun or (saved_elsewhere() and is_lazy(self))
        if record.strict and not record.begun:
            refuse(self, record, reason)
        return stock_forward(self, *args, **kwargs)

    return in_place_of(like, run)


LAZY = "not initialised yet (lazy channels)"
SMALL = "a small graph: stock's few launches cost a GPU's host less than ours"


def few_on_device(edges: Any, least: int) -> bool:
    """Whether a plain edge_index on a GPU has fewer than `least` edges."""
    return (
        type(edges) is Tensor
        and has_own_memory(edges.device)
        and edges.layout == torch.strided
        and edges.dim() == 2
        and edges.size(1) < least
    )


def all_stock(stock_forward: Any, conv: Any, args: Any, kwargs: Any) -> Any:
    """Stock's own forward, with nothing of ours inside."""
    before, _plain.on = stock_wanted(), True
    try:
        return stock_forward(conv, *args, **kwargs)
    finally:
        _plain.on = before


def rows_of(args: tuple[Any, ...]) -> Tensor | None:
    """The features among a layer's arguments."""
    return next((t for t in args if isinstance(t, Tensor) and t.is_floating_point()), None)


def owned(out: Any) -> Any:
    """out, as a tensor that may be edited in place (elu_): torch forbids it to views of what our functions return."""
    if isinstance(out, Tensor) and out.requires_grad and out._is_view():
        return out.clone()
    return out


def in_place_of(stock_forward: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls run, and that TorchScript reads as stock's forward: its source, among its own globals."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    made = types.FunctionType(forward.__code__, stock_forward.__globals__, closure=forward.__closure__)
    return functools.wraps(stock_forward)(made)


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


def why_stock(conv: Any, *, aggregates_itself: bool = False) -> str | None:
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
    if watched_everywhere():
        return "a hook on all modules is registered"
    if state.get("_stretto_mismatch"):
        return "results differed from stock in shadow mode"
    if torch.jit.is_tracing():
        return "TorchScript tracing"
    if transformed():
        return "inside a transform of torch.func, or of forward-mode differentiation"
    if state.get("node_dim", -2) not in (-2, 0):
        return f"node_dim is {state['node_dim']}"
    return None if aggregates_itself else _why_aggregation(conv)


# The class of the aggr_module that PyG gives to a layer with this `aggr`.
AGGR_MODULES = {
    "add": stock_aggr.SumAggregation,
    "sum": stock_aggr.SumAggregation,
    "mean": stock_aggr.MeanAggregation,
    "max": stock_aggr.MaxAggregation,
    "min": stock_aggr.MinAggregation,
}


def _why_aggregation(conv: Any) -> str | None:
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


def is_stock(module: Any, kind: type) -> bool:
    """Whether a module is exactly of a stock class, accelerated or not: not of a user's class derived from it."""
    found = type(module)
    return found is kind or (found.__module__ == "stretto.layers.classes" and found.__base__ is kind)


def _left_by_explainer(conv: Any, method: Any) -> bool:
    """Whether an attribute is the class's own method, put on the instance when PyG switched an explainer off."""
    classes = [vars(kind) for kind in type(conv).__mro__]
    own = [found.get(name) for found in classes for name in ("_jinja_propagate", "_jinja_edge_updater")]
    return getattr(method, "__func__", None) in [f for f in own if f is not None]


def check_input(x: Any, *others: Any) -> Tensor:
    """x as a plain matrix of nodes by channels, or Decline."""
    for tensor in (x, *others):
        if not isinstance(tensor, Tensor):
            raise Decline(f"the input is a {type(tensor).__name__}")
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            raise Decline(f"the input is a {type(tensor).__name__}, not a plain tensor")
        if tensor.layout != torch.strided:
            raise Decline("the input is a sparse matrix")
        if tensor.dim() != 2:
            raise Decline(f"the input has {tensor.dim()} dimensions")
        if tensor.dtype not in DTYPES:
            raise Decline(f"the input is {tensor.dtype}")
    return x


LINEAR = (torch.nn.Linear, Linear)  # exactly these: a class derived from one may compute anything


def weight_of(linear: Any, x: Tensor, *, bias: bool = False) -> Tensor:
    """The weight [out, in] of a Linear that does nothing but multiply, or Decline. bias: the caller adds its bias."""
    if type(linear) not in LINEAR:
        raise Decline(f"the weight is a {type(linear).__name__}")
    weight: Tensor = linear.weight
    if isinstance(weight, torch.nn.parameter.UninitializedParameter):
        raise Decline(LAZY)
    if hooked(linear):
        raise Decline("a hook is registered on the Linear inside, or its forward was replaced")
    if not bias and linear.bias is not None:
        raise Decline("the Linear inside has a bias, unlike the one PyG puts there")
    same_type(x, weight)
    if bias and linear.bias is not None:
        same_type(x, linear.bias)
        if linear.bias.shape != weight.shape[:1]:
            raise Decline("the Linear's bias does not fit its weight")
    if weight.size(1) != x.size(1):
        raise Decline(f"the weight takes {weight.size(1)} channels, the input has {x.size(1)}")
    return weight


def note_path(conv: Any, reason: str | None) -> Record:
    """Write down that a layer ran fast, or why not."""
    record = record_of(conv)
    record.calls += 1
    if reason is None:
        record.path, record.reason = "fast", ""
    else:
        _tell(conv, record, reason)
        if record.strict:
            refuse(conv, record, reason)
    return record


def _tell(conv: Any, record: Record, reason: str) -> None:
    record.path, record.reason, record.plan, record.key, record.avoided = "stock", reason, "", None, 0
    if not said(conv, reason):
        logger.info("stretto: %s runs as stock: %s", type(conv).__name__, reason)


def said(conv: Any, reason: str) -> bool:
    """Whether this reason of such a layer was told before; from now on it was."""
    text = f"{type(conv).__name__}: {reason}"
    before = text in _said
    _said.add(text)
    return before
