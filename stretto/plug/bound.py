"""A layer's step, bound once: what its first calls found out runs again behind one guard.

On a small graph a layer is as fast as the Python around its kernels is short; to read its options, to find graph, plan
and variants again takes ten times as many calls of Python functions as to run them. So once the same layer has met the
same graph a few times, its step is written down (ops/program.py), and from then on run as long as everything that
decided it is as it was: options, hooks, parameters and modules inside; the tensor of the graph; types, shapes and
layouts of the arguments; what torch and the environment are set to. Whatever else is met takes the long way.

`stretto bench latency` counts the calls of Python functions of a layer on 100 nodes: 22 forward and 22 backward for
GCNConv, where there were 171 and 111.
"""

from __future__ import annotations

import functools
import logging
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_modules

from stretto import kernels, settings
from stretto.graph import Graph
from stretto.kernels import on_host
from stretto.kernels.looks import note_trained
from stretto.layers.layer import Conv, stock_of
from stretto.layers.watched import LIBRARIES, METHODS
from stretto.lifetime import popped_from
from stretto.ops.program import Program, Unfit, write
from stretto.ops.program_step import step as run_step
from stretto.plug.other_values import same_on_other_values
from stretto.recording import recorder

logger = logging.getLogger("stretto")

MISS = object()  # what step() returns where nothing is bound, or not for this call
GRAPHS = 8  # of a layer that are bound at a time
WRITTEN_AT = (8, 16, 32, 64)  # calls at which a step is written down, if the times before it was refused
LARGEST = 1 << 20  # values of an argument, or edges times channels: above, Python is no part of a step's time
SIMPLE = (bool, int, float, str, type(None))
CALLED = (types.FunctionType, types.MethodType, functools.partial)
Long = Callable[..., Any]  # the layer's long way: (conv, *args, **kwargs)

_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_transforms = torch._C._functorch.peek_interpreter_stack
_tables = (getattr(torch_modules, name) for name in dir(torch_modules) if name.startswith("_global_"))
_global_hooks = [table for table in _tables if isinstance(table, dict)]


@dataclass
class Met:
    """What is known of a layer on one graph: how often each kind of call was made, and those that are bound."""

    graph: weakref.ref[Tensor]
    cell: dict[int, dict[Hashable, Bound]]  # the steps that are bound, under 0; emptied when the graph's tensor is gone
    calls: dict[Hashable, int] = field(default_factory=dict)
    last: tuple[weakref.ref[Tensor], ...] = ()


@dataclass
class Layer:
    """The graphs that a layer has met, by the number of their tensor."""

    conv: weakref.ref[Any]
    record: Any
    met: dict[int, Met] = field(default_factory=dict)


_layers: dict[int, Layer] = {}


def world(device: str) -> tuple[Any, ...]:
    """What torch, the environment and whoever watches are set to, as far as it decides what a layer does.

    The first ten are nothing where nobody watches and no transform is on.
    """
    return (
        torch.is_autocast_enabled(device),
        torch._C._is_tracing(),
        _transforms(),
        forward_ad._current_level >= 0,
        _hooks is not None and _hooks(True),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        recorder.program,
        any(_global_hooks),
        kernels._forced,
        torch._C._get_deterministic_algorithms(),
        torch.get_num_threads(),
        torch._C._get_float32_matmul_precision(),
        settings.deciding(),
    )


TABLES = ("_parameters", "_buffers", "_modules")


class State:
    """A module's own state, to compare with what it becomes: options, hooks, parameters, modules inside."""

    def __init__(self, module: nn.Module) -> None:
        state = vars(module)
        self.module, self.kind, self.count = weakref.ref(module), type(module), len(state)
        plain = [name for name, value in state.items() if type(value) in SIMPLE]
        empty = [name for name, value in state.items() if _is_empty(name, value)]
        self.read = operator.itemgetter(*plain, *empty)
        self.values = (*[state[name] for name in plain], *[{} for _ in empty])
        self.objects = tuple((name, state[name]) for name in set(state) - {*plain, *empty, *TABLES})
        self.modules = dict(state["_modules"])
        self.tensors = [
            (table, name, value, value.dtype, value.shape, value.requires_grad, value.stride())
            for table in (state["_parameters"], state["_buffers"])
            for name, value in table.items()
            if value is not None
        ]
        self.sizes = (len(state["_parameters"]), len(state["_buffers"]))
        self.stock = stock_of(self.kind) or self.kind
        self.read_class = operator.attrgetter(*[name for name in ("forward", *METHODS) if hasattr(self.stock, name)])
        self.methods = self.read_class(self.stock)
        self.bindable = self.stock.__module__.startswith(LIBRARIES) and not any(map(_unseen, self.objects))

    def holds(self) -> bool:
        """Whether the module is as it was."""
        module = self.module()
        if module is None or module.__class__ is not self.kind or self.read_class(self.stock) != self.methods:
            return False
        state = module.__dict__
        if len(state) != self.count or self.read(state) != self.values or state["_modules"] != self.modules:
            return False
        for name, value in self.objects:
            if state.get(name) is not value:
                return False
        for table, name, value, dtype, shape, learns, stride in self.tensors:
            if table.get(name) is not value or value.dtype is not dtype or value.requires_grad is not learns:
                return False
            if value.shape != shape or value.stride() != stride:
                return False
        return (len(state["_parameters"]), len(state["_buffers"])) == self.sizes


def _is_empty(name: str, value: Any) -> bool:
    """Whether it is a table of hooks, say, with nothing in it."""
    return isinstance(value, dict) and not value and name[0] == "_" and name not in TABLES


def _unseen(attribute: tuple[str, Any]) -> bool:
    """Whether an attribute is a hook, or a function of the user's: what those read, no guard can see."""
    name, value = attribute
    return name.endswith("hooks") or isinstance(value, CALLED)


def _like(t: Tensor) -> tuple[Any, ...]:
    """What of an argument decides which step it is."""
    return t.dtype, t.shape, t.stride(), t.requires_grad, t.device


class Bound:
    """One step as it is run, and the guard it stands behind."""

    def __init__(self, conv: Conv, program: Program, tensors: list[Tensor], again: Long, edge_index: Tensor) -> None:
        self.program, self.again, self.conv = program, again, weakref.ref(conv)
        self.states = [State(module) for module in conv.modules()]
        self.parameters = _own(conv)
        self.likes = [_like(t) for t in tensors]
        self.version, self.address = edge_index._version, edge_index.data_ptr()
        self.device = "cpu"
        self.world = world(self.device)
        self.record: Any = None  # what report() shows of the layer
        self.told: tuple[Any, ...] = ()
        self.learns = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *self.parameters))

    def fits(self, tensors: list[Tensor], edge_index: Tensor) -> bool:
        """Whether everything is as it was when the step was written down."""
        if edge_index._version != self.version or edge_index.data_ptr() != self.address:
            return False
        for t, (dtype, shape, stride, learns, device) in zip(tensors, self.likes, strict=True):
            if t.shape != shape or t.dtype is not dtype or t.requires_grad is not learns or t.stride() != stride:
                return False
            if t.device != device or t.__class__ is not Tensor:
                return False
        if world(self.device) != self.world:
            return False
        for t, version, address in self.program.looked_at:
            if t._version != version or t.data_ptr() != address:
                return False
        for state in self.states:  # noqa: SIM110 -- a generator is felt here
            if not state.holds():
                return False
        return True


def _own(conv: Conv) -> list[Tensor]:
    """Parameters and buffers of a layer, each once."""
    tables = [table for module in conv.modules() for table in (module._parameters, module._buffers)]
    return list({id(t): t for table in tables for t in table.values() if t is not None}.values())


def _parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Any]] | None:
    """The tensors among a call's arguments but for the graph's, and the rest: all that is no tensor, in its place."""
    tensors: list[Tensor] = []
    rest: list[Any] = []
    for value in (args[0], *args[2:], *kwargs.values()):
        if value.__class__ is Tensor:
            tensors.append(value)
            rest.append(Tensor)
        elif value.__class__ is tuple:
            for one in value:
                if one.__class__ is Tensor:
                    tensors.append(one)
                    rest.append(Tensor)
                elif one is None:
                    rest.append(None)
                else:
                    return None
            rest.append(len(value))
        elif value.__class__ in SIMPLE:
            rest.append(value)
        else:
            return None
    return tensors, rest


def step(conv: Conv, args: tuple[Any, ...], kwargs: dict[str, Any], long: Long) -> Any:
    """The result of a step that is bound, or that is written down in this call; else MISS: the caller computes it."""
    if len(args) < 2 or args[1].__class__ is not Tensor:
        return MISS
    known, edge_index = _layers.get(id(conv)), args[1]
    met = None if known is None else known.met.get(id(edge_index))
    if known is None or met is None or known.conv() is not conv or met.graph() is not edge_index:
        return MISS
    parts = _parts(args, kwargs)
    if parts is None:
        return MISS
    tensors, rest = parts
    key = (torch.is_grad_enabled(), tuple(kwargs), *rest, *[(t.requires_grad, t.dtype) for t in tensors])
    bound = met.cell[0].get(key)
    if bound is None:
        return _count(known, met, key, conv, args, kwargs, tensors, long)
    if not bound.fits(tensors, edge_index):
        return MISS
    try:
        return _run(bound, conv, args, kwargs, tensors, long)
    except Unfit:
        return MISS


def _run(
    bound: Bound, conv: Conv, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], long: Long
) -> Any:
    """A bound step, with these tensors."""
    record = bound.record
    record.calls += 1
    record.path, record.reason, record.way = bound.told
    for t in tensors:
        if t.requires_grad and t.grad_fn is None:
            note_trained(t)
    if bound.learns:
        again = functools.partial(long, conv, *args, **kwargs)
        return run_step(bound.program, again, *tensors, *bound.parameters)
    return bound.program.forward(*tensors, *bound.parameters)[0]


def meet(conv: Conv, args: tuple[Any, ...], record: Any) -> None:
    """A layer ran fast on this graph: from now on its calls are counted. record: what report() shows of it."""
    if len(args) < 2 or args[1].__class__ is not Tensor or not on_host(args[1]) or args[1].is_inference():
        return
    edge_index = args[1]
    known = _layers.get(id(conv))
    if known is None or known.conv() is not conv:
        known = _layers[id(conv)] = Layer(popped_from(_layers, id(conv), conv), record)
    number = id(edge_index)
    met = known.met.get(number)
    if met is None or met.graph() is not edge_index:
        while len(known.met) >= GRAPHS:
            known.met.pop(next(iter(known.met)), None)
        cell: dict[int, dict[Hashable, Bound]] = {0: {}}
        known.met[number] = Met(popped_from(cell, 0, edge_index), cell)


def forget(conv: Conv | None = None) -> None:
    """Unbind a layer's steps, or those of all."""
    if conv is None:
        _layers.clear()
    else:
        _layers.pop(id(conv), None)


def _count(
    known: Layer,
    met: Met,
    key: Hashable,
    conv: Conv,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    long: Long,
) -> Any:
    """One more call of a kind that is not bound; the step is written down if it is time."""
    count = met.calls[key] = met.calls.get(key, 0) + 1
    constant = tuple(weakref.ref(t) for t in tensors if not t.requires_grad)
    before, met.last = met.last, constant
    if count not in WRITTEN_AT or any(world("cpu")[:10]):
        return MISS
    # What comes again and again unchanged may be served from what is kept of it; a step must know which it is.
    pairs = zip(before, constant, strict=False)
    same = len(before) == len(constant) and all(a() is b() for a, b in pairs)
    own = _own(conv)
    if not _worth(args[1], (*tensors, *own)) or (constant and not same) or not all(map(_plain, (*tensors, *own))):
        met.calls[key] = WRITTEN_AT[-1]
        return MISS
    out, program, why = write(lambda: long(conv, *args, **kwargs), [*tensors, *own], Graph.known(args[1]))
    if program is None:
        logger.debug("stretto: %s is not bound: %s", type(conv).__name__, why)
        return out
    made = Bound(conv, program, tensors, long, args[1])
    if all(state.bindable for state in made.states) and same_on_other_values(
        conv, program, args, kwargs, tensors, own, long
    ):
        made.record = known.record
        made.told = (made.record.path, made.record.reason, made.record.way)
        met.cell[0][key] = made
    else:
        logger.debug("stretto: %s is not bound: on other values it computes something else", type(conv).__name__)
    return out


def _worth(edge_index: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a step is so small that Python is felt in it."""
    width = max((t.size(-1) for t in tensors if t.dim()), default=1)
    return edge_index.size(1) * width <= LARGEST and all(t.numel() <= LARGEST for t in tensors)


def _plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and on_host(t) and not t.is_inference()
