"""PyG's functions scatter and softmax over the cached index; global_*_pool and every layer's message come with them.

A function cannot be reached through a model, so these belong to patch(): install() binds ours wherever a module has
bound PyG's, remove() binds PyG's again. A name that was imported in between runs as PyG's from then on.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.utils
from torch import Tensor

from stretto.kernels import DTYPES
from stretto.layers.aggr import SMALL
from stretto.layers.base import Decline
from stretto.layers.edges.trace import REDUCTIONS
from stretto.ops import segment_reduce
from stretto.ops.batched import transformed
from stretto.plug.stock import owned, stock_wanted


def fast_scatter(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """What torch_geometric.utils.scatter computes, along the first dimension."""
    if reduce not in REDUCTIONS:
        raise Decline(f"reduce is {reduce}")
    index = _check(src, index, dim)
    if dim_size is None:
        dim_size = int(index.max()) + 1
    return segment_reduce(src, index, dim_size, reduce=REDUCTIONS[reduce])


def fast_softmax(
    src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None, dim: int = 0
) -> Tensor:
    """What torch_geometric.utils.softmax computes, along the first dimension and by an index."""
    if ptr is not None:
        raise Decline("ptr is given")
    index = _check(src, index, dim)
    return segment_reduce(src, index, int(index.max()) + 1 if num_nodes is None else num_nodes, reduce="softmax")


def _check(src: Any, index: Any, dim: int) -> Tensor:
    """The index as segment_reduce takes it, or Decline."""
    if type(src) not in (Tensor, torch.nn.Parameter) or src.dtype not in DTYPES or src.layout != torch.strided:
        raise Decline("not a plain tensor of a floating type")
    if src.dim() == 0 or dim not in (0, -src.dim()) or src.numel() < SMALL:
        raise Decline("not the first dimension, or a few values only")
    if not isinstance(index, Tensor) or index.shape != src.shape[:1] or index.device != src.device:
        raise Decline("no index, or not one per row")
    result = index.as_tensor() if hasattr(index, "as_tensor") else index
    if type(result) is not Tensor or result.dtype not in (torch.int64, torch.int32):
        raise Decline("the index is not a plain tensor of integers")
    return result


_active = False


def _standing_for(stock: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs fast while installed, that TorchScript reads as stock: its source, among its own globals."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not _active or torch.compiler.is_compiling() or torch.jit.is_tracing() or stock_wanted() or transformed():
            return stock(*args, **kwargs)
        try:
            return owned(fast(*args, **kwargs))
        except Decline:
            return stock(*args, **kwargs)

    def function(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    made = types.FunctionType(function.__code__, stock.__globals__, closure=function.__closure__)
    return functools.wraps(stock)(made)


# PyG's function -> ours
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    stock: _standing_for(stock, fast)
    for stock, fast in ((torch_geometric.utils.scatter, fast_scatter), (torch_geometric.utils.softmax, fast_softmax))
}
_before: list[tuple[types.ModuleType, str, Any]] = []


def install() -> None:
    """Bind ours in every module that has bound PyG's. Calling it twice is calling it once."""
    global _active
    if _active:
        return
    by_id = {id(stock): ours for stock, ours in FUNCTIONS.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or module.__name__ == __name__:
            continue
        for name, value in list(vars(module).items()):
            if type(value) is types.FunctionType and id(value) in by_id:
                _before.append((module, name, value))
                setattr(module, name, by_id[id(value)])
    _active = True


def remove() -> None:
    """Bind PyG's where they were."""
    global _active
    _active = False
    for module, name, stock in _before:
        setattr(module, name, stock)
    _before.clear()
