"""Statistics of neighbours on the CPU: pointers out of tensors, then one call into libstretto per pass."""

from __future__ import annotations

from torch import Tensor

from stretto.kernels import abi, native
from stretto.kernels.cpu import struct
from stretto.kernels.csr import Csr
from stretto.kernels.reference_statistics import STATISTICS
from stretto.kernels.schema import DTYPES, accumulate_type
from stretto.memory import pages
from stretto.memory.pool import empty


def statistics(csr: Csr, x: Tensor, own: Tensor | None, names: tuple[str, ...]) -> Tensor:
    """Statistics of x_j + own_i over neighbours. -> [n, s, k]."""
    x, own = x.contiguous(), None if own is None else own.contiguous()
    pages.read_at_random(x)
    out = empty((csr.num_rows, len(names), x.size(1)), x.dtype)
    if out.numel():
        _call(csr, 0, x, own, names, out=out)
    return out


def statistics_grad(
    csr: Csr,
    csr_t: Csr,
    x: Tensor,
    own: Tensor | None,
    names: tuple[str, ...],
    grad: Tensor,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and own."""
    x, own, grad = x.contiguous(), None if own is None else own.contiguous(), grad.contiguous()
    pages.read_at_random(x)
    dx = empty(x.shape, x.dtype) if needs[0] else None
    down = empty(own.shape, own.dtype) if needs[1] and own is not None else None
    parts = 1 + ("var" in names or "std" in names) + 2 * ("min" in names) + 2 * ("max" in names)
    packed = empty((csr.num_rows, parts * x.size(1)), accumulate_type(x.dtype))
    arrays = {"grad": grad, "packed": packed, "down": down, "dx": dx}
    if x.size(1):
        _call(csr, 1, x, own, names, **arrays)
        if dx is not None and dx.numel():
            pages.read_at_random(packed)
            _call(csr_t, 2, x, own, names, **arrays)
    return dx, down


def _call(csr: Csr, step: int, x: Tensor, own: Tensor | None, names: tuple[str, ...], **arrays: Tensor | None) -> None:
    width = x.size(1)
    place = tuple(names.index(name) * width if name in names else -1 for name in STATISTICS)
    options = {"width": width, "place": place, "ld_x": width, "ld_out": len(names) * width}
    fields = abi.filled(abi.STATISTICS, **options, x=x, own=own, **arrays)
    native.kernel("stretto_neighbour_statistics", struct(csr), DTYPES[x.dtype], fields, step)
