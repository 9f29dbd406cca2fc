"""Dense products on the CPU by whichever is faster, torch's GEMM or our kernel for tall matrices.

torch's library is made for square matrices, and for its maker's processors: on others it takes up to twice as long for
the shapes of a graph network. Which is the faster is measured once for a shape, on some of the rows, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from stretto import kernels, settings
from stretto.kernels import cpu_dense, tall
from stretto.kernels.schema import WIDE
from stretto.machine.timing import measure
from stretto.ops.pick import picker
from stretto.ops.variants import Variant, legal
from stretto.recording import unsettled

LEAST_WORK = 1 << 24  # products below take no longer than it takes to choose
TERMS = 256  # of a sum that are taken together, of a narrow product
SAMPLE_WORK = 1 << 28  # products of what is measured: a few milliseconds a call


def tall_product(x: Tensor, w: Tensor, bias: Tensor | None, add: Tensor | None, factor: float) -> Tensor:
    """Multiply: x w + bias, or factor x w + add, which is overwritten; no autograd. x [m, k], w [k, n] -> [m, n]."""
    if _own_shape(x, w, bias, add) is None:
        return cpu_dense.product(x, w, bias, add=add, factor=factor)
    return tall.tall_product(x, w, bias, add=add, factor=factor)


def narrow_product(x: Tensor, w: Tensor) -> Tensor:
    """Multiply x w of many terms and few columns by our kernel; no autograd. x [m, k], w [k, n] -> [m, n].

    It adds up a block of terms at a time, where torch's GEMM adds them one after the other. What it does not take is
    torch's.
    """
    plain = not kernels.backend(x.device).native or x.dtype not in WIDE or x.stride(1) != 1
    if plain or x.size(1) < TERMS or x.size(0) < TERMS or w.size(1) >= cpu_dense.SKINNY or not w.numel():
        return x @ w
    out = None
    for terms in zip(x.split(TERMS, 1), w.split(TERMS), strict=True):
        out = tall.tall_product(*terms, add=out)
    assert out is not None
    return out


def two_products(x: Tensor, w: Tensor, y: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply twice: x w + y v + bias; no autograd. By our kernel the result is written once."""
    if _own_shape(x, w, bias, None) == "tall" and _own_shape(y, v, None, None) == "tall":
        return tall.tall_product(x, w, bias, beside=(y, v))
    return tall_product(y, v, None, tall_product(x, w, bias, None, 1.0), 1.0)


def product_and_sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The product grad' x, and by our kernel, which reads grad once for both, the sums over its rows; no autograd.

    What a Linear's weight and bias get. grad [m, k], x [m, n] -> [k, n], [k]
    """
    if _own_shape(grad.t(), x, None, None) != "sum":
        return tall_product(grad.t(), x, None, None, 1.0), None
    return tall.sum_product(grad.t(), x, sums=True)


def by_our_kernel(x: Tensor, w: Tensor, bias: Tensor | None = None) -> bool:
    """Whether x w + bias would run by our kernel, which takes no pass of its own for a bias or for its gradient."""
    return _own_shape(x, w, bias, None) is not None


def _own_shape(x: Tensor, w: Tensor, bias: Tensor | None, add: Tensor | None) -> str | None:
    """What the product is to our kernel, where that is the faster one; else None."""
    shape = tall.shape_of(x, w, bias, add) if x.size(0) * w.numel() >= LEAST_WORK and _free(x) else None
    if shape is None:
        return None
    rows = x.size(0) if shape == "tall" else x.size(1)
    key = ("product", shape, x.dtype, rows.bit_length(), w.size(1), x.size(1) if shape == "tall" else x.size(0), "cpu")
    variant = picker.known(key) or _choose(key, shape, x, w)
    return None if variant.backend == "torch" else shape


def _free(x: Tensor) -> bool:
    """Whether it may run by our kernel: torch is not told to round, to be repeatable, or to be the one that runs."""
    if not kernels.backend(x.device).native:
        return False
    return torch.get_float32_matmul_precision() == "highest" and settings.tuning()


def _choose(key: Hashable, shape: str, x: Tensor, w: Tensor) -> Variant:
    variants = legal("product", "cpu", width=w.size(1), plain=True)
    if torch.are_deterministic_algorithms_enabled():
        return variants[0]
    result = picker.recall(key, variants)
    if result is not None:
        return result
    unsettled()
    small = x.size(1) * w.size(1) if shape == "tall" else x.size(0) * w.size(1)
    rows = max(SAMPLE_WORK // small, tall.TALL)
    some = (x[:rows], w) if shape == "tall" else (x[:, :rows], w[:rows])
    run = {"torch": cpu_dense.product, "native": tall.tall_product}
    timings = measure({v.name: lambda v=v: run[v.backend](*some) for v in variants}, repeats=3)  # type: ignore[misc]
    best = min(variants, key=lambda v: timings[v.name].best)
    picker.decide(key, best, timings[best.name].best * 1e3)
    return best
