"""STRETTO_SHADOW=N: at every N-th call of a layer stock runs beside it, and what differs is told and runs as stock.

The user's step is not disturbed: both are evaluated apart from it, from the random state and the buffers (BatchNorm's
statistics) that the call found, with leaves of their own for parameters and inputs, so that no hook fires and no .grad
is written. Compared are all tensors of the result and, in fp32 and fp64 and where the user wants them, the gradients of
parameters and inputs. Where our random bits are others than stock's by design (attention dropout, dropout on edges),
both are evaluated once more without dropout.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from stretto import settings
from stretto.kernels import autocasts, has_own_memory
from stretto.layers.base import UNKNOWN, Decline, Record
from stretto.layers.layer import Conv
from stretto.layers.watched import MISMATCH
from stretto.ops.autograd_state import saved_here
from stretto.plug.stock import all_stock
from stretto.plug.told import refuse

logger = logging.getLogger("stretto")

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest value; elsewhere 3e-2
# Of a gradient's norm. A ReLU or a maximum that rounding decides the other way moves single entries, not the norm.
GRADIENT_LIMITS = {torch.float64: 1e-6, torch.float32: 2e-2}
NOISE = (
    1e-4  # of the largest gradient's norm: one below that share of the limit is rounding (a bias before a BatchNorm)
)

_inside = threading.local()
_mismatched: weakref.WeakSet[Any] = weakref.WeakSet()
_said: set[str] = set()


def watch(conv: Conv, record: Record, args: Any, kwargs: Any, call: int) -> Watch | None:
    """What the layer's call number `call` needs to be compared, taken before it runs; None where that is not due."""
    every = settings.integer("STRETTO_SHADOW")
    if not every or call % every or getattr(_inside, "on", False):
        return None
    return Watch(conv, record, args, kwargs)


def forget(module: torch.nn.Module) -> None:
    """A layer that differed once may run fast again."""
    module.__dict__.pop("_stretto_mismatch", None)
    _mismatched.discard(module)


def mismatched() -> list[Any]:
    """The layers that differed."""
    return list(_mismatched)


class Watch:
    """One call: the layer, its arguments, and the random state and buffers it found."""

    def __init__(self, conv: Conv, record: Record, args: Any, kwargs: Any) -> None:
        self.conv, self.record, self.args, self.kwargs = conv, record, args, kwargs
        devices = {t.device for t in (*_tensors((args, kwargs)), *conv.parameters()) if has_own_memory(t.device)}
        self.devices = sorted(devices, key=str)
        self.random = self._random()
        self.buffers = {id(b): b.detach().clone() for b in conv.buffers()}

    def judged(self, out: Any, ours: Callable[..., Any], stock: Callable[..., Any]) -> Any:
        """Return out where it is what stock computes; else stock's result, and the layer runs as stock from now on."""
        after = self._random()
        _inside.on = True
        try:
            error, what = self._compared(out, ours, stock, after)
        finally:
            _inside.on = False
            self._set_random(after)
        if not error:
            return out
        conv, record = self.conv, self.record
        conv.__dict__["_stretto_mismatch"] = True
        _mismatched.add(conv)
        logger.error("stretto: %s differs from stock by %.3g in %s; it runs as stock from now on", conv, error, what)
        record.path, record.reason, record.way = "stock", MISMATCH, UNKNOWN
        self._set_random(self.random)
        with torch.no_grad():
            for buffer in conv.buffers():
                if id(buffer) in self.buffers:
                    buffer.copy_(self.buffers[id(buffer)])
        if record.strict:
            refuse(conv, record, MISMATCH)
        return all_stock(stock, conv, self.args, self.kwargs)

    def _compared(self, out: Any, ours: Any, stock: Any, after: list[Tensor]) -> tuple[float, str]:
        """(how far beyond rounding, in what), 0 for equal."""
        wanted, wanted_slopes = self._evaluated(stock, plain=True)
        drew = any(
            not torch.equal(a, b) for now in (after, self._random()) for a, b in zip(self.random, now, strict=True)
        )
        error = difference(out, wanted)
        if error and drew:
            self._say_once("draws other random bits than stock by design: it is compared without dropout")
            with _without_dropout(self.conv):
                wanted, wanted_slopes = self._evaluated(stock, plain=True)
                try:
                    got, slopes = self._evaluated(ours)
                except Decline as decline:
                    self._say_once(f"is not compared, since without dropout it runs as stock: {decline.reason}")
                    return 0.0, ""
                error = difference(got, wanted)
        elif wanted_slopes is not None and not error:
            try:
                _, slopes = self._evaluated(ours)
            except Decline:
                return 0.0, ""
        if error or wanted_slopes is None:
            return error, "its result"
        assert slopes is not None
        return slope_difference(slopes, wanted_slopes), "its gradients"

    def _evaluated(self, function: Any, plain: bool = False) -> tuple[Any, list[Tensor | None] | None]:
        """The result of a forward, and the gradients of a weighted sum of it, apart from the user's step.

        plain: nothing of ours runs inside. No gradients (None) where the user wants none, in 16 bits, and where
        the result is not finite.
        """
        self._set_random(self.random)
        leaves: dict[int, Tensor] = {}
        args, kwargs = _with_leaves((self.args, self.kwargs), leaves)
        with _apart(self.conv, leaves, self.buffers), saved_here():
            out = all_stock(function, self.conv, args, kwargs) if plain else function(self.conv, *args, **kwargs)
            values = [t for t in _tensors(out) if t.is_floating_point() and t.layout == torch.strided]
            judged = [t for t in values if t.requires_grad]
            exact = not autocasts(values[0]) if values else False
            finite = all(bool(t.isfinite().all()) for t in values)
            if not judged or not exact or not finite or any(t.dtype not in GRADIENT_LIMITS for t in judged):
                return out, None
            inputs = [t for t in leaves.values() if t.requires_grad]
            if not inputs:
                return out, None
            slopes = torch.autograd.grad(judged, inputs, [_weights(t) for t in judged], allow_unused=True)
        return out, list(slopes)

    def _say_once(self, text: str) -> None:
        line = f"{type(self.conv).__name__} {text}"
        if line not in _said:
            _said.add(line)
            logger.warning("stretto: in shadow mode %s", line)

    def _random(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self.devices)]

    def _set_random(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self.devices, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


# ---- comparing ----


def difference(got: Any, wanted: Any) -> float:
    """0 where two results agree to rounding; else how far apart they are, relative to the largest value.

    Tensors, and tuples, lists and dicts of them; NaN equals NaN, and an infinity the same one.
    """
    if isinstance(wanted, Tensor):
        return _tensor_difference(got, wanted) if isinstance(got, Tensor) else math.inf
    if isinstance(wanted, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(wanted):
            return math.inf
        return max((difference(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)
    if isinstance(wanted, dict):
        if not isinstance(got, dict) or got.keys() != wanted.keys():
            return math.inf
        return max((difference(got[key], value) for key, value in wanted.items()), default=0.0)
    return 0.0 if (got is None) == (wanted is None) else math.inf


def _tensor_difference(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape or got.layout != wanted.layout or got.dtype != wanted.dtype:
        return math.inf
    if not wanted.numel() or wanted.layout != torch.strided:
        return 0.0
    got, wanted = got.detach(), wanted.detach()
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else math.inf
    finite = wanted.isfinite()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    if bool((~same & ~(finite & got.isfinite())).any()):
        return math.inf
    scale = torch.where(finite, wanted, 0).abs().max().double().clamp(min=1e-30)
    error = (torch.where(same, 0, got - wanted).abs().max().double() / scale).item()
    return 0.0 if error <= LIMITS.get(wanted.dtype, 3e-2) else error


def slope_difference(got: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    """0 where gradients agree; else how far the worst is off, relative to its norm."""
    norms = [0.0 if w is None else float(w.double().norm()) for w in wanted]
    largest, worst = max(norms), 0.0
    for mine, theirs, norm in zip(got, wanted, norms, strict=True):
        if mine is None and theirs is None:
            continue
        like = mine if theirs is None else theirs
        assert like is not None
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        apart = float(((zero if mine is None else mine) - (zero if theirs is None else theirs)).double().norm())
        error = apart / max(norm, NOISE * largest, 1e-30)
        if not error <= GRADIENT_LIMITS.get(like.dtype, 3e-2):
            worst = max(worst, error) if error == error else math.inf
    return worst


def _weights(out: Tensor) -> Tensor:
    """What a result is weighted with before it is summed: the same for both, from a generator of its own."""
    random = torch.Generator().manual_seed(out.numel())
    return torch.randn(out.shape, generator=random, dtype=out.dtype, device="cpu").to(out.device)


# ---- apart from the user's step ----


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, wherever they stand."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)


def _with_leaves(value: Any, leaves: dict[int, Tensor]) -> Any:
    """The value with a leaf of its own for every tensor that wants a gradient; other tensors as they are."""
    if type(value) in (Tensor, torch.nn.Parameter):
        if not value.requires_grad or not value.is_floating_point() or value.layout != torch.strided:
            return value
        if id(value) not in leaves:
            leaves[id(value)] = value.detach().requires_grad_()
        return leaves[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_with_leaves(inner, leaves) for inner in value)
    if type(value) is dict:
        return {key: _with_leaves(inner, leaves) for key, inner in value.items()}
    return value


@contextmanager
def _apart(conv: Conv, leaves: dict[int, Tensor], buffers: dict[int, Tensor]) -> Iterator[None]:
    """Leaves in place of the layer's parameters, copies of its buffers as they were; in the end its own again."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    copies: dict[int, Tensor] = {}
    try:
        for module in conv.modules():
            kept.append((module._parameters, dict(module._parameters)))
            kept.append((module._buffers, dict(module._buffers)))
            for name, value in module._parameters.items():
                if value is not None and not isinstance(value, UninitializedParameter):
                    if id(value) not in leaves:
                        leaves[id(value)] = torch.nn.Parameter(value.detach(), value.requires_grad)
                    module._parameters[name] = leaves[id(value)]
            for name, value in module._buffers.items():
                if value is not None:
                    found = copies.setdefault(id(value), buffers.get(id(value), value).detach().clone())
                    module._buffers[name] = found
        yield
    finally:
        for place, values in kept:
            place.clear()
            place.update(values)


@contextmanager
def _without_dropout(conv: Conv) -> Iterator[None]:
    """Every module of the layer in eval mode, then as it was."""
    before = [(module, module.training) for module in conv.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, mode in before:
            module.training = mode
