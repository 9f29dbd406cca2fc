"""What stock builds and we do not: an array of messages [edges, width]. For explain(); nothing of it runs in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.layers.base import Record
from stretto.layers.layer import Conv, Layer


@dataclass
class Seen:
    """One call of a layer: its arguments, its result, and how long its forward took."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    seconds: float

    @property
    def features(self) -> Tensor | None:
        """The first matrix of floating-point numbers among the arguments."""
        given = _tensors((*self.args, *self.kwargs.values()))
        return next((t for t in given if t.is_floating_point() and t.layout == torch.strided), None)


@contextmanager
def observed(modules: Sequence[torch.nn.Module]) -> Iterator[dict[int, Seen]]:
    """id(module) -> its last call inside. The classes' forward is replaced meanwhile: no hook, nothing on a module."""
    seen: dict[int, Seen] = {}
    kinds = {type(module) for module in modules}
    watched = {id(module) for module in modules}
    before = {kind: kind.__dict__.get("forward") for kind in kinds}
    for kind in kinds:
        kind.forward = _timed(kind.forward, watched, seen)
    try:
        yield seen
    finally:
        for kind, forward in before.items():
            if forward is None:
                del kind.forward
            else:
                kind.forward = forward


def _timed(forward: Any, watched: set[int], seen: dict[int, Seen]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in watched:
            return forward(self, *args, **kwargs)
        _wait()
        start = time.perf_counter()
        out = forward(self, *args, **kwargs)
        _wait()
        seen[id(self)] = Seen(args, kwargs, out, time.perf_counter() - start)
        return out

    return run


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def avoided(conv: Conv, layer: Layer | None, record: Record, seen: Seen | None) -> int:
    """Bytes of the messages that stock would have built in this call and we have not; at least."""
    if record.path != "fast" or seen is None or record.way.builds:
        return 0
    if record.way.avoided:
        return record.way.avoided
    x, out = seen.features, next(_tensors(seen.out), None)
    if layer is None or layer.message is None or out is None:
        return 0
    i, size = (x.size(-1), x.element_size()) if x is not None else (out.size(-1), out.element_size())
    values = (*seen.args, *seen.kwargs.values())
    count = next((n for value in values if (n := _edges(value))), 0) * (out.size(0) if out.dim() == 3 else 1)
    return count * layer.message(conv, i, out.size(-1)) * size


def _edges(value: Any) -> int:
    """The number of edges of an edge_index in any format, or of all in a dictionary; 0 for anything else."""
    if isinstance(value, dict):
        return sum(_edges(inner) for inner in value.values())
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return value._nnz()
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and value.dim() == 2 and value.size(0) == 2
        return value.size(1) if whole else 0
    return value.nnz() if hasattr(value, "sparse_sizes") else 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
