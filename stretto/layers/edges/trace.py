"""What a function of edges computes that calls modules of self, such as self.net(torch.cat([x_i, x_j, e], -1)).

It is called once with symbols, in a world of its own: of torch it finds the functions in KINDS, of self whatever it
calls, taken for a module. torch.fx records what becomes of its arguments; anything else it touches ends the trace with
a reason. A trace is found again by all that it was made from: code, and what its globals and torch's names are by now.
Which of those calls act on every row by itself is told by shape_of.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch_geometric.utils
from torch import fx

# What a call does to rows, by the name of the function, operator or method.
KINDS: dict[str, str] = {
    **dict.fromkeys(("relu", "tanh", "sigmoid", "silu", "gelu", "softplus", "elu", "leaky_relu", "mish"), "one"),
    **dict.fromkeys(
        ("exp", "log", "log1p", "sqrt", "rsqrt", "square", "abs", "sin", "cos", "neg", "reciprocal"), "one"
    ),
    **dict.fromkeys(("add", "sub", "mul", "div", "truediv", "pow", "multiply", "subtract"), "two"),
    **dict.fromkeys(("sum", "mean", "norm"), "across"),
    **dict.fromkeys(("cat", "concat"), "cat"),
    **dict.fromkeys(("unsqueeze", "view", "reshape", "squeeze", "getitem"), "column"),
}
ACTS = frozenset(name for name, kind in KINDS.items() if kind in ("one", "two", "across", "cat"))
NEVER = (  # in the names of instructions: what does more than to compute from arguments
    *("LOAD_NAME", "STORE_NAME", "DEREF", "CLOSURE", "YIELD", "AWAIT", "IMPORT", "DELETE", "MAKE_", "SETUP"),
    *("INPLACE", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE"),
)
LIBRARIES = (torch, torch.nn, torch.nn.functional)
SCATTER = (torch_geometric.utils.scatter,)  # in a tuple, where patch() does not bind ours to it
# What a scatter may reduce with, and our word for it.
REDUCTIONS = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min", "amin": "min"}
Shape = tuple[int, ...]


class Untraceable(Exception):
    """Raised by what stands for self and torch: the function does more than a trace can show."""


@dataclass(frozen=True, eq=False)
class Trace:
    """What a function did: its calls in their order, its arguments by name, its result, and what it read of self."""

    calls: tuple[fx.Node, ...]
    arguments: dict[str, fx.Node]
    output: fx.Node
    read: frozenset[str]


def traced(function: Any, names: tuple[str, ...], absent: frozenset[str]) -> Trace | str:
    """What function(self, **names) does where the arguments in `absent` are None, or why that is not known."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return "it is not a plain function"
    code, world = function.__code__, function.__globals__
    outside = _outside(code)
    if isinstance(outside, str):
        return outside
    values = tuple(_known(world.get(name)) for name in outside)
    bound = tuple(getattr(where, name, None) for name in code.co_names if name in ACTS for where in LIBRARIES)
    return _traced(code, names, absent, values, bound)


@lru_cache(maxsize=512)
def _traced(
    code: types.CodeType, names: tuple[str, ...], absent: frozenset[str], values: tuple[Any, ...], bound: Any
) -> Trace | str:
    """The trace of a function of this code. values: of its globals; bound: what torch's names stand for by now."""
    world: dict[str, Any] = {"__builtins__": {}}
    for name, value in zip(_outside(code), values, strict=True):
        if value is None:
            return f"it reads the global {name}"
        world[name] = _stand_in(value)
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    arguments = {name: graph.placeholder(name) for name in names}
    inputs = {name: None if name in absent else fx.Proxy(node, tracer) for name, node in arguments.items()}
    twin = types.FunctionType(code, world)  # without defaults, which may be set anew: whoever asks knows all arguments
    read: set[str] = set()
    try:
        made = twin(_Self(tracer, read), **inputs)
    except Untraceable as error:
        return str(error)
    except Exception as error:  # whatever a user's code raises when it meets a symbol
        return f"it could not be traced ({type(error).__name__})"
    if not isinstance(made, fx.Proxy):
        return "it returns no tensor"
    calls = tuple(node for node in graph.nodes if node.op != "placeholder")
    for node in calls:
        if node.op != "call_module" and name_of(node).endswith("_"):
            return f"it edits a tensor in place ({name_of(node)})"
        flagged = kind_of(node) == "one" and any(value is True for value in node.args)
        if flagged or node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
            return "it edits a tensor in place"
    return Trace(calls, arguments, made.node, frozenset(read))


@lru_cache(maxsize=512)
def _outside(code: types.CodeType) -> tuple[str, ...] | str:
    """The globals that a code reads, or why it is not traced."""
    if code.co_flags & 0x2AC or not code.co_argcount:  # *args, **kwargs, generators, coroutines
        return "it takes arguments in an unusual way"
    if getattr(code, "co_exceptiontable", b""):
        return "it catches errors"
    names: dict[str, None] = {}
    for step in dis.get_instructions(code):
        if "GLOBAL" in step.opname:
            if step.opname != "LOAD_GLOBAL":
                return f"it changes or reads the global {step.argval}"
            names[step.argval] = None
        elif any(word in step.opname for word in NEVER):
            return "it does more than to compute from its arguments"
        elif step.opname == "BINARY_OP" and step.argrepr.endswith("="):
            return f"it edits a tensor in place ({step.argrepr})"
    return tuple(names)


def _known(value: Any) -> Any:
    """A global that a trace can do with, or None."""
    if any(value is library for library in LIBRARIES):
        return value
    name = getattr(value, "__name__", "")
    if name in ACTS and any(value is getattr(library, name, None) for library in LIBRARIES):
        return value
    return scatter if getattr(value, "__wrapped__", value) is SCATTER[0] else None


def _stand_in(value: Any) -> Any:
    return _Library(value) if isinstance(value, types.ModuleType) else value


def scatter(src: Any, index: Any, dim: int = 0, dim_size: Any = None, reduce: str = "sum") -> Any:
    """PyG's scatter in a trace: one call of this function, its arguments in their order."""
    if not isinstance(src, fx.Proxy):
        raise Untraceable("it scatters no tensor of its own")
    return src.tracer.create_proxy("call_function", scatter, (src, index, dim, dim_size, reduce), {})


class _Closed:
    """Something of which only what its own class says can be read or done."""

    __slots__ = ("told",)

    def __init__(self, *told: Any) -> None:
        object.__setattr__(self, "told", told)

    __hash__ = None  # type: ignore[assignment]


class _Library(_Closed):
    """torch, torch.nn or torch.nn.functional, with the functions that a trace knows and no others."""

    def __getattribute__(self, name: str) -> Any:
        (module,) = object.__getattribute__(self, "told")
        inner = getattr(module, name, None)
        if any(inner is library for library in LIBRARIES):
            return _Library(inner)
        if name not in ACTS or inner is None:
            raise Untraceable(f"it reads {module.__name__}.{name}")
        return inner


class _Self(_Closed):
    """The module whose function is traced: whatever is read of it is taken for a module that will be called."""

    def __getattribute__(self, name: str) -> Any:
        tracer, read = object.__getattribute__(self, "told")
        read.add(name)
        return _Module(tracer, name)


class _Module(_Closed):
    """A module of self: it may be called with one tensor, or compared with None."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tracer, name = object.__getattribute__(self, "told")
        if len(args) != 1 or kwargs or not isinstance(args[0], fx.Proxy):
            raise Untraceable(f"it calls self.{name} with more than one tensor")
        return tracer.create_proxy("call_module", name, args, {})

    def __getattribute__(self, name: str) -> Any:
        raise Untraceable(f"it reads self.{object.__getattribute__(self, 'told')[1]} other than to call it")

    def __eq__(self, other: object) -> bool:
        raise Untraceable(f"it reads self.{object.__getattribute__(self, 'told')[1]} other than to call it")

    def __bool__(self) -> bool:
        return self == self


def name_of(node: fx.Node) -> str:
    """The name of what a node calls."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def kind_of(node: fx.Node) -> str:
    """What a call does to rows: a value of KINDS, "module", or "" where that is not known."""
    if node.op == "call_module":
        return "module"
    return KINDS.get(name_of(node).strip("_"), "") if node.op in ("call_function", "call_method") else ""


def shape_of(node: fx.Node, shapes: Mapping[fx.Node, Shape | None]) -> Shape | None:
    """The shape of a row of a call's result, () or (width,); None unless each row comes from its own row alone."""
    kind, rest = kind_of(node), node.args[1:]
    kwargs = {key: value for key, value in node.kwargs.items() if value is not None}
    if kind == "cat":
        return _joined(node.args[0] if node.args else None, rest, kwargs, shapes)
    if kind == "two":
        return None if len(rest) != 1 or kwargs else _broadcast([_row(a, shapes) for a in node.args])
    shape = shapes.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if shape is None or any(isinstance(a, fx.Node) for a in (*rest, *kwargs.values())):
        return None
    if kind == "one":
        return shape
    if kind == "across":
        return _across(name_of(node), shape, rest, kwargs)
    return _column(name_of(node).strip("_"), shape, rest) if kind == "column" and not kwargs else None


def _joined(
    parts: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[fx.Node, Shape | None]
) -> Shape | None:
    """Rows side by side."""
    dim = rest[0] if rest else kwargs.get("dim")
    if not isinstance(parts, (list, tuple)) or dim not in (-1, 1) or len(rest) > 1 or set(kwargs) - {"dim"}:
        return None
    widths = [shapes.get(part) if isinstance(part, fx.Node) else None for part in parts]
    if any(w is None or len(w) != 1 for w in widths):
        return None
    return (sum(w[0] for w in widths if w is not None),)


def _row(value: Any, shapes: Mapping[fx.Node, Shape | None]) -> Shape | str | None:
    if isinstance(value, fx.Node):
        return shapes.get(value)
    return "number" if isinstance(value, (int, float)) else None


def _broadcast(shapes: Sequence[Shape | str | None]) -> Shape | None:
    """Of two rows, or a row and a number: as torch would, if it never lets rows meet columns."""
    rows = [s for s in shapes if s != "number"]
    if None in rows or not rows:
        return None
    result = [s for s in rows if isinstance(s, tuple)]
    if len({len(s) for s in result}) != 1:
        return None
    if result[0] == result[-1] or result[-1] == (1,):
        return result[0]
    return result[-1] if result[0] == (1,) else None


def _across(name: str, shape: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape | None:
    """sum, mean and norm over a row's columns."""
    names = ("p", "dim", "keepdim") if name == "norm" else ("dim", "keepdim")
    inputs = {**dict(zip(names, rest, strict=False)), **kwargs}
    norm = inputs.get("p", 2)
    if set(inputs) - set(names) or len(rest) > len(names) or not (norm == "fro" or isinstance(norm, (int, float))):
        return None
    dim = inputs.get("dim")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if len(shape) != 1 or dim not in (-1, 1):
        return None
    return (1,) if inputs.get("keepdim") is True else ()


# What makes a number per row a column, or the reverse: the arguments it may have, and the shapes before and after.
TO_COLUMN = {
    "view": (((-1, 1), ((-1, 1),), ([-1, 1],)), ((), (1,)), (1,)),
    "reshape": (((-1, 1), ((-1, 1),), ([-1, 1],)), ((), (1,)), (1,)),
    "unsqueeze": (((-1,), (1,)), ((),), (1,)),
    "squeeze": (((-1,), (1,)), ((1,),), ()),
}


def _column(name: str, shape: Shape, rest: tuple[Any, ...]) -> Shape | None:
    """A number per row made a column, a column made a number, or some columns of many."""
    if name in TO_COLUMN:
        known, before, after = TO_COLUMN[name]
        return after if rest in known and shape in before else None
    index = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple) else ()
    if len(index) != 2 or index[0] != slice(None):
        return None
    if index[1] is None:
        return (1,) if shape == () else None
    if len(shape) != 1 or not isinstance(index[1], slice):
        return None
    bounds = (index[1].start, index[1].stop, index[1].step)
    if not all(b is None or isinstance(b, int) for b in bounds):
        return None
    return (len(range(*index[1].indices(shape[0]))),)
