"""product: the dense products inside our own autograd Functions.

On the CPU torch's GEMM or our kernel (tall_product.py). On a device a tall fp32 matrix times a small one runs by
whichever is faster, torch's kernel or ours on the tensor cores, which errs no more (kernels/triton/product.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from stretto import kernels, settings
from stretto.machine.timing import on_card
from stretto.ops import tall_product as tall
from stretto.ops import taped
from stretto.ops.pick import picker
from stretto.ops.variants import Variant, legal

LEAST_ROWS = 1 << 15  # below, a product takes no longer than its launch
MOST_INNER = 4096
LEAST_SUMS = (32, 128)  # columns of two tall matrices from which our product over their rows is faster than torch's


def product(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, add: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Multiply: x w + bias, or factor x w + add, which may be overwritten with the result; no autograd.

    x [m, k], w [k, n] -> [m, n]. A factor only together with add.
    """
    backend = kernels.backend(x.device)
    if backend.product is None and kernels.on_host(x):
        return tall.tall_product(x, w, bias, add, factor)
    if add is not None and factor != 1.0:
        return taped.add_product(add, x, w, factor, in_place=True)
    if bias is None and add is None and _sums_rows(x, w):
        sums: Tensor = backend.transposed_product(x.t(), w)[0]
        return sums
    if not _ours(x, w, bias if add is None else add):
        return _torch(x, w, bias, add, in_place=True)
    key = ("product", x.size(0).bit_length(), *w.shape, w.stride(0) == 1, bias is not None, add is not None, "cuda")
    variant = picker.known(key) or _choose(key, x, w, bias, add)
    if variant.backend == "torch":
        return _torch(x, w, bias, add, in_place=True)
    out: Tensor = backend.product(x, w, bias, add=add, out=add, **variant.options)
    return out


def two_products(x: Tensor, w: Tensor, y: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply twice: x w + y v + bias; no autograd. x [m, k], w [k, n], y [m, l], v [l, n] -> [m, n]."""
    if kernels.backend(x.device).product is None and kernels.on_host(x):
        return tall.two_products(x, w, y, v, bias)
    return product(y, v, add=product(x, w, bias))


def product_and_sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The product grad' x; and the sums of grad over its rows, where they come with it; no autograd.

    grad [m, k], x [m, n] -> [k, n], [k]
    """
    if kernels.backend(grad.device).product is None and kernels.on_host(grad):
        return tall.product_and_sums(grad, x)
    return product(grad.t(), x), None


def _choose(key: Hashable, x: Tensor, w: Tensor, bias: Tensor | None, add: Tensor | None) -> Variant:
    """The faster on the device, whose clock does not count the launch: among large products the host runs ahead."""
    variants = legal("product", "cuda", width=w.size(1), plain=True)
    tuned = settings.tuning() and not torch.are_deterministic_algorithms_enabled()
    if not tuned:
        return variants[0]
    result = picker.recall(key, variants)
    if result is not None:
        return result
    backend = kernels.backend(x.device)
    backend.tape.unsettled()
    if torch.cuda.is_current_stream_capturing():
        return variants[0]

    def run(variant: Variant) -> None:  # nothing is overwritten
        if variant.backend == "torch":
            _torch(x, w, bias, add, in_place=False)
        else:
            backend.product(x, w, bias, add=add, **variant.options)

    times = {variant: _milliseconds(run, variant) for variant in variants}
    best = min(variants, key=lambda variant: times[variant])
    picker.decide(key, best, times[best])
    return best


def _milliseconds(run: Callable[[Variant], None], variant: Variant) -> float:
    """The shortest of three, on the device's clock, after one that may have to be compiled."""
    run(variant)
    return min(on_card(lambda: run(variant)) for _ in range(3)) * 1e3


def _torch(x: Tensor, w: Tensor, bias: Tensor | None, add: Tensor | None, *, in_place: bool) -> Tensor:
    return taped.product(x, w, bias) if add is None else taped.add_product(add, x, w, in_place=in_place)


def stays_fp32(x: Tensor) -> bool:
    """Whether x is fp32, and its products are to be as exact as that."""
    return x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest" and not kernels.autocasts(x)


def by_sixteen(x: Tensor) -> bool:
    """Whether the rows of a matrix lie such that 16 bytes can be loaded at once."""
    return x.stride(1) == 1 and not (x.size(1) % 4 or x.stride(0) % 4 or x.data_ptr() % 16)


def _ours(x: Tensor, w: Tensor, other: Tensor | None) -> bool:
    """Whether our kernel takes these: tall, fp32 that is to stay fp32, and laid out for loads of 16 bytes."""
    if x.size(0) < LEAST_ROWS or x.size(1) > MOST_INNER or w.size(1) % 4 or w.dtype != x.dtype:
        return False
    if kernels.backend(x.device).product is None or not by_sixteen(x) or not stays_fp32(x):
        return False
    return other is None or (other.dtype == x.dtype and other.is_contiguous())


def _sums_rows(x: Tensor, w: Tensor) -> bool:
    """Whether x is a tall matrix transposed, as in the gradient of a weight, and our kernel takes it and w."""
    if x.size(1) < LEAST_ROWS or x.size(0) < LEAST_SUMS[0] or w.size(1) < LEAST_SUMS[1] or w.dtype != x.dtype:
        return False
    if kernels.backend(x.device).transposed_product is None or not stays_fp32(x):
        return False
    return by_sixteen(x.t()) and by_sixteen(w)
