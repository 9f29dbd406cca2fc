"""torch.compile of a stock layer as one more candidate, where its compilation is allowed: STRETTO_TUNE=full.

To compile takes seconds to minutes, more than the tuner may spend by itself. With "full" a layer's calls take turns
between what it does anyway (`OURS`) and its stock forward compiled; every one of them is a valid step. Forward and
backward are timed as they happen, on the device's clock where there is one; the faster way is kept, in memory and on
disk. What cannot be compiled, or would not fit into memory, is declined, and report() and explain() say why.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from stretto.kernels import has_own_memory, kind_of
from stretto.layers.base import all_stock, record_of
from stretto.machine import facts as machine
from stretto.machine import store
from stretto.ops.autograd_state import saved_elsewhere

logger = logging.getLogger("stretto")

OURS, COMPILED = "stretto", "torch.compile of stock"
BACKEND = "inductor"
WARM = 24  # calls before any is timed: our own kernels and plans are chosen and recorded within them
TRIES = 3
MARGIN = 0.95  # ours is replaced only by something at least this much faster
MOST_PENDING = 16  # steps whose backward may still come
MESSAGES = 8  # arrays of messages [edges, width] that stock may hold at once
MOST_SIGNATURES = 256

_lock = threading.RLock()
_races: dict[str, Race] = {}
_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[Hashable, Race]] = weakref.WeakKeyDictionary()
_counter = itertools.count()


@dataclass
class Race:
    """One signature: how long each way took, and which is kept. how: "measured", "measured earlier", "declined"."""

    text: str
    chosen: str = ""
    how: str = ""
    reason: str = ""
    calls: int = 0
    best: dict[str, float] = field(default_factory=dict)  # seconds
    times: dict[str, list[float]] = field(default_factory=dict)
    pending: list[_Lap] = field(default_factory=list)
    function: Callable[..., Any] | None = None

    def __str__(self) -> str:
        if self.how == "declined":
            return f"{COMPILED} declined: {self.reason}"
        took = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.best.items())
        if self.chosen:
            return f"{self.chosen} ({self.how}: {took})"
        return f"{COMPILED} is being tried" if self.calls > WARM else f"{COMPILED} comes after {WARM} calls"


def forget() -> None:
    """Drop what is held in memory; the disk is asked again."""
    with _lock:
        _races.clear()
        _known.clear()


def race(conv: Any, usual: Callable[..., Any], stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The layer's result, by the way that is chosen or whose turn it is. usual(conv, ...): ours; stock: the forward."""
    fixed = torch.are_deterministic_algorithms_enabled() or saved_elsewhere() or _capturing()
    if fixed or not isinstance(conv, MessagePassing):
        return usual(conv, *args, **kwargs)
    found = _find(conv, args, kwargs)
    record_of(conv).race = found
    if not found.chosen:
        with _lock:
            found.calls += 1
            _collect(found)
    if found.chosen == OURS:
        return usual(conv, *args, **kwargs)
    if found.chosen == COMPILED:
        return _settled(found, conv, usual, stock, args, kwargs)
    return _turn(found, conv, usual, stock, args, kwargs)


def _settled(found: Race, conv: Any, usual: Any, stock: Any, args: Any, kwargs: Any) -> Any:
    """Compiled stock, which was the faster; chosen in an earlier process it is compiled now."""
    if found.function is None and not _compile(found, conv, stock, args, kwargs):
        return usual(conv, *args, **kwargs)
    assert found.function is not None
    record = record_of(conv)
    record.calls += 1
    record.path, record.plan, record.key, record.avoided = "compiled", COMPILED, None, 0
    record.reason = f"faster than ours: {found}"
    return all_stock(found.function, conv, args, kwargs)


def _turn(found: Race, conv: Any, usual: Any, stock: Any, args: Any, kwargs: Any) -> Any:
    """One more try, of the way that has had the fewest."""
    if found.calls <= WARM:
        return usual(conv, *args, **kwargs)
    if found.function is None and not _compile(found, conv, stock, args, kwargs):
        return usual(conv, *args, **kwargs)
    tried = {name: len(found.times.get(name, ())) for name in (OURS, COMPILED)}
    for lap in found.pending:
        tried[lap.name] += 1
    name = min(tried, key=lambda way: tried[way])
    args = _aliased(args)
    lap = _Lap(name, _device(args))
    try:
        out = usual(conv, *args, **kwargs) if name == OURS else all_stock(found.function, conv, args, kwargs)
    except RuntimeError as error:
        if name == OURS:
            raise
        _decline(found, error)
        return usual(conv, *args, **kwargs)
    if not isinstance(out, Tensor):
        _decline(found, "the result is not a single tensor")
        return out
    lap.forward_ends(out, [*_tensors(args), *conv.parameters()])
    with _lock:
        found.pending.append(lap)
    return out


def _collect(found: Race) -> None:
    """Take the times of what has ended since; settle when each way has enough."""
    waiting = []
    for lap in found.pending:
        seconds = lap.seconds()
        if seconds is None:
            waiting.append(lap)
            continue
        lap.let_go()
        found.times.setdefault(lap.name, []).append(seconds)
    for lap in waiting[:-MOST_PENDING]:  # nobody asks for their gradients
        lap.let_go()
    found.pending = waiting[-MOST_PENDING:]
    if found.chosen or any(len(found.times.get(name, ())) < TRIES for name in (OURS, COMPILED)):
        return
    found.best = {name: min(times) for name, times in found.times.items()}
    found.chosen = COMPILED if found.best[COMPILED] < MARGIN * found.best[OURS] else OURS
    found.how = "measured"
    _finish(found)
    ms = {name: round(seconds * 1e3, 4) for name, seconds in found.best.items()}
    store.add("layers", machine.describe(), {found.text: {"way": found.chosen, "ms": ms}})


def _decline(found: Race, why: object) -> None:
    lines = [line.strip() for line in str(why).splitlines() if line.strip()]
    reason = " ".join(lines[:2])[:200] or type(why).__name__
    with _lock:
        found.chosen, found.how, found.reason, found.function = OURS, "declined", reason, None
        _finish(found)
    logger.info("stretto: %s is no candidate for %s: %s", COMPILED, found.text.split(" | ")[0], reason)


def _finish(found: Race) -> None:
    for lap in found.pending:
        lap.let_go()
    found.pending = []


# ---- compiling ----


def _compile(found: Race, conv: Any, stock: Any, args: Any, kwargs: Any) -> bool:
    """Compile the stock forward and, where a gradient is wanted, its backward; False: declined.

    Done once apart from the user's step, whose generators and buffers are left as they were: what fails fails here.
    """
    needed, free = _memory(args, kwargs, conv)
    if needed > free / 2:
        _decline(found, f"stock may hold {needed / 2**30:.1f} GiB of messages, {free / 2**30:.1f} GiB are free")
        return False

    def whole(conv: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(conv, *args, **kwargs)

    # A code object of its own: what torch compiles for one signature does not count towards another's limit.
    code = whole.__code__.replace(co_name=f"whole_{next(_counter)}")
    own = types.FunctionType(code, whole.__globals__, closure=whole.__closure__)
    function = torch.compile(own, backend=BACKEND)
    devices = [_device(args)] if _device(args).type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), _buffers_kept(conv):
            out = all_stock(function, conv, args, kwargs)
            wanted = [t for t in (*_tensors(args), *conv.parameters()) if t.requires_grad]
            if isinstance(out, Tensor) and out.requires_grad and wanted:
                torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
    except RuntimeError as error:
        _decline(found, error)
        return False
    found.function = function
    return True


@contextlib.contextmanager
def _buffers_kept(conv: Any) -> Iterator[None]:
    """Running statistics inside a layer's network stay as they were."""
    kept = [(b, b.clone()) for b in conv.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _memory(args: Any, kwargs: Any, conv: Any) -> tuple[float, float]:
    """Bytes of messages that stock may hold at once, and bytes that are free."""
    given = _tensors((*args, *kwargs.values()))
    edges = max((t.size(1) for t in given if not t.is_floating_point() and t.dim() == 2 and t.size(0) == 2), default=0)
    rows = [t for t in given if t.is_floating_point()]
    widths = [t.size(-1) for t in (*rows, *conv.parameters()) if t.dim() > 1]
    sizes = [p.size(0) for p in conv.parameters() if p.dim() == 2]
    size = max((t.element_size() for t in rows), default=4)
    needed = MESSAGES * edges * max([*widths, *sizes], default=1) * size
    device = _device(args)
    if has_own_memory(device):
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return needed, torch.cuda.mem_get_info(device)[0] + idle
    return needed, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- timing ----


class _Lap:
    """Forward and backward of one call, between marks on the device's stream, or on the host's clock."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.marks: dict[str, Any] = {}
        self.handles: list[Any] = []
        self.gradient = False
        self._mark("start")

    def _mark(self, what: str) -> None:
        if has_own_memory(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks[what] = event
        else:
            self.marks[what] = time.perf_counter()

    def forward_ends(self, out: Tensor, inputs: list[Tensor]) -> None:
        """From now on backward may come: it begins with the gradient of the result and ends with the last input's."""
        self._mark("end")
        self.gradient = out.requires_grad
        if self.gradient:
            self.handles.append(out.register_hook(lambda _: self._mark("back")))
            for t in inputs:
                if t.requires_grad:
                    self.handles.append(t.register_hook(lambda _: self._mark("done")))

    def seconds(self) -> float | None:
        """Of forward, and of backward where there is one; None: it has not ended."""
        marks = self.marks
        if self.gradient and not ("back" in marks and "done" in marks):
            return None
        pairs = [("start", "end"), ("back", "done")] if self.gradient else [("start", "end")]
        return sum(self._between(marks[one], marks[other]) for one, other in pairs)

    def _between(self, one: Any, other: Any) -> float:
        if not has_own_memory(self.device):
            return other - one
        other.synchronize()
        return one.elapsed_time(other) / 1e3

    def let_go(self) -> None:
        """Leave the user's tensors as they were."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


# ---- signatures ----


def _find(conv: Any, args: Any, kwargs: Any) -> Race:
    """The race this call belongs to."""
    grad, on = torch.is_grad_enabled(), torch.is_autocast_enabled(_device(args).type)
    signs = tuple(_sign(a) for a in (*args, *kwargs.values()))
    key = (signs, tuple(kwargs), conv.training, grad, on, torch.get_num_threads())
    mine = _known.get(conv)
    found = None if mine is None else mine.get(key)
    if found is not None:
        return found
    with _lock:
        text = _text(conv, args, kwargs, grad, on)
        found = _races.get(text)
        if found is None:
            found = _races[text] = Race(text)
            kept = store.read("layers", machine.describe()).get(text)
            if isinstance(kept, dict) and kept.get("way") in (OURS, COMPILED):
                found.chosen, found.how = kept["way"], "measured earlier"
                found.best = {name: ms / 1e3 for name, ms in dict(kept.get("ms", {})).items()}
        mine = _known.setdefault(conv, {})
        if len(mine) >= MOST_SIGNATURES:
            mine.clear()
        mine[key] = found
        return found


def _sign(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.layout, value.device
    if isinstance(value, (tuple, list)):
        return tuple(_sign(v) for v in value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _text(conv: Any, args: Any, kwargs: Any, grad: bool, autocast: bool) -> str:
    """A signature as the file on disk knows it: the layer, its options, sizes in quarter octaves."""
    plain = (int, float, str, bool, type(None), tuple)
    options = {k: v for k, v in sorted(vars(conv).items()) if isinstance(v, plain) and not k.startswith("_")}
    shapes = [(tuple(p.shape), p.requires_grad) for p in conv.parameters()]
    given = [_rounded(a) for a in (*args, *kwargs.values())]
    state = f"{conv.training} {grad} {autocast} {torch.get_num_threads()} {BACKEND}"
    return f"{type(conv).__name__} {conv} | {options} {shapes} | {given} {list(kwargs)} | {state}"


def _rounded(value: Any) -> object:
    """What _sign says, with the number of nodes or edges in quarter octaves."""
    if isinstance(value, Tensor):
        counted = 0 if value.is_floating_point() else 1  # x [n, k], edge_index [2, E]
        sizes = [round(4 * math.log2(n)) if k == counted and n else n for k, n in enumerate(value.shape)]
        return sizes, str(value.dtype), value.requires_grad, str(value.layout), kind_of(value)
    if isinstance(value, (tuple, list)):
        return [_rounded(v) for v in value]
    return _sign(value)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments, also inside tuples."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def _aliased(values: Any) -> Any:
    """The same with a view of every tensor whose gradient is wanted: its gradient comes from this layer alone."""
    if isinstance(values, Tensor):
        return values.view_as(values) if values.requires_grad and values.layout == torch.strided else values
    return tuple(_aliased(v) for v in values) if type(values) is tuple else values


def _device(args: Any) -> torch.device:
    return next((t.device for t in _tensors(args)), torch.device("cpu"))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
