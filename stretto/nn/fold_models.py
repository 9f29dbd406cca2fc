"""A user's own model and PyG's Sequential in inference: a BatchNorm or Linear that follows a layer is folded into it.

accelerate() gives such a model a class of its own whose __call__ looks, in eval mode without gradients, at a trace of
its forward (nn/forward_trace.py). The forward itself runs as it is written, with something that stands for self: of it
the layer gives the result of all that is folded into it, and what was folded gives its input back. It is the very
tensor that it must be given; should it be another, the call is made again, with nothing folded.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch_geometric.data import Data

from stretto import settings
from stretto.nn import folds, models, relations, shadow
from stretto.nn.base import LINEAR, hooked, is_stock, record_of, stock_wanted
from stretto.nn.forward_trace import LAYERS, NORMS, Chain, InOrder, InTurn, Modules, Trace, is_plain, traced
from stretto.ops.batched import transformed

NOT_HERE = "it is small, or in this call it is no sum of products that takes what follows"
TRACES = 16  # of one model: one whose constants change all the time is not worth more
LEFT = ("torch.", "torch_geometric.", "stretto.")  # packages whose classes keep their __call__
OWN = (
    *("__call__", "__getattr__", "__getattribute__", "__init_subclass__", "__slots__"),
    *("__reduce__", "__reduce_ex__", "__deepcopy__", "__getstate__", "__class_getitem__"),
    *("__setattr__", "__eq__", "__hash__", "__getnewargs__", "__getnewargs_ex__"),
)


@dataclass
class _Known:
    """What is known of a model: at most how many channels its layers have, and its traces by what they depend on."""

    widest: int
    traces: dict[Any, Trace | str] = field(default_factory=dict)
    made: int = 0


_known: WeakKeyDictionary[torch.nn.Module, _Known] = WeakKeyDictionary()
_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


class Broken(Exception):
    """A forward did something else than its trace: what it has computed is thrown away."""


# ---- classes ----


def fast_class(module: Any) -> type | None:
    """The class that accelerate() gives to a model, or None where no layer in it can be followed by what folds."""
    if not _takes(type(module)):
        return None
    held = list(_held(module))
    layers = any(is_stock(m, kind) for m in held for kind in LAYERS)
    return _class_of(type(module)) if layers and any(type(m) in (*NORMS, *LINEAR) for m in held) else None


def _takes(kind: Any) -> bool:
    if kind is pyg.Sequential:
        return True
    if kind.__module__.startswith(LEFT) or kind.__module__ == "torch" or type(kind) not in (type, abc.ABCMeta):
        return False
    if issubclass(kind, (pyg.MessagePassing, torch.fx.GraphModule, torch.jit.ScriptModule)):
        return False
    bases = kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
    return not any(name in vars(base) for base in bases for name in OWN) and not any(map(_asks_type, bases))


def _asks_type(kind: type) -> bool:
    """Whether a method of a class reads type() or __class__: it may ask for its very class, and ours is another."""
    codes = [value.__code__ for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    return any(name in code.co_names for code in codes for name in ("type", "__class__"))


def _held(module: Any) -> Iterator[Any]:
    """The modules of a model, and those in its lists and sequences."""
    for inner in module._modules.values():
        if type(inner) in (torch.nn.ModuleList, torch.nn.Sequential):
            yield from _held(inner)
        elif inner is not None:
            yield inner


def is_container(kind: type) -> bool:
    """Whether a class is one that fast_class() has made."""
    return "_stretto_folds" in kind.__dict__


def _class_of(kind: Any) -> type:
    if kind not in _classes:
        body = {
            "__call__": call,
            "_stretto_stock": kind,
            "_stretto_folds": True,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "__reduce_ex__": _reduce,
        }
        _classes[kind] = type(kind)(kind.__name__, (kind,), body)
    return _classes[kind]


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickled and copied as the user's class, and made ours again when it has its state."""
    reduced: Any = object.__reduce_ex__(self, 2)
    return _rebuilt, (type(self).__dict__["_stretto_stock"],), *reduced[2:]


def _rebuilt(kind: Any) -> Any:
    made: Any = type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, "__setstate__": _awake})
    return made.__new__(made)


def _awake(self: Any, state: Any) -> None:
    kind: Any = type(self).__base__
    self.__class__ = kind
    self.__setstate__(state)
    self.__class__ = _class_of(kind)


def install() -> None:
    """Every torch_geometric.nn.Sequential folds, made before or after. Undone by remove()."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (call if type(self) is pyg.Sequential else _plain_call)(self, *args, **kwargs)

    pyg.Sequential.__call__ = run  # type: ignore[method-assign]


def remove() -> None:
    """Put PyG's Sequential back as it was."""
    if "__call__" in vars(pyg.Sequential):
        del pyg.Sequential.__call__


# ---- calls ----


def _plain_call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own call, looked up now: torch.fx and others put theirs there while they trace."""
    return torch.nn.Module.__call__(model, *args, **kwargs)


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What self(*args, **kwargs) gives; in inference with what follows a layer folded into it."""
    if torch.compiler.is_compiling() or self.training or torch.is_grad_enabled() or torch.jit.is_tracing():
        return _plain_call(self, *args, **kwargs)
    rows = _rows((*args, *kwargs.values()))
    if rows is None or rows * _known_of(self).widest < folds.LEAST or _why_plain(self):
        return _plain_call(self, *args, **kwargs)
    function = _forward_of(self)
    trace = "" if function is None else _trace_of(self, function, args, kwargs)
    chains, told = ([], _all_layers(self, trace)) if isinstance(trace, str) else _ready(trace)
    if isinstance(trace, str) or not chains:
        out = _plain_call(self, *args, **kwargs)
    else:
        record = record_of(self)
        record.calls += 1
        off = settings.get("STRETTO_SHADOW") == "0"
        watch = None if off else shadow.watch(self, record, args, kwargs, record.calls)

        def folded(model: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(model, function, trace, [_Fold(chain) for chain in chains], args, kwargs)

        folding = [_Fold(chain) for chain in chains]
        try:
            out = _run(self, function, trace, folding, args, kwargs)
        except Broken as error:
            known = _known_of(self)
            known.traces = dict.fromkeys(known.traces, str(error))
            torch.set_grad_enabled(False)  # as it was when the call began
            return _plain_call(self, *args, **kwargs)
        out = out if watch is None else watch.judged(out, folded, _stock)
        told += [(fold.chain.layer, NOT_HERE) for fold in folding if not fold.done]
    for layer, reason in told:
        record = record_of(layer)
        if reason and record.path == "fast" and "folded" not in record.plan:
            record.plan += f"; not folded: {reason}"
    return out


def _stock(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.forward(*args, **kwargs)


def _rows(values: Any) -> int | None:
    """Rows of the largest matrix of features among a model's arguments, or None: there is none."""
    found = [value.x if isinstance(value, Data) else value for value in values]
    return max((t.size(0) for t in found if type(t) is Tensor and t.is_floating_point() and t.dim() == 2), default=None)


def _why_plain(model: Any) -> bool:
    """Whether someone watches the model's calls, or it is called in a way of which a trace says nothing."""
    return bool(
        model._compiled_call_impl is not None
        or stock_wanted()
        or model.__dict__.get("_stretto_mismatch")
        or model._forward_hooks
        or model._forward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
        or transformed()
    )


def _forward_of(model: Any) -> Any:
    """The function that a model's forward is; PyG writes one for each Sequential. None: the user has put one there."""
    own = model.__dict__.get("forward")
    if own is not None:
        written = isinstance(model, pyg.Sequential) and isinstance(own, types.MethodType) and own.__self__ is model
        return own.__func__ if written else None
    function = type(model).forward
    if getattr(function, "__module__", "") != pyg.Sequential.__module__:
        return function
    children = tuple((child.name, tuple(child.param_names), tuple(child.return_names)) for child in model._children)
    return InOrder(tuple(model.signature.param_dict), children)  # where PyG could not write one, as it loops over them


def _known_of(model: Any) -> _Known:
    found = _known.get(model)
    if found is None:
        layers = [m for m in _held(model) if any(is_stock(m, kind) for kind in LAYERS)]
        parameters = [p for layer in layers for p in layer.parameters()]
        if any(isinstance(p, UninitializedParameter) for p in parameters):
            return _Known(0)  # lazy layers, before their first call
        found = _known[model] = _Known(max((max(p.shape, default=0) for p in parameters), default=0))
    return found


def _trace_of(model: Any, function: Any, args: Any, kwargs: Any) -> Trace | str:
    known = _known_of(model)
    key = (function, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
    found = known.traces.get(key)
    if isinstance(found, str) or (found is not None and found.stands(model)):
        return found
    if known.made >= TRACES:
        return "the model is called in too many ways, or its constants change too often"
    known.made += 1
    found = known.traces[key] = traced(model, function, args, kwargs)
    return found


def _kind(value: Any) -> Any:
    """What of an argument a trace depends on: constants alone."""
    return (type(value), value) if is_plain(value) else Tensor


def _all_layers(model: Any, reason: str) -> list[tuple[Any, str]]:
    return [(m, reason) for m in _held(model) if any(is_stock(m, kind) for kind in LAYERS)]


def _ready(trace: Trace) -> tuple[list[Chain], list[tuple[Any, str]]]:
    """The chains that can be folded as their modules are now, and (layer, why not) of the others."""
    found, told = [], list(trace.refused)
    for chain in trace.chains:
        if chain.norm is not None and not folds.fixed_norm(chain.norm):
            told.append((chain.layer, "the BatchNorm has no fixed statistics, or someone watches it"))
            continue
        linear = chain.linear if chain.linear is not None and _narrows(chain.linear) else None
        if chain.norm is None and linear is None:
            told.append((chain.layer, "the Linear makes it wider, or someone watches it"))
            continue
        found.append(Chain(chain.layer, chain.norm, linear))
    return found, told


def _narrows(linear: Any) -> bool:
    plain = type(linear) in LINEAR and not hooked(linear) and not isinstance(linear.weight, UninitializedParameter)
    return plain and linear.weight.size(0) <= linear.weight.size(1)


# ---- a forward with its chains folded ----


class _Fold:
    """A layer with what follows it: the result of all of them where that can be, else its own."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.done = False  # whether anything was folded
        self.out: Tensor | None = None  # let go with the last of the modules: the forward may have no more use for it
        self.left: list[Any] = []  # the modules that are folded in and have not been called yet

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.out, self.left = _evaluated(self.chain, args, kwargs)
        self.done = self.out is not None
        return self.out if self.done else self.chain.layer(*args, **kwargs)


class _Passed:
    """A module that a layer before it may have done the work of."""

    def __init__(self, module: Any, fold: _Fold) -> None:
        self.module, self.fold = module, fold

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(module is self.module for module in self.fold.left):
            return self.module(*args, **kwargs)
        given = not kwargs and len(args) == 1 and args[0] is self.fold.out
        if not given or self.fold.left[0] is not self.module or torch.is_grad_enabled():
            raise Broken("the model's forward did something else than its trace")
        self.fold.left.pop(0)
        if not self.fold.left:
            self.fold.out = None
        return args[0]


class _StandIn:
    """What a forward is given for self: it finds there all that the model has, some of it as it is to be called."""

    __slots__ = ("told",)

    def __init__(self, *told: Any) -> None:
        object.__setattr__(self, "told", told)

    def __getattribute__(self, name: str) -> Any:
        model, given, methods = object.__getattribute__(self, "told")
        if name in given:
            return given[name]
        return types.MethodType(methods[name], self) if name in methods else getattr(model, name)


def _run(model: Any, function: Any, trace: Any, folding: list[_Fold], args: Any, kwargs: Any) -> Any:
    """function(model, *args, **kwargs) with its chains folded, or Broken."""
    roles: dict[int, Any] = {id(fold.chain.layer): fold for fold in folding}
    roles.update((id(module), _Passed(module, fold)) for fold in folding for module in fold.chain.after)
    names = {name for where, name, _ in trace.constants if where == "_modules"}
    given = {name: _with(roles, model._modules[name]) for name in names}
    out = function(_StandIn(model, given, trace.methods), *args, **kwargs)
    if any(fold.left for fold in folding) or not trace.stands(model):  # what it decides by may change on the way
        raise Broken("the model's forward did something else than its trace")
    return out


def _with(roles: dict[int, Any], module: Any) -> Any:
    """A module as the forward finds it; lists and sequences as the trace has seen them."""
    if type(module) not in (torch.nn.ModuleList, torch.nn.Sequential) or hooked(module):
        return roles.get(id(module), module)
    kind = Modules if type(module) is torch.nn.ModuleList else InTurn
    return kind(_with(roles, inner) for inner in module._modules.values())


def _evaluated(chain: Chain, args: Any, kwargs: Any) -> tuple[Tensor | None, list[Any]]:
    """The result of a layer with what follows it folded in, and the modules that were; (None, []): it cannot be."""
    of = relations.summands(chain.layer, args, kwargs)
    if of is None:
        return _attended(chain, args, kwargs)
    width = of.weight.size(0)
    norm, linear = chain.norm, chain.linear
    if not folds.pays(of.adj.graph.num_rows, width) or (norm is not None and not folds.fits(norm, width, of.x)):
        return None, []
    if linear is not None and (linear.weight.size(1) != width or linear.weight.dtype != of.x.dtype):
        linear = None
    if norm is None and linear is None:
        return None, []
    return models.evaluated(chain.layer, of, norm, linear), Chain(chain.layer, norm, linear).after


def _attended(chain: Chain, args: Any, kwargs: Any) -> tuple[Tensor | None, list[Any]]:
    """The same of a GATConv."""
    conv, norm = chain.layer, chain.norm
    if norm is None or not is_stock(conv, pyg.GATConv) or len(args) != 2 or kwargs or type(args[0]) is not Tensor:
        return None, []
    x, edge_index = args
    width = conv.out_channels * (conv.heads if conv.concat else 1)
    if torch.is_autocast_enabled(x.device.type) or not folds.pays(x.size(0), width) or not folds.fits(norm, width, x):
        return None, []
    out = models.attended_of(conv, norm, x, edge_index)
    return out, [] if out is None else [norm]
