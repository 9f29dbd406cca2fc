"""The memo behind Graph.of: which tensor is which graph.

Two ways to know a graph again. The same tensor object, unchanged: looked up by identity, held weakly, checked by
storage, shape, strides and version. A new tensor with the same content: looked up by a 128-bit hash of the bytes, among
the most recently used graphs. Never by address alone: memory is reused.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from stretto import settings
from stretto.kernels import build

G = TypeVar("G")


@dataclass(frozen=True)
class MemoInfo:
    """hits: same tensor; recognised: same content; built: new. tensors and graphs: entries held now."""

    hits: int
    recognised: int
    built: int
    tensors: int
    graphs: int


class _Entry(Generic[G]):
    __slots__ = ("graphs", "mark", "ref")

    def __init__(self, ref: weakref.ref[Any], mark: Hashable) -> None:
        self.ref = ref
        self.mark = mark
        self.graphs: dict[Hashable, G] = {}


class Memo(Generic[G]):
    """Maps (tensor, key) to a graph; `key` holds whatever else determines it (sizes, flow)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._by_tensor: dict[int, _Entry[G]] = {}
        self._by_content: OrderedDict[Hashable, tuple[G, int]] = OrderedDict()
        self._content_bytes = 0
        self._hits = self._recognised = self._built = 0
        os.register_at_fork(after_in_child=self._renew_lock)

    def get(self, tensor: Any, key: Hashable, make: Callable[[], G]) -> G:
        """The graph of tensor and key, made by make() unless known."""
        entry = self._by_tensor.get(id(tensor))
        if entry is not None and entry.ref() is tensor and entry.mark == _mark(tensor):
            graph = entry.graphs.get(key)
            if graph is not None:
                self._hits += 1
                return graph
        content = _content(tensor)
        content_key = None if content is None else (content, key)
        with self._lock:
            found = self._by_content.get(content_key) if content_key is not None else None
            graph = None if found is None else found[0]
            if graph is not None:
                self._by_content.move_to_end(content_key)
                self._recognised += 1
        if graph is None:
            graph = make()  # outside the lock: threads build different graphs at the same time
            self._built += 1
        with self._lock:
            if content_key is not None and content_key not in self._by_content:
                nbytes = tensor.numel() * tensor.element_size()  # about what the graph's own arrays take
                self._by_content[content_key] = (graph, nbytes)
                self._content_bytes += nbytes
                self._evict()
        self.put(tensor, key, graph)
        return graph

    def graphs(self, tensor: Any) -> list[G]:
        """The graphs of this very tensor, as it is now."""
        entry = self._by_tensor.get(id(tensor))
        return (
            []
            if entry is None or entry.ref() is not tensor or entry.mark != _mark(tensor)
            else [*entry.graphs.values()]
        )

    def knows(self, tensor: Any, key: Hashable) -> bool:
        """Whether get() would find this very tensor's graph."""
        entry = self._by_tensor.get(id(tensor))
        return entry is not None and entry.ref() is tensor and key in entry.graphs and entry.mark == _mark(tensor)

    def put(self, tensor: Any, key: Hashable, graph: G) -> None:
        """Remember that tensor and key are graph, while the tensor lives and stays as it is."""
        mark = _mark(tensor)
        if mark is None:
            return
        with self._lock:
            entry = self._by_tensor.get(id(tensor))
            if entry is None or entry.ref() is not tensor or entry.mark != mark:
                entry = _Entry(weakref.ref(tensor, self._forget(id(tensor))), mark)
                self._by_tensor[id(tensor)] = entry
            entry.graphs[key] = graph

    def _evict(self) -> None:
        most, most_bytes = settings.integer("STRETTO_GRAPH_CACHE"), settings.integer("STRETTO_GRAPH_CACHE_MB") << 20
        while self._by_content and (len(self._by_content) > most or self._content_bytes > most_bytes):
            _, (_, nbytes) = self._by_content.popitem(last=False)
            self._content_bytes -= nbytes

    def _forget(self, number: int) -> Callable[[weakref.ref[Any]], None]:
        memo = weakref.ref(self)

        def forget(ref: weakref.ref[Any]) -> None:
            owner = memo()
            if owner is not None:
                entry = owner._by_tensor.get(number)
                if entry is not None and entry.ref is ref:
                    owner._by_tensor.pop(number, None)

        return forget

    def info(self) -> MemoInfo:
        return MemoInfo(self._hits, self._recognised, self._built, len(self._by_tensor), len(self._by_content))

    def clear(self) -> None:
        with self._lock:
            self._by_tensor.clear()
            self._by_content.clear()
            self._content_bytes = 0
            self._hits = self._recognised = self._built = 0

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()


def _mark(tensor: Any) -> Hashable:
    """What changes when the tensor's content may have changed; None: it cannot be told."""
    if not isinstance(tensor, Tensor):  # torch_sparse.SparseTensor: a storage that is never edited in place
        return ("object",)
    if tensor.is_inference():  # no version counter: only the content can tell
        return None
    if tensor.layout == torch.strided:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version
    return tensor.layout, tensor.shape, tensor._nnz(), tensor._version


def _content(tensor: Any) -> Hashable:
    """A hash of the indices, or None where there is none at memory speed."""
    if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
        digest = build.content_hash(tensor)
        return None if digest is None else (digest, tensor.dtype, tuple(tensor.shape))
    return None
