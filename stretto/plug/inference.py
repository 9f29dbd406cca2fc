"""Inference over a whole graph: exact, layer by layer, or sampled.

Exact inference runs the model once over all nodes where its activations fit in memory; where they do not, models that
can be run layer by layer (PyG's BasicGNN, of layers whose output needs nothing but a node's own neighbours) go through
the graph in pieces, with the activations in files. Sampled inference takes a fan-out per layer, as training does.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from stretto.errors import expect, fail
from stretto.loader import NeighborLoader, Store, checks, run_trimmed
from stretto.loader.trim import why_not_local

Forward = Callable[[torch.nn.Module, Any], Tensor]
Progress = Callable[[int, int], None]


def inference(
    model: torch.nn.Module,
    data: Data | Store,
    *,
    num_neighbors: Sequence[int] | None = None,
    input_nodes: Tensor | None = None,
    batch_size: int = 4096,
    memory: int | None = None,
    num_threads: int | None = None,
    forward: Forward | None = None,
    out: str | Path | None = None,
    progress: Progress | bool = False,
) -> Tensor:
    """The model's output for every node, or for input_nodes. -> [nodes, ...].

    num_neighbors  None: exact; a list: so many sampled neighbours per layer
    input_nodes    index or mask of the nodes wanted
    memory         bytes the activations may take (default: half of what is free); beyond, they go through files
    forward        how to call the model on a batch, where it is not model(batch.x, batch.edge_index)
    out            file for the result, which is then memory-mapped
    progress       True for a progress bar, or a function of (done, total)
    """
    whole = data.data if isinstance(data, Store) else data
    expect(isinstance(whole, Data), f"inference: 'data' is {type(data).__name__}, wanted Data or a Store of one graph")
    nodes = _nodes(input_nodes, int(whole.num_nodes or 0))
    checks.count("inference", "batch_size", batch_size, 1)
    if memory is not None:
        checks.count("inference", "memory", memory)
    call = forward or (lambda module, batch: module(batch.x, batch.edge_index))
    with _evaluating(model), torch.no_grad(), _reporting(progress) as report:
        if num_neighbors is not None:
            return _sampled(
                model, data, list(num_neighbors), nodes, batch_size, num_threads, call, forward, out, report
            )
        budget = memory if memory is not None else _free_memory() // 2
        fits = 3 * int(whole.num_nodes or 0) * _widest(model, whole) * 4 <= budget
        if fits:
            result = call(model, data.load() if isinstance(data, Store) else data)
            report(1, 1)
            return _deliver(result if input_nodes is None else result[nodes], out)
        why_not = why_not_local(model) if forward is None else "forward= is given"
        if why_not:
            fail(
                f"inference: the activations may take more than {budget} bytes, and layer by layer is not possible: "
                f"{why_not}; raise 'memory', or give 'num_neighbors'"
            )
        result = _layerwise(model, data, batch_size, num_threads, report)
        return _deliver(result if input_nodes is None else result[nodes], out)


# ---- sampled ----


def _sampled(
    model: torch.nn.Module,
    data: Data | Store,
    num_neighbors: list[int],
    nodes: Tensor,
    batch_size: int,
    num_threads: int | None,
    call: Forward,
    forward: Forward | None,
    out: str | Path | None,
    report: Progress,
) -> Tensor:
    options: dict[str, Any] = {} if num_threads is None else {"num_threads": num_threads}
    loader = NeighborLoader(data, num_neighbors, input_nodes=nodes, batch_size=batch_size, **options)
    result: Tensor | None = None
    done = 0
    for batch in loader:
        # Each layer computes only what the next one needs, where the model is one of PyG's.
        rows = run_trimmed(model, batch) if forward is None else call(model, batch)[: batch.batch_size]
        _one_each(rows, batch.batch_size)
        if result is None:
            result = _allocate((nodes.numel(), *rows.shape[1:]), rows.dtype, out)
        result[done : done + rows.size(0)] = rows
        done += rows.size(0)
        report(done, nodes.numel())
    loader.close()
    if result is None:
        fail("inference: 'input_nodes' is empty")
    return result


# ---- layer by layer ----


def _layerwise(model: Any, data: Data | Store, batch_size: int, num_threads: int | None, report: Progress) -> Tensor:
    """Every layer over all nodes in pieces of batch_size; activations live in files that are gone at the end."""
    store = data if isinstance(data, Store) else None
    whole: Any = store.data if store is not None else data
    n, depth = int(whole.num_nodes or 0), int(model.num_layers)
    options: dict[str, Any] = {} if num_threads is None else {"num_threads": num_threads}
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        x = whole.x
        for layer in range(depth):
            if store is None:
                piece: Any = Data(x=x, edge_index=whole.edge_index, num_nodes=n)
            else:
                piece = store if layer == 0 else store.with_features(x)
            loader = NeighborLoader(piece, [-1], batch_size=batch_size, e_id=False, **options)
            fresh: Tensor | None = None
            done = 0
            for batch in loader:
                rows = model.inference_per_layer(layer, batch.x, batch.edge_index, batch.batch_size)
                _one_each(rows, batch.batch_size)
                if fresh is None:
                    fresh = _allocate((n, *rows.shape[1:]), rows.dtype, Path(folder) / f"layer{layer}.bin")
                fresh[done : done + rows.size(0)] = rows
                done += rows.size(0)
                report(layer * n + done, depth * n)
            loader.close()
            assert fresh is not None
            x = fresh
        result: Tensor = x.clone()
        return result


# ---- small things ----


def _nodes(input_nodes: Tensor | None, num_nodes: int) -> Tensor:
    if input_nodes is None:
        return torch.arange(num_nodes)
    if isinstance(input_nodes, Tensor) and input_nodes.dtype == torch.bool:
        got = list(input_nodes.shape)
        expect(got == [num_nodes], f"inference: 'input_nodes' is a mask of shape {got}, wanted [{num_nodes}]")
        return input_nodes.nonzero().view(-1)
    return checks.indices("inference", "input_nodes", input_nodes, num_nodes)


def _one_each(rows: Tensor, wanted: int) -> None:
    if rows.dim() == 0 or rows.size(0) != wanted:
        fail(f"inference: the model's output has shape {list(rows.shape)}, wanted {wanted} rows, one for each seed")


def _widest(model: torch.nn.Module, data: Data) -> int:
    """The widest activation, as far as the shapes of the features and parameters tell."""
    sizes = [s for p in model.parameters() if not isinstance(p, torch.nn.UninitializedParameter) for s in p.shape]
    result: int = max([1, *sizes, *(data.x.shape[1:] if data.x is not None else ())])
    return result


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, file: str | Path | None) -> Tensor:
    if file is None:
        return torch.empty(shape, dtype=dtype)
    size = 1
    for extent in shape:
        size *= extent
    return torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)


def _deliver(result: Tensor, out: str | Path | None) -> Tensor:
    if out is None:
        return result
    file = _allocate(tuple(result.shape), result.dtype, out)
    file.copy_(result)
    return file


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, and back to the very mode every module had."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _reporting(progress: Progress | bool) -> Iterator[Progress]:
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done, total: None
    else:
        from rich.progress import Progress as Bar

        with Bar() as bar:
            task = bar.add_task("inference")
            yield lambda done, total: bar.update(task, completed=done, total=total)
