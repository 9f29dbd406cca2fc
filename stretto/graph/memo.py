"""The memo behind Graph.of: which tensor is which graph.

Two ways to know a graph again. The same tensor object, unchanged: looked up by identity, held weakly, checked by
storage, shape, strides and version (kernels/looks.py). A new tensor with the same content: looked up by a 128-bit hash
of the bytes, among the most recently used graphs. Never by address alone: memory is reused.

Graphs that are remembered by content count with all that has been derived from them. Only the last few of those that
have not come back are held, so that edges drawn anew at every step fill nothing; of the others the hash stays,
and a graph whose content was met before is held from then on.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from stretto import settings
from stretto.kernels import build
from stretto.kernels.looks import Look, look
from stretto.lifetime import popped_from


class Sized(Protocol):
    """What is remembered says how much memory it holds."""

    @property
    def nbytes(self) -> int: ...


G = TypeVar("G", bound=Sized)
FEW = 4  # graphs by content that are held before they come back
MOST_MET = 1024  # hashes of graphs that were let go
SMALL = 1 << 18  # bytes of an edge_index below which counting would cost more than the graph's memory is worth
MOST_KEYS = 16  # graphs of one tensor: other sizes, another flow


@dataclass(frozen=True)
class MemoInfo:
    """hits: same tensor; recognised: same content; built: new. tensors and graphs: entries held now."""

    hits: int
    recognised: int
    built: int
    tensors: int
    graphs: int


class _Entry(Generic[G]):
    __slots__ = ("graphs", "look", "ref")

    def __init__(self, ref: weakref.ref[Any], look: Look) -> None:
        self.ref = ref
        self.look = look
        self.graphs: dict[Hashable, G | functools.partial[G]] = {}


@dataclass(eq=False)
class _ByContent(Generic[G]):
    """A graph remembered by its content, and its bytes when they were last counted."""

    graph: G
    nbytes: int
    came_back: bool = False


class Memo(Generic[G]):
    """Maps (tensor, key) to a graph; `key` holds whatever else determines it (sizes, flow)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_tensor: dict[int, _Entry[G]] = {}
        self._by_content: OrderedDict[Hashable, _ByContent[G]] = OrderedDict()  # what was used last stands last
        self._met: OrderedDict[Hashable, None] = OrderedDict()  # contents of graphs that were let go
        self._hits = self._recognised = self._built = 0
        os.register_at_fork(after_in_child=self._renew_lock)

    def get(self, tensor: Any, key: Hashable, make: Callable[[], G]) -> G:
        """The graph of tensor and key, made by make() unless known."""
        now = _look(tensor)
        entry = self._by_tensor.get(id(tensor))
        if entry is not None and entry.ref() is tensor and entry.look == now:
            graph = entry.graphs.get(key)
            if isinstance(graph, functools.partial):
                graph = entry.graphs[key] = graph()
            if graph is not None:
                self._hits += 1
                return graph
        content = _content(tensor)
        content_key = None if content is None else (content, key)
        graph = None if content_key is None else self._recall(content_key)
        if graph is None:
            graph = make()  # outside the lock: threads build different graphs at the same time
            self._built += 1
            if content_key is not None:
                self._learn(content_key, graph, tensor.nbytes)
        self.put(tensor, key, graph)
        return graph

    def graphs(self, tensor: Any) -> list[G]:
        """The graphs of this very tensor, as it is now."""
        entry = self._by_tensor.get(id(tensor))
        if entry is None or entry.ref() is not tensor or entry.look != _look(tensor):
            return []
        return [self.get(tensor, key, _never) for key in entry.graphs]

    def knows(self, tensor: Any, key: Hashable) -> bool:
        """Whether get() would find this very tensor's graph."""
        entry = self._by_tensor.get(id(tensor))
        return entry is not None and entry.ref() is tensor and key in entry.graphs and entry.look == _look(tensor)

    def put(self, tensor: Any, key: Hashable, graph: G | functools.partial[G]) -> None:
        """Remember that tensor and key are graph, or what makes it, while the tensor lives and stays as it is."""
        now = look(tensor) if type(tensor) is Tensor else _look(tensor)
        if now is None:
            return
        with self._lock:
            entry = self._by_tensor.get(id(tensor))
            if entry is None or entry.ref() is not tensor or entry.look != now:
                entry = _Entry(popped_from(self._by_tensor, id(tensor), tensor), now)
                self._by_tensor[id(tensor)] = entry
            if len(entry.graphs) >= MOST_KEYS:
                entry.graphs.pop(next(iter(entry.graphs)))
            entry.graphs[key] = graph

    def _recall(self, content_key: Hashable) -> G | None:
        """The graph of that content, if it is remembered."""
        with self._lock:
            result = self._by_content.get(content_key)
            if result is None:
                return None
            self._by_content.move_to_end(content_key)
            result.came_back = True
            self._recognised += 1
            return result.graph

    def _learn(self, content_key: Hashable, graph: G, size: int) -> None:
        """Remember a new graph by its content of so many bytes, and let go what there is no room for."""
        most, budget = settings.integer("STRETTO_GRAPH_CACHE"), settings.integer("STRETTO_GRAPH_CACHE_MB") << 20
        with self._lock:
            entries = self._by_content
            last = next(reversed(entries.values()), None)
            if last is not None and last.nbytes >= SMALL:  # it has been derived from since it was counted
                last.nbytes = last.graph.nbytes
            came_back = content_key in self._met
            entries[content_key] = _ByContent(graph, size if size < SMALL else graph.nbytes, came_back)
            for key in [key for key, entry in entries.items() if not entry.came_back][:-FEW]:
                self._let_go(key)
            held = sum([entry.nbytes for entry in entries.values()])
            while entries and (len(entries) > most or held > budget):
                held -= self._let_go(next(iter(entries)))

    def _let_go(self, content_key: Hashable) -> int:
        """Hold no longer a graph of that content, but remember that it was met; its bytes."""
        self._met[content_key] = None
        self._met.move_to_end(content_key)
        if len(self._met) > MOST_MET:
            self._met.popitem(last=False)
        return self._by_content.pop(content_key).nbytes

    def info(self) -> MemoInfo:
        return MemoInfo(self._hits, self._recognised, self._built, len(self._by_tensor), len(self._by_content))

    def clear(self) -> None:
        with self._lock:
            self._by_tensor.clear()
            self._by_content.clear()
            self._met.clear()
            self._hits = self._recognised = self._built = 0

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()


def _never() -> Any:
    raise AssertionError("a graph that is remembered is not made again")


def _look(tensor: Any) -> Look | None:
    """What changes when the tensor's content may have changed; None: it cannot be told, but by its content."""
    if not isinstance(tensor, Tensor):  # torch_sparse.SparseTensor: a storage that is never edited in place
        return ("object",)
    return look(tensor)


def _content(tensor: Any) -> Hashable:
    """A hash of the indices, or None where there is none at memory speed."""
    if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
        digest = build.content_hash(tensor)
        return None if digest is None else (digest, tensor.dtype, tuple(tensor.shape))
    return None
