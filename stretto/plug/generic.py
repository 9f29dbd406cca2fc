"""Any other MessagePassing layer, a user's own included: where its message() is x_j or w * x_j, propagate() is one
sparse product; where it is a network of both ends, the network's first Linear acts on nodes (propagate.py). Its
forward and its update() stay its own; what cannot be traced stays stock, its aggregation over the cached index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from stretto import settings
from stretto.layers.base import Decline, note_fast, record_of
from stretto.layers.edges import propagate, tracing
from stretto.layers.edges.product import product, reduction
from stretto.layers.layer import STOCK, Conv, stock_of
from stretto.layers.watched import why_stock
from stretto.plug import inside_compile, shadow
from stretto.plug.own_class import behind, templates_of
from stretto.plug.stock import in_place_of, owned, stock_wanted
from stretto.plug.told import note_stock

OWN = ("__reduce__", "__reduce_ex__", "__deepcopy__", "__getstate__", "__class_getitem__")


def why_not(kind: type) -> str | None:
    """Why no layer of this class can run as a product, or None."""
    if not isinstance(kind, type) or not issubclass(kind, MessagePassing):
        return "not a MessagePassing layer"
    made = _own_propagate(kind)
    if (
        made is None
        or made is not kind.__dict__.get("_jinja_propagate")
        or not made.__module__.startswith(_prefix(kind))
    ):
        return "propagate() is its own"
    if kind.aggregate is not MessagePassing.aggregate:
        return "aggregate() is its own"
    if any(name in base.__dict__ for base in kind.__mro__[: kind.__mro__.index(MessagePassing)] for name in OWN):
        return "it is copied or pickled in its own way"
    reason = tracing.impure(kind.message)
    if reason is None:
        return None
    detail = propagate.why_not(kind.message)
    return None if detail is None else f"{reason}: {detail}"


def stock_edge_update(kind: type) -> str:
    """What report() says of a class that computes on edges before it propagates; empty: it does not."""
    own = getattr(kind, "edge_update", MessagePassing.edge_update) is not MessagePassing.edge_update
    return "edge_updater() runs as stock: edge_update() is its own" if own else ""


def _own_propagate(kind: type) -> Any:
    """The propagate() of a class as it is without install(), or None where it inherits one."""
    result = kind.__dict__.get("propagate")
    stock, ours = _patched.get(kind, (None, None))
    return result if ours is None or result is not ours else stock


def _prefix(kind: type) -> str:
    return f"{kind.__module__}_{kind.__name__}"


def fast_propagate(kind: type) -> Callable[..., Any]:
    """A propagate() for exactly this class (and the one accelerate() makes of it): fast where it may, else stock."""
    stock_propagate, layer = _own_propagate(kind), cast(type[MessagePassing], kind)
    compute = functools.partial(_computed, product if tracing.impure(layer.message) is None else _network)

    def run(self: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        own = behind(type(self))
        if torch.compiler.is_compiling():
            inside_compile.note(self)
            return stock_propagate(self, edge_index, *args, **kwargs)
        if args or (own is not kind and stock_of(own) is not kind) or stock_wanted():
            return stock_propagate(self, edge_index, *args, **kwargs)
        reason = why_stock(self, aggregates_itself=True)
        if reason is None and layer.aggregate is not MessagePassing.aggregate:
            reason = "aggregate() is its own"
        if reason is None:
            try:
                return _watched(compute, stock_propagate, self, edge_index, kwargs)
            except Decline as decline:
                reason = decline.reason
        note_stock(self, reason)
        return stock_propagate(self, edge_index, **kwargs)

    return in_place_of(stock_propagate, run)


def _computed(summed: Callable[..., Tensor], conv: Conv, edge_index: Any, /, **inputs: Any) -> Any:
    """What conv.propagate(edge_index, **given) computes, its messages summed by a function of ours."""
    wanted = _update_arguments(conv, inputs)
    out = summed(conv, edge_index, inputs)
    return out if wanted is None else conv.update(owned(out), **wanted)


def _watched(compute: Callable[..., Any], stock: Callable[..., Any], conv: Conv, edge_index: Any, kwargs: Any) -> Any:
    """The result of a fast call, beside stock's where STRETTO_SHADOW wants that."""
    watch = None
    if settings.get("STRETTO_SHADOW") != "0":
        record = record_of(conv)
        watch = shadow.watch(conv, record, (edge_index,), kwargs, record.calls + 1)
    out = owned(compute(conv, edge_index, **kwargs))
    note_fast(conv)
    return out if watch is None else watch.judged(out, compute, stock)


def _update_arguments(conv: Conv, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """What update() takes besides the aggregated messages, or Decline; None: it is PyG's own, which does nothing."""
    if type(conv).update is MessagePassing.update:
        return None
    names = conv.inspector.get_param_names("update")
    if any(n not in inputs or n in tracing.SPECIAL or n.endswith(("_i", "_j")) for n in names):
        raise Decline("update() takes special arguments or defaults")
    return {name: inputs[name] for name in names}


def _network(conv: Conv, edge_index: Any, inputs: dict[str, Any]) -> Tensor:
    """What conv.propagate(edge_index, **given) computes where message() calls a network of conv, or Decline."""
    return propagate.propagated(conv, edge_index, inputs, reduction(conv))


_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def fast_class(kind: type) -> type | None:
    """The subclass accelerate() gives to layers of this class, or None where nothing is to be gained."""
    if why_not(kind) is not None:
        return None
    if kind not in _classes:
        body = {
            "propagate": fast_propagate(kind),
            STOCK: kind,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "__reduce_ex__": _reduce,
            "_set_jittable_templates": templates_of(kind),
        }
        _classes[kind] = type(kind)(kind.__name__, (kind,), body)
    return _classes[kind]


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickled as the user's class, and made ours again when it is read."""
    if STOCK not in vars(type(self)):  # torch has derived it from ours, and pickles it or not
        return object.__reduce_ex__(self, protocol)
    reduced: Any = object.__reduce_ex__(self, 2)
    return _rebuilt, (type(self).__dict__[STOCK],), *reduced[2:]


def _rebuilt(kind: type) -> Any:
    made: Any = fast_class(kind)
    if made is None:  # a new process: PyG writes propagate() of a class when its first layer gets its state
        made = type(kind)(kind.__name__, (kind,), {"__module__": kind.__module__, "__setstate__": _awake})
    return made.__new__(made)


def _awake(self: Any, state: Any) -> None:
    """The state of a layer that was pickled accelerated; then its class, as it was."""
    kind = type(self).__base__
    assert kind is not None
    self.__class__ = kind
    self.__setstate__(state)
    self.__class__ = fast_class(kind) or kind


_patched: dict[Any, tuple[Any, Any]] = {}  # class -> (its propagate, ours)
_root: Any = MessagePassing
_templates: list[Any] = []  # MessagePassing._set_jittable_templates as it was, while installed


def install(known: Container[type]) -> None:
    """Give every MessagePassing class but those in `known` our propagate, and those to come. Undone by remove()."""
    if _templates:
        return
    stock = _root._set_jittable_templates
    _templates.append(stock)

    @functools.wraps(stock)
    def set_templates(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if _templates and type(self) not in known:
            _patch(type(self))

    for kind in _subclasses(MessagePassing):
        if kind not in known:
            _patch(kind)
    _root._set_jittable_templates = set_templates


def remove() -> None:
    """Put every propagate back."""
    if not _templates:
        return
    _root._set_jittable_templates = _templates.pop()
    for kind, (stock, ours) in _patched.items():
        if kind.__dict__.get("propagate") is ours:
            kind.propagate = stock
    _patched.clear()


def _patch(kind: Any) -> None:
    if kind not in _patched and stock_of(kind) is None and why_not(kind) is None:
        stock, ours = kind.__dict__["propagate"], fast_propagate(kind)
        _patched[kind] = stock, ours
        kind.propagate = ours


def is_patched(kind: type) -> bool:
    """Whether layers of this class run with our propagate because of install()."""
    return kind in _patched


def _subclasses(kind: Any) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)
