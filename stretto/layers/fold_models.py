"""A user's own model and PyG's Sequential in inference: a BatchNorm or Linear that follows a layer is folded into it.

accelerate() gives such a model a class of its own whose __call__ looks, in eval mode without gradients, at a trace of
its forward (layers/forward_trace.py), and where that finds something to fold runs it so (layers/fold_run.py).
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
from stretto.layers import folds, shadow
from stretto.layers.base import LINEAR, hooked, is_stock, record_of, stock_wanted
from stretto.layers.fold_run import DIFFERENT, Fold, run
from stretto.layers.forward_trace import ABSENT, LAYERS, NORMS, Chain, InOrder, Trace, is_plain, traced
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
    if "_stretto_stock" not in vars(type(self)):  # torch has derived it from ours, and pickles it or not
        return object.__reduce_ex__(self, protocol)
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
            return run(model, function, trace, [Fold(chain) for chain in chains], args, kwargs)

        folding, random = [Fold(chain) for chain in chains], torch.get_rng_state()
        try:
            out = run(self, function, trace, folding, args, kwargs)
        except Exception:  # Broken, what the forward made of it, or an error of its own, which it then raises again
            out = ABSENT
        if out is ABSENT:
            torch.set_grad_enabled(False)  # as they were when the call began
            torch.set_rng_state(random)
            out = _plain_call(self, *args, **kwargs)
            known = _known_of(self)
            known.traces = dict.fromkeys(known.traces, DIFFERENT)
            told = _all_layers(self, DIFFERENT)
        else:
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
    """What of an argument a trace depends on: constants alone, as they read (0.0 is no -0.0, (1,) is no (True,))."""
    return (type(value), repr(value)) if is_plain(value) else Tensor


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
