"""Eq. 3 and 5 as one engine: what a layer reads (own, local, remote) and what flows back, each as old as allowed.

The three slots are identities for autograd: a gradient that comes back belongs to the rows of this step's synchronous
input. Remote gradients travel to the rows' owners and are added there when the layer's input gets its gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stretto.dist.exchange import Exchange, Flight
from stretto.dist.part import Part
from stretto.dist.passing import passed
from stretto.dist.staleness import FRESH, Age, Reading, Staleness
from stretto.dist.timeline import Timeline
from stretto.dist.traffic import Traffic

Key = tuple[int, int]  # step, layer
KEPT = 1 << 17  # readings remembered


class Slots:
    """What a rank remembers of its layers' inputs and gradients, and reads by age."""

    def __init__(self, part: Part, staleness: Staleness, exchange: Exchange, timeline: Timeline) -> None:
        self.part, self.staleness, self.exchange, self.timeline = part, staleness, exchange, timeline
        self.traffic: list[Traffic] = []  # one per step
        self.readings: deque[Reading] = deque(maxlen=KEPT)
        self.step, self.layer = -1, 0
        self._widths: dict[int, torch.Size] = {}  # layer -> shape of a row of its input
        self._inputs: dict[Key, Tensor] = {}  # own rows
        self._arrivals: dict[Key, Flight] = {}  # remote rows
        self._local_gradients: dict[Key, Tensor] = {}
        self._returns: dict[Key, Flight] = {}  # gradients of own rows, from the ranks that read them

    def begin_step(self) -> None:
        """Forget what no bound reaches any more."""
        self.step += 1
        self.layer = 0
        self.timeline.step, self.timeline.phase = self.step, "forward"
        self.traffic.append(Traffic())
        oldest = self.step - self.staleness.memory_steps
        for memory in (self._inputs, self._arrivals, self._local_gradients, self._returns):
            for key in [key for key in memory if key[0] < oldest]:
                del memory[key]

    # ---- forward: Eq. 3 ----

    def enter(self, x: Tensor) -> tuple[int, Tensor]:
        """A layer begins: send its rows on their way. x [n_p, k] -> its number from 1, and x, whose gradient waits for
        the others' share."""
        self.layer += 1
        layer, rows = self.layer, x.detach()
        self._widths[layer] = x.shape[1:]
        self._inputs[self.step, layer] = rows
        sends = [(peer, rows[places].contiguous()) for peer, places in self.part.sends]
        into = rows.new_empty(self.part.halo.numel(), *x.shape[1:])
        receives = [(peer, into[first:last]) for peer, first, last in self.part.receives]
        self._arrivals[self.step, layer] = self._post(layer, sends, receives, into)
        return layer, passed(x, partial(self.add_returned, layer))

    def own(self, x: Tensor, layer: int) -> Tensor:
        """The rows that phi and psi read of the node itself."""
        if self.staleness.own == FRESH:
            return self._note(layer, "own", FRESH, x)
        key, age = self._pick("own", layer, self._inputs)
        return self._note(layer, "own", age, passed(x, lambda grad: grad, self._inputs[key]))

    def local(self, x: Tensor, layer: int) -> Tensor:
        """The rows of neighbours in this part."""
        if self.staleness.local == self.staleness.local_gradient == FRESH:
            return self._note(layer, "local", FRESH, x)
        key, age = self._pick("local", layer, self._inputs)
        return self._note(layer, "local", age, passed(x, partial(self.local_gradient, layer), self._inputs[key]))

    def remote(self, x: Tensor, layer: int) -> Tensor:
        """The rows of neighbours in other parts; waits for them. [h_p, k]."""
        key, age = self._pick("remote", layer, self._arrivals)
        rows = self._land(self._arrivals[key], age)
        return self._note(layer, "remote", age, passed(x, partial(self.send_back, layer), rows))

    # ---- backward: Eq. 5 ----

    def send_back(self, layer: int, grad: Tensor) -> None:
        """Gradients of remote rows go to their owners, whose add_returned() adds them. grad [h_p, k]."""
        back = [(peer, grad.new_empty(places.numel(), *grad.shape[1:])) for peer, places in self.part.sends]
        sends = [(peer, grad[first:last].contiguous()) for peer, first, last in self.part.receives]
        self._returns[self.step, layer] = self._post(layer, sends, back, grad)

    def add_returned(self, layer: int, grad: Tensor) -> Tensor:
        """The gradient of a layer's input, with what the ranks that read it sent back. grad [n_p, k]."""
        key, age = self._pick("remote_gradient", layer, self._returns)
        flight = self._returns[key]
        self._land(flight, age)
        self._note(layer, "remote_gradient", age, grad)
        if not self.part.sends:
            return grad
        total = grad.clone()
        for (_, taken), (_, places) in zip(flight.receives, self.part.sends, strict=True):
            total.index_add_(0, places, taken)
        return total

    def local_gradient(self, layer: int, grad: Tensor) -> Tensor:
        """Remember what local neighbours give, return what is as old as allowed. grad [n_p, k]."""
        self._local_gradients[self.step, layer] = grad
        key, age = self._pick("local_gradient", layer, self._local_gradients)
        return self._note(layer, "local_gradient", age, self._local_gradients[key])

    # ---- ages ----

    def _pick(self, slot: str, layer: int, memory: Mapping[Key, Any]) -> tuple[Key, Age]:
        """Where to read, and its age: as far back as the bound allows and something is remembered."""
        bound = self.staleness.bounds[slot]
        direction = 1 if slot.endswith("gradient") else -1
        # Eq. 3 reads the input of a layer before this one, Eq. 5 the gradient of a layer's input after it.
        far = range(bound.layers, 1, -1)
        layers = next((d for d in far if self._fits(layer, layer + direction * (d - 1), memory)), 1)
        at = layer + direction * (layers - 1)
        steps = next(t for t in range(bound.steps, -1, -1) if (self.step - t, at) in memory)
        if self.staleness.newest and slot.startswith("remote"):
            steps = next((t for t in range(steps) if memory[self.step - t, at].done), steps)
        return (self.step - steps, at), Age(steps, layers)

    def _fits(self, layer: int, other: int, memory: Mapping[Key, Any]) -> bool:
        return (self.step, other) in memory and self._widths[other] == self._widths[layer]

    def _note(self, layer: int, slot: str, age: Age, value: Tensor) -> Tensor:
        self.readings.append(Reading(self.step, layer, slot, age))
        return value

    # ---- flights ----

    def _post(self, layer: int, sends: Any, receives: Any, rows: Tensor) -> Flight:
        self.traffic[-1].count(sends)
        return self.exchange.post(Flight(layer, self.timeline.now, sends, receives, rows))

    def _land(self, flight: Flight, age: Age) -> Tensor:
        if age.steps == 0:  # older rows were sent before the last step ended: no rank waits for another's work
            self.traffic[-1].syncs += 1
        return self.exchange.wait(flight)
