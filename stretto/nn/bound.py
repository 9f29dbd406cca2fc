"""A layer's step, bound once: what the first calls decided (plan, kernels, graph) runs again behind one guard.

A layer of a small graph is as fast as the Python around its kernels is short: to read the layer's options, to find the
graph and the plan again takes ten times as many calls as to run them. So where a layer is one expression (compile.linear)
of its input and its parameters, that call is kept with everything that decided it, and made again as long as all of
this is as it was: the modules' own state, parameters, hooks; the graph's tensor; types and shapes; what torch and the
environment are set to. Whatever else is met takes the long way, which binds anew.

GCNConv, forward and backward on 100 nodes: 171 and 111 calls of Python functions before, 24 and 45 now
(`stretto bench latency`).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_modules

from stretto import kernels, settings
from stretto.compile import layer
from stretto.compile.execute import Call
from stretto.graph_memo import mark_of
from stretto.kernels import tape
from stretto.kernels.recording import recorder

MISS = object()  # what step() returns where nothing is bound, or not for this call
GRAPHS = 8  # of a layer that are bound at a time
SIMPLE = (bool, int, float, str, type(None))

_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_transforms = torch._C._functorch.peek_interpreter_stack
_tables = (getattr(torch_modules, name) for name in dir(torch_modules) if name.startswith("_global_"))
_global_hooks = [table for table in _tables if isinstance(table, dict)]


@dataclass
class Layer:
    """What is bound of one layer, by the tensor of its graph."""

    conv: weakref.ref[Any]
    graphs: dict[int, dict[Hashable, Bound]] = field(default_factory=dict)
    refs: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)


_layers: dict[int, Layer] = {}


def world(device: str) -> tuple[Any, ...]:
    """What torch, the environment and whoever watches are set to, as far as it decides what a layer does."""
    return (
        torch.is_autocast_enabled(device),
        torch._C._is_tracing(),
        _transforms(),
        forward_ad._current_level >= 0,
        _hooks is not None and _hooks(True),
        torch._C._get_deterministic_algorithms(),
        torch.get_num_threads(),
        torch._C._get_float32_matmul_precision(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        tape.playing,
        recorder.tape,
        kernels._forced,
        settings.deciding(),
        any(_global_hooks),
    )


class State:
    """A module's own state, to compare with what it becomes: options, hooks, parameters, modules inside."""

    def __init__(self, module: nn.Module) -> None:
        state = vars(module)
        self.module, self.kind, self.count = weakref.ref(module), type(module), len(state)
        plain = [name for name, value in state.items() if type(value) in SIMPLE]
        empty = [name for name, value in state.items() if isinstance(value, dict) and not value]
        self.read = operator.itemgetter(*plain, *empty)
        self.values = (*[state[name] for name in plain], *[{} for _ in empty])
        rest = set(state) - set(plain) - set(empty) - {"_parameters", "_buffers", "_modules"}
        self.objects = tuple((name, state[name]) for name in rest)
        self.modules = dict(state["_modules"])
        tables = (state["_parameters"], state["_buffers"])
        self.tensors = [
            (table, name, value, value.dtype, value.shape, value.requires_grad)
            for table in tables
            for name, value in table.items()
            if value is not None
        ]
        hooks = any(name.endswith("hooks") for name, _ in self.objects)
        methods = any(hasattr(value, "__self__") for _, value in self.objects)  # they would keep the module alive
        self.bindable = not hooks and not methods


class Bound:
    """One call, and the guard it stands behind."""

    def __init__(
        self,
        conv: Any,
        call: Call,
        sources: list[Any],
        x: Tensor,
        edge_index: Tensor,
        names: tuple[str, ...],
        record: Any,
    ) -> None:
        self.call, self.sources, self.names, self.record = call, sources, names, record
        self.states = [State(module) for module in conv.modules()]
        self.like = (x.dtype, x.device, x.shape[1:], x.requires_grad, x.stride())
        self.rows = x.shape[0]
        self.last = None if x.requires_grad else weakref.ref(x)
        self.mark = mark_of(edge_index)
        self.device = x.device.type
        self.world = world(self.device)
        self.told = (record.path, record.reason, record.plan, record.key)
        self.learns = layer.learns(call, [x if source is None else source for source in sources])

    def fits(self, x: Tensor, edge_index: Tensor) -> bool:
        """Whether everything is as it was when this call was bound."""
        if type(x) is not Tensor or x.shape[0] != self.rows:
            return False
        if (x.dtype, x.device, x.shape[1:], x.requires_grad, x.stride()) != self.like:
            return False
        if mark_of(edge_index) != self.mark:
            return False
        if self.last is not None:  # a constant that comes again may be served by what is kept of it
            if self.last() is x:
                return False
            self.last = weakref.ref(x)
        if world(self.device) != self.world:
            return False
        for one in self.states:
            module = one.module()
            if module is None:
                return False
            state = module.__dict__
            if module.__class__ is not one.kind or len(state) != one.count or one.read(state) != one.values:
                return False
            if state["_modules"] != one.modules:
                return False
            for name, value in one.objects:
                if state.get(name) is not value:
                    return False
            for table, name, value, dtype, shape, learns in one.tensors:
                if table.get(name) is not value or value.dtype is not dtype or value.shape != shape:
                    return False
                if value.requires_grad is not learns:
                    return False
        return True

    def run(self, x: Tensor) -> Tensor:
        """The step."""
        tensors = []
        for source in self.sources:
            tensors.append(x if source is None else source)
        record = self.record
        record.calls += 1
        record.path, record.reason, record.plan, record.key = self.told
        if self.learns:
            return layer.differentiable(self.call, *tensors)
        return layer.plain(self.call, tensors)[0]


def step(conv: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call that is bound, else MISS."""
    known = _layers.get(id(conv))
    if known is None or len(args) < 2 or known.conv() is not conv:
        return MISS
    edge_index = args[1]
    found = known.graphs.get(id(edge_index))
    if found is None or known.refs[id(edge_index)]() is not edge_index:
        return MISS
    x = args[0]
    if x.__class__ is not Tensor:
        return MISS
    for value in args[2:]:
        if value is not None:
            return MISS
    for name in kwargs:
        if kwargs[name] is not None:
            return MISS
    bound = found.get((torch.is_grad_enabled(), x.requires_grad))
    if bound is None or tuple(kwargs) != bound.names or not bound.fits(x, edge_index):
        return MISS
    return bound.run(x)


def bind(
    conv: Any, args: tuple[Any, ...], kwargs: dict[str, Any], noted: list[layer.Noted], out: Any, record: Any
) -> None:
    """Keep the one call of compile.linear that gave a layer's result, where it read nothing but x and parameters."""
    if len(noted) != 1 or noted[0].out is not out or len(args) < 2 or not isinstance(args[1], Tensor):
        return
    call, tensors, x, edge_index = noted[0].call, noted[0].tensors, args[0], args[1]
    if type(x) is not Tensor or type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        return
    if any(value is not None for value in (*args[2:], *kwargs.values())):
        return
    if call.timed is not None or call.plan.hoisted or x.is_inference() or not _usual(x.device.type):
        return
    mark = mark_of(edge_index)
    own = {id(p) for module in conv.modules() for p in (*module._parameters.values(), *module._buffers.values())}
    if mark is None or any(t is not x and id(t) not in own for t in tensors):
        return
    known = _layers.get(id(conv))
    if known is None or known.conv() is not conv:
        forget = functools.partial(_layers.pop, id(conv))  # in C, which no signal interrupts
        known = _layers[id(conv)] = Layer(weakref.ref(conv, forget))
    call.keep = None  # it would hold x
    number = id(edge_index)
    if number not in known.graphs or known.refs[number]() is not edge_index:
        while len(known.graphs) >= GRAPHS:
            oldest = next(iter(known.graphs))
            known.graphs.pop(oldest, None)
        known.graphs[number] = {}
        known.refs[number] = weakref.ref(edge_index, functools.partial(known.graphs.pop, number))
    sources = [None if t is x else t for t in tensors]
    made = Bound(conv, call, sources, x, edge_index, tuple(kwargs), record)
    if all(one.bindable for one in made.states):
        known.graphs[number][torch.is_grad_enabled(), x.requires_grad] = made


def _usual(device: str) -> bool:
    """Whether nobody watches, and nothing is on that the long way would look at in every call."""
    now = world(device)
    return not any(now[:5]) and not any(now[8:11]) and tape.playing and not any(_global_hooks)


def forget(conv: Any = None) -> None:
    """Unbind a layer's steps, or those of all."""
    if conv is None:
        _layers.clear()
    else:
        _layers.pop(id(conv), None)
