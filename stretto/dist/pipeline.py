"""One layer of one part, in the order a schedule allows: exchange, graph op, neural op."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.dist import layers
from stretto.dist.part import Part
from stretto.dist.passing import Back, passed
from stretto.dist.schedule import Schedule
from stretto.dist.slots import Slots
from stretto.dist.timeline import Timeline
from stretto.layers.layer import Split


class Pipeline:
    """Runs the layers of one rank. group: for barriers."""

    def __init__(self, part: Part, schedule: Schedule, timeline: Timeline, group: dist.ProcessGroup | None) -> None:
        self.part, self.schedule, self.timeline, self.group = part, schedule, timeline, group

    def run(self, conv: nn.Module, split: Split, x: Tensor, slots: Slots) -> Tensor:
        """The layer on this part. x [n_p, k] -> [n_p, out]."""
        layer, x = slots.enter(x)
        own, local = slots.own(x, layer), slots.local(x, layer)
        together = self.schedule.macro == "sync"
        results: list[Tensor] = []
        for rows in ("all",) if together else ("interior", "boundary"):
            sources = local if rows == "interior" else torch.cat([local, slots.remote(x, layer)])
            sources = passed(sources, _after(partial(self.timeline.backward_ends, layer, rows)))
            with self.timeline.span(layer, "graph op", rows):
                out = layers.graph_op(conv, split, self.part, rows, sources)
            if self.schedule.micro == "async":
                out = self._neural(conv, split, rows, out, own, layer)
            results.append(out)
        out = results[0] if together else torch.cat(results)
        if self.schedule.micro == "sync":
            meet = partial(self._meet, layer, slots)
            meet()
            out = passed(out, _after(meet))
            out = self._neural(conv, split, "all", out, own, layer)
        return out

    def _neural(self, conv: nn.Module, split: Split, rows: str, gathered: Tensor, own: Tensor, layer: int) -> Tensor:
        piece = self.part.piece(rows)
        with self.timeline.span(layer, "neural op", rows):
            out = layers.neural_op(conv, split, self.part, rows, gathered, own[piece.first : piece.last])
        return passed(out, _after(partial(self.timeline.backward_begins, layer, rows)))

    def _meet(self, layer: int, slots: Slots) -> None:
        """Every part has finished its graph op (backward: its neural op)."""
        slots.traffic[-1].syncs += 1
        with self.timeline.span(layer, "barrier", "all"):
            dist.barrier(group=self.group)


def _after(tell: Callable[[], None]) -> Back:
    """The gradient as it is, after tell()."""

    def back(grad: Tensor) -> Tensor:
        tell()
        return grad

    return back
