"""All that touches a user's model or process: accelerate, restore, accelerated, patch, unpatch.

accelerate() changes one thing, the class of each layer it knows; restore() changes it back. patch() changes one thing,
the forward of each stock class; unpatch() puts the very same function back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.nn.utils import parametrize
from torch_geometric.nn import MessagePassing

from stretto import settings
from stretto.compile import HOIST
from stretto.errors import StrettoError, expect
from stretto.graph import Graph
from stretto.kernels import looks
from stretto.layers import CONVS, gin, layer_of
from stretto.layers.layer import Layer, stock_of
from stretto.loader import arrays, swap
from stretto.memory import allocator
from stretto.plug import bound, functional, generic, shadow, traced
from stretto.plug.classes import KNOWN, class_of, fast_of
from stretto.plug.dispatch import accelerated_forward, known_reason
from stretto.plug.own_class import behind
from stretto.plug.stock import in_place_of
from stretto.plug.told import said, set_strict, strict_of

logger = logging.getLogger("stretto")
M = TypeVar("M", bound=torch.nn.Module)

_lock = threading.RLock()
_patched: dict[Any, Any] = {}  # stock class -> its own forward; None: it inherits one
_depth = 0
_patch_memory = allocator.Owner()


def accelerate(model: M, *, strict: bool = False) -> M:
    """Make every layer of the model that stretto knows run fast. In place; the model is returned for convenience.

    Parameters, state_dict, optimizers, hooks, isinstance and repr stay as they are. STRETTO_DISABLE=1: nothing is done.

    strict: raise where a message-passing layer would run as stock, instead of saying so in report(model): here if its
    class, its constructor or a hook decides it, else in the call that would. Calls inside torch.compile, the first call
    of a lazy layer, and small graphs on a GPU, which stock runs faster, do not raise. It holds for this model, not for
    copies of it, until accelerate(model) without strict or restore(model).
    """
    expect_model("accelerate", model)
    if settings.flag("STRETTO_DISABLE"):
        return model
    modules, names = list(model.modules()), {id(m): name or "(model)" for name, m in model.named_modules()}
    known = [m for m in modules if fast_of(class_of(m)) is not None or stock_of(class_of(m)) is not None]
    done = set(map(id, known))
    layers, left = _layers(known), _layers(m for m in modules if id(m) not in done)
    if strict:
        _check_strict(left, layers, names)
    before = [(m, class_of(m), strict_of(m)) for m in modules]
    try:
        _swap_classes(modules)
        for layer in layers:
            set_strict(layer, names[id(layer)] if strict else "")
        if known:
            allocator.keep_for(model)
    except BaseException:  # a wrong STRETTO_* variable, say: nothing half-changed
        _put_back(before)
        raise
    if logger.isEnabledFor(logging.INFO):
        _say(layers, left)
    return model


def _layers(modules: Iterable[torch.nn.Module]) -> list[Any]:
    return [m for m in modules if isinstance(m, MessagePassing)]


def _swap_classes(modules: Sequence[torch.nn.Module]) -> None:
    """Give every layer that is known its fast class, and then every model that to_hetero made."""
    for module in modules:
        fast = fast_of(class_of(module))
        if fast is not None:
            _set_class(module, class_of(module), fast)
    for module in modules:
        together = None if stock_of(class_of(module)) is not None else traced.fast_class(module)
        if together is not None:
            module.__class__ = together


def expect_model(name: str, model: Any) -> None:
    """Raise unless the argument of a door is a model."""
    expect(isinstance(model, torch.nn.Module), f"{name}: 'model' is a {type(model).__name__}, wanted a torch.nn.Module")


def _check_strict(left: Sequence[Any], layers: Sequence[Any], names: dict[int, str]) -> None:
    """Raise if a layer must run as stock whatever its input: no fast path, or by what is known of it now."""
    if left:
        kinds = ", ".join(sorted({type(m).__name__ for m in left}))
        raise StrettoError(f"accelerate: strict=True, but these layers have no fast path: {kinds}")
    reasons = []
    for layer in layers:
        reason = known_reason(layer, layer_of(class_of(layer)))
        if reason is not None:
            reasons.append(f"{names[id(layer)]} ({type(layer).__name__}): {reason}")
    if reasons:
        raise StrettoError(f"accelerate: strict=True, but these layers would run as stock: {'; '.join(reasons)}")


def restore(model: M) -> M:
    """Give every accelerated layer of the model its own class back. In place."""
    expect_model("restore", model)
    for module in model.modules():
        kind = class_of(module)
        stock = stock_of(kind)
        if stock is not None:
            _set_class(module, kind, stock)
            shadow.forget(module)
            set_strict(module, "")
    allocator.let_go(model)
    return model


def _set_class(module: torch.nn.Module, now: type, wanted: type) -> None:
    """Change a module's class; where torch has derived one of its own from it, that one's base."""
    module.__class__ = _over(type(module), now, wanted)


_derived: dict[tuple[type, type], type] = {}  # (a class that torch derived, the class wanted behind it) -> the same


def _over(kind: type, now: type, wanted: type) -> type:
    """The class that torch has derived from `now`, derived from `wanted`. Others may be of a class that shards."""
    if kind is now:
        return wanted
    bases = tuple(_over(base, now, wanted) if issubclass(base, now) else base for base in kind.__bases__)
    if kind.__module__ == parametrize.__name__:  # it is this module's alone, and holds what was parametrized
        kind.__bases__ = bases
        return kind
    if (kind, wanted) not in _derived:
        body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        made = _derived[kind, wanted] = type(kind.__name__, bases, body)
        _derived[made, now] = kind
    return _derived[kind, wanted]


def _put_back(before: Sequence[tuple[torch.nn.Module, type, str]]) -> None:
    """Give modules the classes they had, with what belongs to them."""
    for module, kind, name in before:
        set_strict(module, name)
        now = class_of(module)
        if stock_of(now) is kind or stock_of(kind) is now:  # somebody may have restored or accelerated it meanwhile
            _set_class(module, now, kind)
        if stock_of(kind) is None:
            shadow.forget(module)


@contextmanager
def accelerated(model: M, *, strict: bool = False) -> Iterator[M]:
    """`with accelerated(model):` — fast inside, and outside again exactly what it was."""
    expect_model("accelerated", model)
    before = [(m, class_of(m), strict_of(m)) for m in model.modules()]
    try:
        yield accelerate(model, strict=strict)
    finally:
        _put_back(before)
        if any(stock_of(class_of(m)) for m in model.modules()):
            allocator.keep_for(model)
        else:
            allocator.let_go(model)


def patch() -> None:
    """Make every layer of the process that stretto knows run fast, built before or after. Nestable; see unpatch()."""
    global _depth
    if settings.flag("STRETTO_DISABLE"):
        return
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        try:
            stock: Any
            for stock, layer in KNOWN.items():
                ours = _guarded(layer)
                _patched[stock] = stock.__dict__.get("forward")
                stock.forward = ours
            allocator.keep_for(_patch_memory)
            swap.install()  # PyG's names for loaders mean ours
            generic.install(CONVS)  # every other MessagePassing class, made before or after
            functional.install()  # scatter and softmax, and with them global_*_pool
        except BaseException:
            unpatch()
            raise
    logger.info("stretto: patched %d layer classes", len(CONVS))


def unpatch() -> None:
    """Undo one patch(); the last one puts every stock forward back."""
    global _depth
    with _lock:
        if _depth == 0:
            return
        _depth -= 1
        if _depth == 0:
            for stock, forward in _patched.items():
                if forward is None:
                    del stock.forward
                else:
                    stock.forward = forward
            _patched.clear()
            swap.remove()
            allocator.let_go(_patch_memory)
            functional.remove()
            generic.remove()
            for module in shadow.mismatched():
                if stock_of(class_of(module)) is None:
                    shadow.forget(module)


def is_patched() -> bool:
    """Whether patch() is in force."""
    return _depth > 0


def _guarded(layer: Layer) -> Callable[..., Any]:
    """A class-level forward: fast for exactly this class, the stock forward for classes derived from it."""
    stock: Any = layer.kind
    stock_forward = stock.forward
    accelerated_one = accelerated_forward(layer, stock_forward)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is stock or behind(type(self)) is stock:
            return accelerated_one(self, *args, **kwargs)
        return stock_forward(self, *args, **kwargs)

    return in_place_of(stock_forward, run)


def forget() -> None:
    """Forget all that was kept of tensors: graphs and what derives from them, products of constants, sorted edges.

    For edits that nobody can see: of memory that a tensor shares with NumPy, DLPack, `.data`, `detach()` or a storage,
    by other means than torch's operations on that very tensor. What is wanted again is made again. What was measured
    (plans, kernels) stays, and so does what PyG's layers keep themselves with cached=True.
    """
    Graph.cache_clear()
    Graph.forget_derived()
    HOIST.clear()
    looks.forget()
    gin.forget()
    bound.forget()
    arrays.forget()


def _say(layers: Sequence[Any], left: Sequence[torch.nn.Module]) -> None:
    """One line: how many layers are fast, and of the others each reason once, where it is known before any call."""
    stock = [(type(m).__name__, f"no fast path: {generic.why_not(type(m))}") for m in left]
    for layer in layers:
        reason = known_reason(layer, layer_of(class_of(layer)))
        if reason is not None:
            stock.append((type(layer).__name__, reason))
            said(layer, reason)
    text = f"accelerated {len(layers) + len(left) - len(stock)} of {len(layers) + len(left)} layers"
    if stock:
        text += f"; {len(stock)} stock: " + ", ".join(f"{name} ({reason})" for name, reason in sorted(set(stock)))
    logger.info("stretto: %s", text)
