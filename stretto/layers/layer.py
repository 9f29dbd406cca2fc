"""Layer: all that is known of one class of PyG, stated once, at the end of the file that computes it.

accelerate(), strict=True, report(), explain(), trimming and stretto.dist read these records; nothing else knows a layer
by its name. stretto.layers.LAYERS is the table of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stretto.compile import Adjacency


class Conv(Protocol):
    """A layer of PyG as we read it: what all have, and by its name what its own class has."""

    aggr: Any
    flow: str
    training: bool
    message: Any
    update: Any

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None: ...


Fast = Callable[..., Any]
Condition = Callable[[Conv], "str | None"]  # of a layer: why no call of it can run fast, or None
Width = Callable[[Conv, int, int], int]  # of a layer, from the widths of x and of its result

SUM = ("add", "sum")
SIMPLE = (*SUM, "mean", "max", "min")


@dataclass(frozen=True)
class Summands:
    """What a layer adds up: reduce(A x) weight' + bias + root root_weight'; own: root is x itself."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    adj: Adjacency
    reduce: str
    root: Tensor | None = None
    root_weight: Tensor | None = None
    own: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether it is a sum of products with constant adjacency."""
        learns = self.adj.weight is not None and self.adj.weight.requires_grad
        return self.reduce not in ("max", "min") and not learns


Maps = tuple[Sequence[Tensor], Sequence[Tensor] | None]  # weights that what came passes through, and the own row


@dataclass(frozen=True)
class Split:
    """How a layer runs on a part of a graph: what its sources send, and what it makes of their sum and its own row."""

    made: Callable[[Conv, Tensor, Tensor], Tensor]  # conv, sum of what came [rows, k], own rows -> [rows, o]
    sent: Callable[[Conv, Tensor], Tensor] | None = None  # conv, x -> what the sources send; None: x itself
    normalised: bool = False  # whether A is GCN's, with the loop it adds to every row
    own_weight: Callable[[Conv], float] | None = None  # of its own row; None: 1
    maps: Callable[[Conv], Maps | str] | None = None  # that both pass through, or why their gain has no bound


@dataclass(frozen=True)
class Layer:
    """One class of PyG and how it runs fast."""

    kind: type
    fast: Fast  # fast(conv, *args) computes what the layer's own forward would, or raises Decline
    aggr: tuple[str, ...] = ()  # aggregations that run fast; (): any, or fast decides
    declines: tuple[Condition, ...] = ()  # what its constructor alone decides
    message: Width | None = None  # of the message that stock builds for every edge; None: fast notes what it avoids
    local: bool = False  # whether a node's result depends on its own in-edges alone
    copies: bool = False  # whether it takes x [batch, nodes, channels], of which rows meet along edges only
    few_edges: int = 0  # of a graph on a device, below which few launches decide and stock runs
    summands: Callable[..., Summands] | None = None  # of its arguments, where it is a sum of products
    split: Split | None = None  # how it runs on a part of a graph, where it can

    def why_declined(self, conv: Conv) -> str | None:
        """Why no call of this layer can run fast, or None where that depends on its input."""
        if self.aggr and conv.aggr not in self.aggr:
            return f"aggr is {conv.aggr}"
        for condition in self.declines:
            reason = condition(conv)
            if reason is not None:
                return reason
        return None


def when(holds: Callable[[Conv], bool], reason: str) -> Condition:
    """The condition that a layer of which this holds runs as stock."""
    return lambda conv: reason if holds(conv) else None


def as_wide_as_x(conv: Conv, i: int, o: int) -> int:
    """Messages are rows of x."""
    return i


def as_wide_as_result(conv: Conv, i: int, o: int) -> int:
    """Messages are as wide as the result."""
    return o


STOCK = "_stretto_stock"  # on every class that accelerate() gives to a module: the class it had


def stock_of(kind: type) -> type | None:
    """The class that an accelerated one was made of, or None: it is none."""
    found: type | None = kind.__dict__.get(STOCK)
    return found


def is_stock(module: Any, kind: type) -> bool:
    """Whether a module is exactly of a stock class, accelerated or not: not of a user's class derived from it."""
    found = type(module)
    return found is kind or stock_of(found) is kind
