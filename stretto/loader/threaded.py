"""Threaded: what NeighborLoader and LinkNeighborLoader share, mixed into PyG's loader classes.

PyG's constructor, `loader(index)`, `collate_fn` and `filter_fn` stay as they are; only iterating is replaced: batches
are sampled, relabelled and sliced by native threads in this process, ahead of the trainer and in order.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler.base import SubgraphType

from stretto.errors import fail
from stretto.loader import checks
from stretto.loader.batch import Blueprint, put
from stretto.loader.clock import Clock, mixed
from stretto.loader.native_sampler import Sampling
from stretto.loader.sampler import NeighborSampler
from stretto.loader.slot import Slot
from stretto.loader.store import Store
from stretto.loader.stream import Stream, Task
from stretto.loader.transfer import Transfer, pinning
from stretto.loader.trim import trimmed

WHO = "NeighborLoader"
MEMORY = 256 << 20  # bytes of batches ready and waiting, unless told otherwise
# DataLoader's arguments that speak of worker processes, which these loaders do not have.
OF_PROCESSES = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "worker_init_fn",
    "timeout",
)
_OF_ENGINE = ("device", "num_threads", "memory", "batch_dependency", "trim")


def thread_count(who: str, asked: Any, workers: int) -> int:
    """How many threads a loader has: those asked for, or as many as worker processes, or half the cores, at most 4."""
    name = "num_threads" if asked else "num_workers"
    default = max(1, min(4, (os.cpu_count() or 2) // 2))
    return checks.count(who, name, asked or workers or default, 1, checks.MOST_THREADS)


class Threaded:
    """What both loaders share: options, the stream, the iterator. Mixed into one of PyG's loader classes."""

    # PyG's own
    data: Any
    input_data: Any
    dataset: Any
    batch_sampler: Any
    batch_size: Any
    drop_last: bool
    pin_memory: bool
    transform: Any
    transform_sampler_output: Any
    filter_fn: Callable[[Any], Any]

    store: Store | None = None
    sampler_: NeighborSampler
    generator: torch.Generator | None

    def _take_options(self, kwargs: dict[str, Any]) -> None:
        """Pick our options out of DataLoader's."""
        self.num_workers_asked = checks.count(WHO, "num_workers", kwargs.get("num_workers", 0))
        prefetch = kwargs.get("prefetch_factor")
        prefetch = 0 if prefetch is None else checks.count(WHO, "prefetch_factor", prefetch, most=1 << 20)
        for name in OF_PROCESSES:
            kwargs.pop(name, None)
        options = {name: kwargs.pop(name) for name in _OF_ENGINE if name in kwargs}
        device = options.get("device")
        self.device = None if device is None or torch.device(device).type == "cpu" else torch.device(device)
        self.num_threads = thread_count(WHO, options.get("num_threads"), self.num_workers_asked)
        self.memory = checks.count(WHO, "memory", options.get("memory") or MEMORY, 1)
        self.batch_dependency = checks.count(WHO, "batch_dependency", options.get("batch_dependency") or 1, 1)
        self.trim = bool(options.get("trim", False))
        # One for each thread and one ready: more would only hold memory, unless the reader asks for it.
        self._ahead = max(2, prefetch * self.num_threads) + 1 if prefetch else self.num_threads + 1
        self._own_order = kwargs.get("sampler") is None and kwargs.get("batch_sampler") is None
        self._shuffle = bool(kwargs.get("shuffle", False))
        self._clock = Clock()
        self._stream: Stream | None = None
        self._lent: tuple[weakref.ref[_Pass], Stream] | None = None  # to the latest pass
        self._blueprint: Blueprint | None = None

    # ---- iterating ----

    def __iter__(self) -> Iterator[Any]:
        if not isinstance(self.sampler_, NeighborSampler) or self.batch_sampler is None:
            stock: Any = super()
            batches: Iterator[Any] = stock.__iter__()
            return batches
        seed, epoch = self._clock.tick(self.generator)
        self._reclaim()
        stream, self._stream = self._stream, None
        if stream is None or stream.process != os.getpid() or not self._unchanged():
            stream = self._new_stream()
        if self._blueprint is None and isinstance(self.data, (Data, HeteroData)):
            for store in self.data.stores:  # which PyG's own filter_fn reads
                for name, value in store.items():
                    checks.whole(WHO, name, value)
        made = _Pass(self, stream, seed, epoch)
        self._lent = weakref.ref(made), stream
        return made

    def _reclaim(self) -> None:
        """Take back the stream of a pass that was dropped before its end.

        The pass itself does not give it back: what Python runs when an object is gone would swallow a Ctrl-C.
        """
        if self._lent is None or self._lent[0]() is not None:
            return
        (_, stream), self._lent = self._lent, None
        if stream.process == os.getpid():
            if not stream.at_end:
                stream.cancel()
            if self._stream is None:
                self._stream = stream

    def _unchanged(self) -> bool:
        return self._blueprint is None or self._blueprint.current() == self._blueprint.signature

    def _new_stream(self) -> Stream:
        sampler = self.sampler_
        extra = Sampling.EDGE_ID if sampler.e_id else Sampling(0)
        self._blueprint = None
        slices: list[Any] = []
        # Where edges are changed after sampling, or features come from a store, PyG's own filter_fn makes the batch.
        direct = isinstance(self.data, (Data, HeteroData)) and sampler.subgraph_type != SubgraphType.bidirectional
        if direct and self.transform_sampler_output is None:
            self._blueprint = Blueprint(self.data, sampler, self.store)
            slices = self._blueprint.slices
            extra |= Sampling.CSR
        elif self.store is not None:
            fail("NeighborLoader: a Store takes neither 'bidirectional' subgraphs nor 'transform_sampler_output'")
        on_device = self._blueprint is not None and self.device is not None
        return Stream(
            sampler.native(extra, slices),
            threads=self.num_threads,
            memory=self.memory,
            ahead=self._ahead,
            across=self._own_order,
            tasks=self._tasks,
            transfer=Transfer(self.device) if on_device and self.device is not None else None,
            pin=pinning(self.device) if on_device else (None, None),
        )

    def __call__(self, index: Any) -> Any:
        """The batch of these positions in the list of seeds, made on this thread."""
        if self.store is None:
            stock: Any = super()
            return stock.__call__(index)
        seed, epoch = int(torch.empty((), dtype=torch.int64).random_()), 0
        self._reclaim()
        stream = self._stream if self._stream is not None and self._unchanged() else self._new_stream()
        task = self._task(index if isinstance(index, Tensor) else torch.tensor(index), seed, epoch, 0, 0)
        return self._batch(stream.engine.sampler.sample(seed, epoch, 0, task.seeds, task.times), task)

    def _tasks(self, seed: int, epoch: int) -> Iterator[Task]:
        for number, index in enumerate(self._indices(seed, epoch)):
            # With batch_dependency, groups of batches share their random numbers.
            yield self._task(index, seed, epoch, number, number // self.batch_dependency)

    def _indices(self, seed: int, epoch: int) -> Iterator[Tensor]:
        """Positions in the list of seeds, batch by batch."""
        if not self._own_order:
            for index in self.batch_sampler:
                yield index if isinstance(index, Tensor) else torch.tensor(index, dtype=torch.int64)
            return
        n, size = len(self.dataset), self.batch_size
        if self._shuffle:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(mixed(seed, epoch)))
        else:
            order = torch.arange(n)
        stop = n - n % size if self.drop_last else n
        for start in range(0, stop, size):
            yield order[start : min(start + size, stop)]

    def _task(self, index: Tensor, seed: int, epoch: int, number: int, key: int) -> Task:
        raise NotImplementedError

    def _label(self, batch: Any, task: Task) -> None:
        raise NotImplementedError

    def _batch(self, slot: Slot, task: Task) -> Any:
        """A slot as the batch that PyG's filter_fn would have made."""
        sampler = self.sampler_
        out: Any
        if self._blueprint is None:
            out = sampler.output(slot)
            if task.num_pos and out.batch is not None:
                trees: Any = out.batch
                out.batch = (
                    {k: v % task.num_pos for k, v in trees.items()} if sampler.is_hetero else trees % task.num_pos
                )
            out.metadata = task.metadata
            batch = self.filter_fn(sampler.finish(out))
            return batch if self.device is None else batch.to(self.device)
        if torch.is_inference_mode_enabled():  # ordinary tensors, whose graphs can be remembered, whoever asks for them
            with torch.inference_mode(False):
                batch = self._built(self._blueprint, slot, task)
        else:
            batch = self._built(self._blueprint, slot, task)
        if self.transform is not None:
            batch = self.transform(batch)
        if self.pin_memory and self.device is None and torch.cuda.is_available():
            batch = batch.pin_memory()
        return batch

    def _built(self, blueprint: Blueprint, slot: Slot, task: Task) -> Any:
        batch = blueprint.build(slot, self.device)
        if self.sampler_.graph.hetero:
            self._count_types(batch, slot, task)
        else:
            counted = self.sampler_.subgraph_type != SubgraphType.induced
            tree = slot.tree()
            values = {
                "batch": tree % task.num_pos if task.num_pos and tree is not None else tree,
                "num_sampled_nodes": slot.nodes_per_hop() if counted else None,
                "num_sampled_edges": slot.edges_per_hop() if counted else None,
            }
            put(batch, values, plain=blueprint.plain)
        self._label(batch, task)
        return trimmed(batch, semantics=self.sampler_.semantics) if self.trim else batch

    def _count_types(self, batch: Any, slot: Slot, task: Task) -> None:
        """batch, num_sampled_nodes and num_sampled_edges of each type."""
        sampler = self.sampler_
        counted = sampler.subgraph_type != SubgraphType.induced
        for i, key in enumerate(sampler.graph.node_types):
            tree = slot.tree(i)
            if tree is not None:
                batch[key].batch = tree % task.num_pos if task.num_pos else tree
            if counted:
                batch[key].num_sampled_nodes = slot.nodes_per_hop(i)
        if counted:
            for r, key in enumerate(sampler.graph.edge_types):
                batch[key].num_sampled_edges = slot.edges_per_hop(r)

    def _here(self, value: Any) -> Any:
        """A tensor on the loader's device."""
        return (
            value.to(self.device, non_blocking=True) if self.device is not None and isinstance(value, Tensor) else value
        )

    # ---- checkpoints, and what PyG's loaders offer around worker processes ----

    def state_dict(self) -> dict[str, Any]:
        """Seed and next epoch: a loader that loads it continues with the very batches this one would give."""
        return self._clock.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state, self.generator)

    def close(self) -> None:
        """Stop the threads now, rather than when the loader is dropped. Iterating again starts new ones."""
        self._reclaim()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.engine.close()

    @contextmanager
    def enable_cpu_affinity(self, loader_cores: Any = None) -> Iterator[None]:
        """Accepted for PyG's sake: there are no worker processes to bind."""
        yield

    @contextmanager
    def enable_multithreading(self, worker_threads: int | None = None) -> Iterator[None]:
        """Accepted for PyG's sake: one thread samples one batch, and num_threads says how many do."""
        yield

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None, "_lent": None, "_blueprint": None}


class _Pass:
    """One iteration over a loader. Gives its stream back at the end; dropped before, the loader takes it back."""

    def __init__(self, loader: Any, stream: Stream, seed: int, epoch: int) -> None:
        self._loader = loader
        self._stream: Stream | None = stream
        stream.begin(seed, epoch)

    def __iter__(self) -> "_Pass":
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._stream is None:
            raise StopIteration
        try:
            ready = self._stream.next()
        except ValueError:  # this batch failed; the others are not affected
            raise
        except BaseException:  # Ctrl-C while waiting: nobody knows where the stream stands
            self._end(keep=False)
            raise
        if ready is None:
            self._end(keep=True)
            raise StopIteration
        return self._loader._batch(*ready)

    def _end(self, *, keep: bool) -> None:
        stream, self._stream = self._stream, None
        lent = self._loader._lent
        if lent is not None and lent[1] is stream:
            self._loader._lent = None
        if stream is None or stream.process != os.getpid():
            return
        if not keep:
            stream.cancel()
        if self._loader._stream is None:
            self._loader._stream = stream
