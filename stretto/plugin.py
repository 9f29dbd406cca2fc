"""All that touches a user's model or process: accelerate, restore, accelerated, patch, unpatch.

accelerate() changes one thing, the class of each layer it knows; restore() changes it back. patch() changes one thing,
the forward of each stock class; unpatch() puts the very same function back.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch_geometric.nn import MessagePassing

from stretto import memory, settings
from stretto.errors import StrettoError, expect
from stretto.loader import swap
from stretto.nn import AGGREGATIONS, CONTAINERS, CONVS, fold_models, functional, generic, shadow, traced
from stretto.nn.base import accelerated_forward, in_place_of, set_strict, strict_of, why_stock
from stretto.nn.classes import fast_of, stock_of
from stretto.nn.constructor import why_declined

logger = logging.getLogger("stretto")
M = TypeVar("M", bound=torch.nn.Module)

_lock = threading.RLock()
_patched: dict[type, Callable[..., Any] | None] = {}  # stock class -> its own forward; None: it inherits one
_depth = 0
_patch_memory = memory.Owner()


def accelerate(model: M, *, strict: bool = False) -> M:
    """Make every layer of the model that stretto knows run fast. In place; the model is returned for convenience.

    Parameters, state_dict, optimizers, hooks, isinstance and repr stay as they are. STRETTO_DISABLE=1: nothing is done.

    strict: raise where a message-passing layer would run as stock, instead of saying so in report(model): here if its
    class, its constructor or a hook decides it, else in the call that would. Calls inside torch.compile, the first call
    of a lazy layer, and small graphs on a GPU, which stock runs faster, do not raise. It holds for this model, not for
    copies of it, until accelerate(model) without strict or restore(model).
    """
    expect(
        isinstance(model, torch.nn.Module),
        f"accelerate: 'model' is a {type(model).__name__}, wanted a torch.nn.Module",
    )
    if settings.flag("STRETTO_DISABLE"):
        return model
    modules, names = list(model.modules()), {id(m): name for name, m in model.named_modules()}
    known = [m for m in modules if fast_of(type(m)) is not None]
    already = [m for m in modules if stock_of(type(m)) is not None]
    done = {id(m) for m in (*known, *already)}
    left = [m for m in modules if isinstance(m, MessagePassing) and id(m) not in done]
    layers = [m for m in (*known, *already) if isinstance(m, MessagePassing)]
    if strict:
        _check_strict(left, layers, names)
    for module in known:
        fast = fast_of(type(module))
        assert fast is not None
        module.__class__ = fast
    for module in modules:
        if stock_of(type(module)) is not None:
            continue
        made = traced.fast_class(module) or fold_models.fast_class(module)
        if made is not None:
            module.__class__ = made
    for layer in layers:
        set_strict(layer, (names[id(layer)] or "(model)") if strict else "")
    if known or already:
        memory.keep_for(model)
    _say(len(layers), left)
    return model


def _check_strict(left: Sequence[Any], layers: Sequence[Any], names: dict[int, str]) -> None:
    """Raise if a layer must run as stock whatever its input: no fast path, or by what is known of it now."""
    if left:
        kinds = ", ".join(sorted({type(m).__name__ for m in left}))
        raise StrettoError(f"accelerate: strict=True, but these layers have no fast path: {kinds}")
    reasons = []
    for layer in layers:
        reason = why_stock(layer) or why_declined(layer, stock_of(type(layer)) or type(layer))
        if reason is not None:
            reasons.append(f"{names[id(layer)] or '(model)'} ({type(layer).__name__}): {reason}")
    if reasons:
        raise StrettoError(f"accelerate: strict=True, but these layers would run as stock: {'; '.join(reasons)}")


def restore(model: M) -> M:
    """Give every accelerated layer of the model its own class back. In place."""
    for module in model.modules():
        stock = stock_of(type(module))
        if stock is not None:
            module.__class__ = stock
            shadow.forget(module)
            set_strict(module, "")
    memory.let_go(model)
    return model


@contextmanager
def accelerated(model: M, *, strict: bool = False) -> Iterator[M]:
    """`with accelerated(model):` — fast inside, and outside again exactly what it was."""
    before = [(m, type(m), strict_of(m)) for m in model.modules()]
    try:
        yield accelerate(model, strict=strict)
    finally:
        for module, kind, name in before:
            set_strict(module, name)
            now = type(module)
            if stock_of(now) is kind or stock_of(kind) is now:  # somebody may have restored or accelerated it inside
                module.__class__ = kind
            if stock_of(kind) is None:
                shadow.forget(module)
        if any(stock_of(type(m)) for m in model.modules()):
            memory.keep_for(model)
        else:
            memory.let_go(model)


def patch() -> None:
    """Make every layer of the process that stretto knows run fast, built before or after. Nestable; see unpatch()."""
    global _depth
    if settings.flag("STRETTO_DISABLE"):
        return
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        for stock, fast in {**CONVS, **AGGREGATIONS, **CONTAINERS}.items():
            _patched[stock] = stock.__dict__.get("forward")
            stock.forward = _guarded(stock, fast)  # type: ignore[attr-defined]
        memory.keep_for(_patch_memory)
        swap.install()  # PyG's names for loaders mean ours
        generic.install(CONVS)  # every other MessagePassing class, made before or after
        fold_models.install()  # PyG's Sequential
        functional.install()  # scatter and softmax, and with them global_*_pool
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
                    del stock.forward  # type: ignore[attr-defined]
                else:
                    stock.forward = forward  # type: ignore[attr-defined]
            _patched.clear()
            swap.remove()
            memory.let_go(_patch_memory)
            functional.remove()
            fold_models.remove()
            generic.remove()
            for module in shadow.mismatched():
                if stock_of(type(module)) is None:
                    shadow.forget(module)


def is_patched() -> bool:
    """Whether patch() is in force."""
    return _depth > 0


def _guarded(stock: type, fast: Callable[..., Any]) -> Callable[..., Any]:
    """A class-level forward: fast for exactly this class, the stock forward for classes derived from it."""
    stock_forward = stock.forward  # type: ignore[attr-defined]
    accelerated_one = accelerated_forward(stock, fast)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is stock:
            return accelerated_one(self, *args, **kwargs)
        return stock_forward(self, *args, **kwargs)

    return in_place_of(stock_forward, run)


def _say(count: int, left: Sequence[torch.nn.Module]) -> None:
    total = count + len(left)
    text = f"accelerated {count} of {total} layers"
    if left:
        names = Counter(type(m).__name__ for m in left)
        text += f"; {len(left)} stock: " + ", ".join(f"{n} (no fast path)" for n in sorted(names))
    logger.info("stretto: %s", text)
