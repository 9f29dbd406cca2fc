"""One layer of a model, and the facts found about it: of each of its calls, and of all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field

LARGEST = ("hops", "width_in", "width_out", "aggregated", "learned_input", "constant_input", "bent", "norm")
KINDS, TYPES = ("-", "C", "A", "MP"), ("-", "L", "P", "R")
PICK = "pick"  # one message of all that are sorted, as a median is: what parts of the neighbours have is no partial one


@dataclass
class Layer:
    """One layer of the model and the facts found about it."""

    path: str
    module: str
    kind: str = "-"
    type: str = "-"
    hops: int = 0
    reduces: list[str] = field(default_factory=list)
    learned_input: bool = False  # rows that come in depend on parameters that learn: they need gradients
    later: dict[int, tuple[int, bool]] = field(default_factory=dict)  # what hops after the first read, as in `rounds`
    constant_input: bool = False  # aggregates something that does not depend on parameters
    bent: bool = False  # something non-linear comes between two hops
    norm: bool = False  # makes edge weights from the graph alone, every step
    width_in: int = 0
    width_out: int = 0
    aggregated: int = 0  # width at which rows are aggregated
    ops: list[int] = field(default_factory=list)
    calls: list[Layer] = field(default_factory=list)  # a layer may be called several times: each as one of its own

    @property
    def rounds(self) -> list[tuple[int, bool]]:
        """What every round of aggregation reads, in order: values of a row, and whether gradients go back to it."""
        # The first hop may be done with rows as they came in, and a product before it on what was pulled.
        return [
            call.later.get(hop, (call.width_in, call.learned_input))
            for call in self.calls
            for hop in range(max(call.hops, 1))
        ]

    def widen(self, kind: str) -> None:
        """The layer is of this kind, unless it is of a more general one."""
        self.kind = max(self.kind, kind, key=KINDS.index)

    def aggregate(self, reduce: str, hops: int, grad: bool, bent: bool) -> None:
        """Rows as wide as the layer's are added up, after so many hops before. grad: they need gradients; bent:
        something non-linear came before."""
        self.reduces.append(reduce)
        self.later |= {hops: (self.aggregated, grad)} if hops else {}
        self.hops = max(self.hops, hops + 1)
        self.bent |= bent and hops > 0

    @property
    def name(self) -> str:
        """Class and type, as "C, L"."""
        return f"{self.kind}, {self.type}" if self.type != "-" else self.kind


def together(layer: Layer, calls: list[Layer]) -> Layer:
    """All calls of a layer as one."""
    for call in calls:
        powers = call.hops > 1 and not call.bent  # with a GRU in between they are rounds, and no power of A
        call.type = "-" if not call.hops else call.type if call.type != "-" else "P" if powers else "L"
        layer.widen(call.kind)
        layer.type = max(layer.type, call.type, key=TYPES.index)
        layer.reduces += call.reduces
        layer.ops += call.ops
        for largest in LARGEST:
            setattr(layer, largest, max(getattr(layer, largest), getattr(call, largest)))
    layer.calls = calls
    return layer
