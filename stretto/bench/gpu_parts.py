"""What a layer cannot do without: the dense products of a GIN layer alone, by torch and by our own kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto import kernels
from stretto.tune.timing import measure


def dense_products(num_nodes: int, i: int, o: int) -> dict[str, float]:
    """Milliseconds of the six products of Linear(i, o), ReLU, Linear(o, o), forward and backward."""
    x, z, grad = (torch.randn(num_nodes, k, device="cuda") for k in (i, o, o))
    first, second = torch.randn(o, i, device="cuda"), torch.randn(o, o, device="cuda")
    ours = kernels.backend(x.device)

    def by_torch() -> list[Tensor]:
        return [x @ first.t(), z @ second.t(), grad @ second, grad.t() @ z, grad @ first, grad.t() @ x]

    def by_us() -> list[Tensor]:
        return [
            ours.product(x, first.t()),
            ours.product(z, second.t()),
            ours.product(grad, second),
            ours.transposed_product(grad, z)[0],
            ours.product(grad, first),
            grad.t() @ x,
        ]

    calls: dict[str, Callable[[], object]] = {"torch": by_torch, "stretto": by_us}
    timings = measure(calls, repeats=7, warmup=3, device="cuda", sample_seconds=0.06)
    return {name: t.median * 1e3 for name, t in timings.items()}
