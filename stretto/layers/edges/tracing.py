"""What a layer's message() computes, read by calling it with symbols: x_j, or w * x_j. Unknown whenever in doubt.

message() must be a function of its arguments alone: one that reads self, a global, a default or a closure may give
another result at the next call, so it is not traced. What it does to its arguments is then recorded by torch.fx, once
for each set of arguments that are None.
"""

from __future__ import annotations

import dis
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import fx
from torch_geometric.nn import MessagePassing

SPECIAL = frozenset(MessagePassing.special_args)
OUTSIDE = (
    "GLOBAL",
    "_NAME",
    "DEREF",
    "CLOSURE",
    "CLASSDEREF",
    "YIELD",
    "MAKE_FUNCTION",
)  # in the names of instructions
CHANGES = ("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "INPLACE")  # likewise


@dataclass(frozen=True)
class Message:
    """weight * source: `source` is the argument lifted from the sending nodes; no weight: it alone.

    column: the weight was made a column ("view", "unsqueeze"); else it is multiplied as it is.
    """

    source: str
    weight: str | None = None
    column: str = ""


def message_of(function: Callable[..., Any], names: tuple[str, ...], absent: frozenset[str]) -> Message | str:
    """What message(self, **names) returns where the arguments in `absent` are None, or why that is not known."""
    return impure(function) or _message_of(function.__code__, names, absent)


@lru_cache(maxsize=512)
def _message_of(code: types.CodeType, names: tuple[str, ...], absent: frozenset[str]) -> Message | str:
    """The same of a function of this code: nothing else decides, since it has neither globals nor defaults."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    nodes = {name: graph.placeholder(name) for name in names}
    arguments = {name: None if name in absent else fx.Proxy(node, tracer) for name, node in nodes.items()}
    try:
        made = types.FunctionType(code, {"__builtins__": {}})(None, **arguments)
    except Exception as error:  # whatever a user's code raises when it meets a symbol
        return f"message() could not be traced ({type(error).__name__})"
    if not isinstance(made, fx.Proxy):
        return "message() returns no tensor"
    if len(_needed(made.node) | set(nodes.values())) < len(graph.nodes):
        return "message() does more than to compute what it returns"
    return _read(made.node) or "message() is neither x_j nor w * x_j"


def _needed(node: fx.Node) -> set[fx.Node]:
    """The node, and all that it is computed from."""
    found, open_ = {node}, [node]
    while open_:
        new = set(open_.pop().all_input_nodes) - found
        found |= new
        open_ += new
    return found


def impure(function: Any) -> str | None:
    """Why a function may depend on more than its arguments, or None."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return "message() is not a plain function"
    return _impure(function.__code__)


@lru_cache(maxsize=512)
def _impure(code: types.CodeType) -> str | None:
    own = code.co_varnames[0] if code.co_argcount else None
    if code.co_flags & 0x2AC or own is None:  # *args, **kwargs, generators, coroutines
        return "message() takes arguments in an unusual way"
    for step in dis.get_instructions(code):
        if step.opname == "KW_NAMES":  # of a call with keywords: it reads nothing
            continue
        if any(word in step.opname for word in OUTSIDE) or step.opname.startswith("IMPORT"):
            return "message() reads more than its arguments"
        if any(word in step.opname for word in CHANGES) or (step.opname == "BINARY_OP" and step.argrepr.endswith("=")):
            return "message() changes an argument in place"
        touched = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if "FAST" in step.opname and own in touched:
            return "message() reads self"
    return None


def _read(node: fx.Node) -> Message | None:
    if _is_source(node):
        return Message(str(node.target))
    product = (node.op == "call_function" and node.target is operator.mul) or (
        node.op == "call_method" and node.target in ("mul", "__mul__", "__rmul__", "multiply")
    )
    if not product or len(node.args) != 2 or node.kwargs:
        return None
    for one, other in (node.args, node.args[::-1]):
        if isinstance(one, fx.Node) and isinstance(other, fx.Node) and _is_source(one):
            weight = _weight(other)
            if weight is not None:
                return Message(str(one.target), *weight)
    return None


def _is_source(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).endswith("_j") and str(node.target) not in SPECIAL


def _weight(node: fx.Node) -> tuple[str, str] | None:
    """(argument, how it became a column) of a weight, or None."""
    if node.op == "placeholder":
        name = str(node.target)
        return None if name.endswith(("_i", "_j")) or name in SPECIAL else (name, "")
    inner = node.args[0] if node.args else None
    if not isinstance(inner, fx.Node) or inner.op != "placeholder" or node.kwargs:
        return None
    found = _weight(inner)
    if found is None:
        return None
    rest = node.args[1:]
    if node.op == "call_method" and node.target in ("view", "reshape") and rest in ((-1, 1), ((-1, 1),), ([-1, 1],)):
        return found[0], "view"
    if node.op == "call_method" and node.target == "unsqueeze" and rest in ((-1,), (1,)):
        return found[0], "unsqueeze"
    if (
        node.op == "call_function"
        and node.target is operator.getitem
        and rest in (((slice(None), None),), ((..., None),))
    ):
        return found[0], "unsqueeze"
    return None
