"""Which layers of a model are followed by a BatchNorm or a Linear and by nothing else, read from its forward.

The forward is called once with symbols, in a world of its own: self, its modules, the functions it calls and every
global are stand-ins. torch.fx records who reads what. What a model may decide by is then known: by constants of its
own, which are written down (Trace.stands looks whether they are still there), and by arguments that are None or plain
numbers. A decision by anything else ends the trace with a reason, and nothing is folded.
"""

from __future__ import annotations

import dis
import operator
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch_geometric.nn import GATConv
from torch_geometric.nn.norm import BatchNorm

from stretto.layers import relations
from stretto.layers.base import LINEAR, hooked, is_stock

LAYERS = (*relations.SUMS, GATConv)  # into whose weights something may be folded
NORMS = (torch.nn.BatchNorm1d, BatchNorm)
PLAIN = (bool, int, float, str, type(None), torch.dtype)
BUILTINS = {b.__name__: b for b in (range, zip, enumerate, len, reversed, list, tuple, dict)}  # run as they are
LOOKS_AROUND = frozenset(("locals", "globals", "vars", "eval", "exec", "dir"))  # builtins that see what is not given
NEVER = (  # in the names of instructions: what does more than to compute
    *("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL", "LOAD_NAME"),
    *("YIELD", "AWAIT", "IMPORT", "SETUP", "MATCH_", "BUILD_CLASS"),
)
HELD = ("", "_parameters", "_buffers", "_modules")  # where a module keeps its attributes; "": itself
ABSENT: Any = object()


class Untraceable(Exception):
    """Raised by what stands for something: the forward does more than a trace can show."""


@dataclass(frozen=True)
class Chain:
    """A layer, and the BatchNorm, the Linear, or the two in this order, that are all that its result goes through."""

    layer: Any
    norm: Any = None
    linear: Any = None

    @property
    def after(self) -> list[Any]:
        return [module for module in (self.norm, self.linear) if module is not None]


@dataclass
class Trace:
    """What a forward does: its chains, why a layer has none, and all that this rests on."""

    chains: list[Chain] = field(default_factory=list)
    refused: list[tuple[Any, str]] = field(default_factory=list)  # (layer, why what follows it is not folded)
    constants: list[tuple[str, str, Any]] = field(default_factory=list)  # of the model: (HELD, key, what is there)
    classes: list[tuple[str, Any]] = field(default_factory=list)  # of its classes, the nearest first: (name, ...)
    outside: list[tuple[Any, str, Any]] = field(default_factory=list)  # of globals and namespaces: (names, name, ...)
    lists: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)  # (ModuleList or Sequential, its modules)
    methods: dict[str, Any] = field(default_factory=dict)  # of the model, called by its forward

    def stands(self, model: Any) -> bool:
        """Whether the model still has all that its forward decided by."""
        state, kind = model.__dict__, type(model)
        held = {where: state[where] if where else state for where in HELD}
        return (
            all(held[where].get(key, ABSENT) is value for where, key, value in self.constants)
            and all(getattr(kind, key, ABSENT) is value for key, value in self.classes)
            and all(where.get(key, ABSENT) is value for where, key, value in self.outside)
            and all(_holds(found, modules) for found, modules in self.lists)
        )


def _holds(found: Any, modules: tuple[Any, ...]) -> bool:
    """Whether a ModuleList or Sequential has the same modules as before, and nobody watches it."""
    now = tuple(found._modules.values())
    return len(now) == len(modules) and all(map(operator.is_, now, modules)) and not hooked(found)


class Modules(tuple[Any, ...]):
    """The modules of a torch.nn.ModuleList. Two lists of the same modules are two lists, unlike tuples."""

    def __eq__(self, other: object) -> bool:
        raise Untraceable("the model's forward compares modules or functions")

    __hash__ = tuple.__hash__

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return type(self)(found) if isinstance(at, slice) else found

    def __repr__(self) -> str:
        raise Untraceable("the model's forward makes text of itself, a module or a function")


class InTurn(Modules):
    """The modules of a torch.nn.Sequential: called one after the other."""

    def __call__(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


@dataclass(frozen=True)
class InOrder:
    """The forward of a torch_geometric.nn.Sequential for which PyG has written none: its modules in their order."""

    arguments: tuple[str, ...]
    children: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]  # (name, arguments, results)

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        out = None
        for name, given, made in self.children:
            out = getattr(model, name)(*[values[key] for key in given])
            values.update([(made[0], out)] if len(made) == 1 else zip(made, out, strict=False))
        return out


def is_plain(value: Any) -> bool:
    """Whether a value is a constant that a forward may decide by."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


def traced(model: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace | str:
    """What function(model, *args, **kwargs) does, for any values of what is no constant, or why that is not known."""
    graph = fx.Graph()
    tracer = _Tracer(graph)
    trace = Trace()

    def symbol(name: str, value: Any) -> Any:
        return value if is_plain(value) else tracer.proxy(graph.placeholder(name))

    try:
        given = [symbol(f"argument_{i}", value) for i, value in enumerate(args)]
        named = {name: symbol(name, value) for name, value in kwargs.items()}
        twin = function if type(function) is InOrder else _twin(function, tracer, trace, asks=True)
        made = twin(_Self(model, tracer, trace), *given, **named)
        graph.output(tracer.create_arg(made))
    except Untraceable as error:
        return str(error)
    except Exception as error:  # whatever a user's code raises when it meets a symbol
        return f"the model's forward could not be traced ({type(error).__name__}: {error})".splitlines()[0]
    _read(graph, trace)
    return trace


# ---- what the graph says ----


def _read(graph: fx.Graph, trace: Trace) -> None:
    """Chains, and the layers whose BatchNorm or Linear is not theirs alone."""
    times = Counter(id(_called(node)) for node in graph.nodes)
    for node in graph.nodes:
        layer = _called(node)
        if not any(is_stock(layer, kind) for kind in LAYERS):
            continue
        followers = [found for user in node.users if (found := _follows(user, node)) is not None]
        if not followers:
            continue
        if len(node.users) > 1:
            trace.refused.append((layer, "its result is read more than once"))
        elif times[id(layer)] > 1 or times[id(followers[0])] > 1:
            trace.refused.append((layer, "it, or what follows it, is called more than once"))
        elif type(followers[0]) in LINEAR:
            trace.chains.append(Chain(layer, None, followers[0]))
        else:
            (user,) = node.users
            ends = [found for last in user.users if (found := _follows(last, user)) is not None]
            alone = len(user.users) == 1 and ends and type(ends[0]) in LINEAR and times[id(ends[0])] == 1
            trace.chains.append(Chain(layer, followers[0], ends[0] if alone else None))


def _called(node: fx.Node) -> Any:
    """The module that a node calls, or None."""
    return _told(node.target)[0] if type(node.target) is _Module else None


def _follows(user: fx.Node, node: fx.Node) -> Any:
    """The BatchNorm or Linear that a node calls with another node's result, or None."""
    called = _called(user)
    alone = user.args == (node,) and not user.kwargs
    return called if alone and type(called) in (*NORMS, *LINEAR) else None


# ---- the world of a trace ----


class _Value(fx.Proxy):
    """What is not known before the call. Everything that is done with it is a node of the graph, or ends the trace."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})

    def __repr__(self) -> str:
        raise Untraceable("the model's forward makes text of a tensor")

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __hash__(self) -> int:  # a dict finds a number by its value, and by that of a symbol nothing
        raise Untraceable("the model's forward keeps a tensor, or what it read of one, in a set or as a key")


class _Tracer(fx.proxy.GraphAppendingTracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)


def _told(stand_in: Any) -> Any:
    return object.__getattribute__(stand_in, "told")


class _Closed:
    """Something of which only what its own class says can be read or done."""

    __slots__ = ("told",)
    __hash__ = object.__hash__  # the graph keeps what it calls
    __name__ = "stand_in"

    def __init__(self, *told: Any) -> None:
        object.__setattr__(self, "told", told)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise Untraceable(f"the model's forward reads {name} of {_told(self)[0]}".splitlines()[0])

    def __eq__(self, other: object) -> bool:
        raise Untraceable("the model's forward compares modules or functions")

    def __bool__(self) -> bool:
        return self == self

    def __repr__(self) -> str:
        raise Untraceable("the model's forward makes text of itself, a module or a function")

    __str__ = __repr__


class _Function(_Closed):
    """A function of which nothing is known: it may do anything with what it is given."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _, tracer = _told(self)
        return tracer.create_proxy("call_function", self, args, kwargs)


class _Module(_Function):
    """A module of the model: it may be called."""


class _Namespace(_Closed):
    """An imported module, such as torch: its functions may be called."""

    def __getattribute__(self, name: str) -> Any:
        module, tracer, trace = _told(self)
        return _stand_in(getattr(module, name), (vars(module), name), tracer, trace)


class _Self(_Closed):
    """The model itself: what is read of it is written down."""

    def __getattribute__(self, name: str) -> Any:
        return _attribute(self, name, *_told(self))


def _attribute(stand_in: Any, name: str, model: Any, tracer: Any, trace: Trace) -> Any:
    """What stands for model.name. Python looks among the properties of a class, then the instance, then the class."""
    owner: Any = next((kind for kind in type(model).__mro__ if name in vars(kind)), None)
    of_class = ABSENT if owner is None else vars(owner)[name]
    if hasattr(type(of_class), "__set__") or name.startswith("__"):
        raise Untraceable(f"the model's forward reads the property {name}")
    trace.classes.append((name, getattr(type(model), name, ABSENT)))
    state = model.__dict__
    where = next((where for where in HELD if name in (state[where] if where else state)), None)
    if where == "" or of_class is ABSENT:
        if where is None:
            raise Untraceable(f"the model has no {name}")
        value = state[where][name] if where else state[name]
        trace.constants.append((where, name, value))
        if where == "_modules" and value is not None:
            return _module(value, tracer, trace)
        if where and value is not None:
            return tracer.create_proxy("get_attr", name, (), {})
        return _stand_in(value, (state, name), tracer, None)
    trace.constants.append(("", name, ABSENT))
    if not isinstance(of_class, types.FunctionType) or of_class.__module__.startswith("torch"):
        raise Untraceable(f"the model's forward reads {name} of its class")
    trace.methods[name] = of_class
    return types.MethodType(_twin(of_class, tracer, trace, asks=False), stand_in)


def _module(module: Any, tracer: Any, trace: Trace) -> Any:
    """What stands for a module; lists and sequences are seen through."""
    if type(module) not in (torch.nn.ModuleList, torch.nn.Sequential) or hooked(module):
        return _Module(module, tracer)
    inner = tuple(module._modules.values())
    trace.lists.append((module, inner))
    kind = Modules if type(module) is torch.nn.ModuleList else InTurn
    return kind(_module(one, tracer, trace) for one in inner)


def _stand_in(value: Any, found: tuple[Any, str], tracer: Any, trace: Trace | None) -> Any:
    """What stands for something that is no module of the model. found: where; trace: where a constant is noted."""
    if is_plain(value):
        if trace is not None:
            trace.outside.append((*found, value))
        return value
    if isinstance(value, types.ModuleType):
        return _Namespace(value, tracer, trace)
    if callable(value) and not isinstance(value, (torch.nn.Module, types.MethodType)):  # a method may hold the model
        return _Function(value, tracer)
    raise Untraceable(f"the model's forward reads {found[1]}, which is a {type(value).__name__}")


def _twin(function: Any, tracer: Any, trace: Trace, *, asks: bool) -> Any:
    """The function in a world of stand-ins. asks: it may ask whether its arguments are None."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_freevars:
        raise Untraceable("the model's forward reads a closure or calls super()")
    code = function.__code__
    if code.co_flags & 0x2AC:  # *args, **kwargs, generators, coroutines
        raise Untraceable("the model's forward takes *args or **kwargs")
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not all(map(is_plain, defaults)):
        raise Untraceable("an argument of the model's forward has a default that is no constant")
    names, world = function.__globals__, dict[str, Any](__builtins__={})
    given = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if asks else ())
    for name in {step.argval for step in _steps(code, given, code.co_varnames[:1]) if step.opname == "LOAD_GLOBAL"}:
        if name in names:
            world[name] = _stand_in(names[name], (names, name), tracer, trace)
            continue
        if name in LOOKS_AROUND:
            raise Untraceable(f"the model's forward calls {name}()")
        trace.outside.append((names, name, ABSENT))
        world[name] = BUILTINS.get(name) or _Function(name, tracer)
    twin = types.FunctionType(code, world, argdefs=function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _steps(code: types.CodeType, given: set[str], own: tuple[str, ...]) -> Iterator[dis.Instruction]:
    """The instructions of a function and of those inside it, or Untraceable. own: the name of self; given: arguments
    of which it is known whether they are None."""
    if getattr(code, "co_exceptiontable", b""):
        raise Untraceable("the model's forward has a with or a try")
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    stored = {name for step in steps if "STORE_FAST" in step.opname for name in _names(step)}
    for i, step in enumerate(steps):
        if any(word in step.opname for word in NEVER):
            raise Untraceable(f"the model's forward does more than to compute ({step.opname})")
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval.startswith("__"):
            raise Untraceable(f"the model's forward reads {step.argval}")  # which stand-ins have, too: of their own
        if step.opname == "IS_OP" or step.opname.endswith(("IF_NONE", "IF_NOT_NONE")):
            _check_none(steps[: i + 1], given - stored, set(own) - stored)
        yield step
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _steps(constant, set(), ())
        elif isinstance(constant, str) and "__" in constant:
            raise Untraceable("the model's forward has a text with __")  # "{0.__class__}".format() reads it


def _check_none(steps: list[dis.Instruction], given: set[str], own: set[str]) -> None:
    """Whether something is None may be asked of arguments and of self: of what else is None, a trace does not know."""
    count = 1
    if steps[-1].opname == "IS_OP":
        count = 2
        if len(steps) < 2 or steps[-2].opname != "LOAD_CONST" or steps[-2].argval is not None:
            raise Untraceable("the model's forward asks whether something is something else")
    asked, before = steps[-count - 1 : -count], steps[-count - 2 : -count - 1]
    straight = not any(step.is_jump_target for step in steps[-count:])
    if straight and asked and "LOAD_FAST" in asked[0].opname and _names(asked[0])[-1] in given:
        return
    attribute = straight and asked and asked[0].opname == "LOAD_ATTR" and not asked[0].is_jump_target
    if attribute and before and "LOAD_FAST" in before[0].opname and _names(before[0])[-1] in own:
        return
    raise Untraceable("the model's forward asks whether a result is None")


def _names(step: dis.Instruction) -> tuple[str, ...]:
    """The variables an instruction reads or writes."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)
