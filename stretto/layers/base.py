"""What every layer's file needs: why a call runs as stock, what it notes of a call, and checks of inputs and weights.

A layer is accelerated by a function fast(conv, *args, **kwargs) that computes what conv.forward would, or raises
Decline before it has changed anything; stock then runs, and report() says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn.dense import Linear

from stretto.compile import Order, Plan
from stretto.kernels import DTYPES
from stretto.layers.declines import Decline as Decline  # layers ask base for these
from stretto.layers.declines import Quiet as Quiet
from stretto.layers.declines import Small as Small
from stretto.layers.declines import same_type
from stretto.layers.watched import hooked as hooked

LAZY = "not initialised yet (lazy channels)"
SMALL = "a small graph: stock's few launches cost a GPU's host less than ours"


class Way(NamedTuple):
    """How a layer computed its result: what report() shows of it, and what explain() asks."""

    text: str = ""
    plan: Plan | Order | None = None  # the one chosen where there are several,
    key: Hashable = None  # and what the decision is kept under
    avoided: int = 0  # bytes of messages that stock would have built, where the layer knows
    builds: bool = False  # whether its messages are there all at once, as stock's are


UNKNOWN = Way()


@dataclass
class Record:
    """What a layer did last: path "fast", "stock" or "compiled", and the way it took or the reason it had."""

    path: str = ""
    reason: str = ""
    way: Way = UNKNOWN
    calls: int = 0
    begun: bool = False  # by a lazy layer's first call, which may be run again in backward (torch.utils.checkpoint)
    strict: str = ""  # the layer's name in the model that accelerate(strict=True) was asked for; "": it may fall back

    @property
    def plan(self) -> str:
        """The way in words."""
        return self.way.text

    @property
    def key(self) -> Hashable:
        """What the decision for the way is kept under, where there was one."""
        return self.way.key


_records: weakref.WeakKeyDictionary[object, Record] = weakref.WeakKeyDictionary()


def record_of(module: object) -> Record:
    """The record of a layer; kept beside it, never inside it."""
    record = _records.get(module)
    if record is None:
        record = _records[module] = Record()
    return record


def known_record(module: object) -> Record | None:
    """The record of a layer of which something was written down."""
    return _records.get(module)


def note(module: object, text: str, *, avoided: int = 0, builds: bool = False) -> None:
    """Write down what a layer does where there is nothing to choose."""
    record_of(module).way = Way(text, avoided=avoided, builds=builds)


def note_plan(module: object) -> Callable[[Hashable, Plan], None]:
    """What compile.linear calls with its choice."""
    record = record_of(module)

    def chosen(key: Hashable, plan: Plan) -> None:
        record.way = Way(plan.name, plan, key)

    return chosen


def note_order(module: object, order: Order, key: Hashable, text: str = "", avoided: int = 0) -> None:
    """The order of evaluation chosen for a layer that has several, and what the decision is kept under."""
    record_of(module).way = Way(text or order.name, order, key, avoided)


def messages(num_edges: int, columns: int, x: Tensor) -> int:
    """Bytes of messages [edges, columns] of x's type."""
    return num_edges * columns * x.element_size()


def note_fast(module: object) -> None:
    """Write down that a layer ran fast."""
    record = record_of(module)
    record.calls += 1
    record.path, record.reason = "fast", ""


def check_input(x: Any, *others: Any) -> Tensor:
    """Check that x is a plain matrix of nodes by channels, or Decline."""
    for tensor in (x, *others):
        if not isinstance(tensor, Tensor):
            raise Decline(f"the input is a {type(tensor).__name__}")
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            raise Decline(f"the input is a {type(tensor).__name__}, not a plain tensor")
        if tensor.layout != torch.strided:
            raise Decline("the input is a sparse matrix")
        if tensor.dim() != 2:
            raise Decline(f"the input has {tensor.dim()} dimensions")
        if tensor.dtype not in DTYPES:
            raise Decline(f"the input is {tensor.dtype}")
    result: Tensor = x
    return result


LINEAR = (torch.nn.Linear, Linear)  # exactly these: a class derived from one may compute anything


def weight_of(linear: Any, x: Tensor, *, bias: bool = False) -> Tensor:
    """The weight [out, in] of a Linear that does nothing but multiply, or Decline. bias: the caller adds its bias."""
    if type(linear) not in LINEAR:
        raise Decline(f"the weight is a {type(linear).__name__}")
    weight: Tensor = linear.weight
    if isinstance(weight, torch.nn.parameter.UninitializedParameter):
        raise Decline(LAZY)
    if hooked(linear):
        raise Decline("a hook is registered on the Linear inside, or its forward was replaced")
    if not bias and linear.bias is not None:
        raise Decline("the Linear inside has a bias, unlike the one PyG puts there")
    same_type(x, weight)
    if bias and linear.bias is not None:
        same_type(x, linear.bias)
        if linear.bias.shape != weight.shape[:1]:
            raise Decline("the Linear's bias does not fit its weight")
    if weight.size(1) != x.size(1):
        raise Decline(f"the weight takes {weight.size(1)} channels, the input has {x.size(1)}")
    return weight
