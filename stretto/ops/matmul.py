"""segment_matmul: one weight matrix per segment of rows (a relation, an expert)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.errors import fail
from stretto.graph import Graph
from stretto.ops.checks import check_values
from stretto.ops.kernel import Kernel, Sample


def segment_matmul(x: Tensor, ptr: Tensor | Sequence[int], weight: Tensor) -> Tensor:
    """Rows ptr[s]:ptr[s + 1] of x times weight[s]. x [N, i], ptr [S + 1], weight [S, i, o] -> [N, o]."""
    try:
        bounds = [operator.index(p) for p in (ptr.tolist() if isinstance(ptr, Tensor) else ptr)]
    except TypeError:
        fail(f"segment_matmul: 'ptr' is {ptr!r}, wanted ascending bounds of segments")
    check_values("segment_matmul", "x", x, weight.device if isinstance(weight, Tensor) else x.device)
    check_values("segment_matmul", "weight", weight, x.device)
    if x.dim() != 2 or weight.dim() != 3 or x.size(1) != weight.size(1):
        fail(
            f"segment_matmul: 'x' has shape {list(x.shape)} and 'weight' {list(weight.shape)}, "
            "wanted [N, i] and [S, i, o]"
        )
    if len(bounds) != weight.size(0) + 1 or bounds[0] != 0 or bounds[-1] != x.size(0) or bounds != sorted(bounds):
        fail(f"segment_matmul: 'ptr' is {bounds}, wanted {weight.size(0) + 1} ascending bounds from 0 to {x.size(0)}")
    if x.dtype != weight.dtype:
        wide = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(wide), weight.to(wide)
    return KERNEL(None, x, weight, bounds)


def run(_: None, x: Tensor, weight: Tensor, bounds: Sequence[int]) -> Tensor:
    """No autograd: by the device's own kernel, where it has one."""
    return kernels.backend(x.device).segment_matmul(x, bounds, weight)


def gradient(
    _: None, saved: Sequence[Any], grads: Sequence[Any], needs: Sequence[bool], bounds: Sequence[int]
) -> tuple[Tensor | None, Tensor | None]:
    """The same with each weight transposed; and a product of both per segment."""
    (x, weight), (need_x, need_weight) = saved, needs
    dx = segment_matmul(grads[0], bounds, weight.transpose(1, 2)) if need_x else None
    return dx, weight_grad(x, bounds, grads[0]) if need_weight else None


def weight_grad(x: Tensor, bounds: Sequence[int], grad: Tensor) -> Tensor:
    """x[s].T @ grad[s] for every segment s. -> [S, i, o]."""
    return torch.stack([x[a:b].t() @ grad[a:b] for a, b in pairwise(bounds)])


def reference_matmul(x: Tensor, ptr: Tensor | Sequence[int], weight: Tensor) -> Tensor:
    """segment_matmul in plain PyTorch."""
    bounds = [int(p) for p in ptr]
    return torch.cat([x[bounds[s] : bounds[s + 1]] @ weight[s] for s in range(weight.size(0))])


def samples(graph: Graph, dtype: torch.dtype) -> Iterator[Sample]:
    """Segments of uneven size, one of them empty."""
    n = graph.num_cols
    for bounds in ([0, n // 2, n // 2, n], [0, n]):
        x = torch.randn(n, 5, dtype=torch.float64).to(dtype)
        weight = torch.randn(len(bounds) - 1, 5, 4, dtype=torch.float64).to(dtype)
        yield Sample((x, bounds, weight), {})


KERNEL = Kernel(
    "segment_matmul",
    "Tensor x, Tensor weight, SymInt[] ptr",
    on_graph=False,
    run=run,
    shapes=lambda _, x, weight, ptr: x.new_empty(x.shape[0], weight.shape[2]),
    gradient=gradient,
    function=segment_matmul,
    reference=reference_matmul,
    samples=samples,
    flops=lambda x, ptr, weight: 2 * x.numel() * weight.size(2),
    bytes=lambda x, ptr, weight: (x.numel() + weight.numel() + x.size(0) * weight.size(2)) * x.element_size(),
)
