"""A layer's call: fast where it may, else stock's own forward, and the record of which it was and why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto import settings
from stretto.kernels import has_own_memory
from stretto.kernels.looks import note_trained
from stretto.layers import adjacency
from stretto.layers.base import LAZY, SMALL, Decline, Quiet, Record, Small, record_of
from stretto.layers.declines import why_unusual
from stretto.layers.layer import Conv, Fast, Layer
from stretto.layers.watched import why_stock
from stretto.ops import advice
from stretto.ops.autograd_state import again_in_backward, saved_elsewhere
from stretto.plug import bound, inside_compile, shadow
from stretto.plug.static import on_copies
from stretto.plug.stock import all_stock, in_place_of, owned, stock_wanted
from stretto.plug.told import is_lazy, refuse, tell


def accelerated_forward(layer: Layer, stock_forward: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A forward that runs layer.fast where it may, elsewhere stock's own: the one given, or what it is by then."""
    stock: Any = layer.kind
    fast = on_copies(layer.fast) if layer.copies else layer.fast

    def by_then(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock.forward(self, *args, **kwargs)

    plain = stock_forward or by_then
    usual = functools.partial(_usual, layer, fast, plain)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            inside_compile.note(self)
            return plain(self, *args, **kwargs)
        if stock_wanted():
            return plain(self, *args, **kwargs)
        out = bound.step(self, args, kwargs, usual)
        if out is not bound.MISS:
            return out
        return usual(self, *args, **kwargs)

    return in_place_of(stock.forward, run)


def _usual(layer: Layer, fast: Fast, plain: Callable[..., Any], conv: Conv, /, *args: Any, **kwargs: Any) -> Any:
    """A call that is not bound: fast, or stock's own forward and the reason written down."""
    record = record_of(conv)
    record.calls += 1
    for value in (*args, *kwargs.values()):
        if value.__class__ is Tensor and value.requires_grad:
            note_trained(value)  # also where this call keeps nothing of it
    # the first thing looked at: where it decides, the rest costs too much
    if layer.few_edges and len(args) > 1 and few_on_device(args[1], min(layer.few_edges, adjacency.PASSING)):
        if record.reason is not SMALL:
            tell(conv, record, SMALL)
        return all_stock(plain, conv, args, kwargs)
    reason = why_stock(conv) or layer.why_declined(conv) or why_unusual(args, kwargs) or _why_begun(record)
    if reason is None:
        out, reason = _tried(conv, record, fast, plain, args, kwargs)
        if reason is None:
            return out
    tell(conv, record, reason)
    record.begun = record.begun or (saved_elsewhere() and is_lazy(conv))
    if record.strict and not record.begun:
        refuse(conv, record, reason)
    return plain(conv, *args, **kwargs)


def _why_begun(record: Record) -> str | None:
    """Why a call must run as a lazy layer's first one did, which it may be, run again in backward; or None."""
    if record.begun:
        record.begun = again_in_backward()
    return LAZY if record.begun else None


def _tried(
    conv: Conv, record: Record, fast: Fast, plain: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, str | None]:
    """The result of a call, fast or as whoever declines it wants it, and None; or why stock is still to run."""
    shadowed = settings.get("STRETTO_SHADOW") != "0"
    watch = shadow.watch(conv, record, args, kwargs, record.calls) if shadowed else None
    try:
        out = owned(fast(conv, *args, **kwargs))
    except Quiet:
        return plain(conv, *args, **kwargs), None
    except Small as decline:
        tell(conv, record, decline.reason)
        return all_stock(plain, conv, args, kwargs), None
    except Decline as decline:
        return None, decline.reason
    except torch.OutOfMemoryError as error:
        advice.add(error, type(conv).__name__, rows_of(args))
        raise
    record.path, record.reason = "fast", ""
    if not shadowed:
        bound.meet(conv, args, record)
    return (out if watch is None else watch.judged(out, fast, plain)), None


def known_reason(conv: Conv, layer: Layer | None) -> str | None:
    """Why a layer runs as stock whatever its input, or None: by hooks and replaced methods, or by its constructor.

    layer: None for one of a class that is not in our table.
    """
    if layer is None:
        return why_stock(conv, aggregates_itself=True)
    return why_stock(conv) or layer.why_declined(conv)


def few_on_device(edges: Any, least: int) -> bool:
    """Whether a plain edge_index on a GPU has fewer than `least` edges."""
    return (
        type(edges) is Tensor
        and has_own_memory(edges.device)
        and edges.layout == torch.strided
        and edges.dim() == 2
        and edges.size(1) < least
    )


def rows_of(args: tuple[Any, ...]) -> Tensor | None:
    """The features among a layer's arguments."""
    return next((t for t in args if isinstance(t, Tensor) and t.is_floating_point()), None)
