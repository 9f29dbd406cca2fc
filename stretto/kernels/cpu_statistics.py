"""Statistics of neighbours on the CPU: pointers out of tensors, then one call into libstretto per pass."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stretto.kernels import native
from stretto.kernels.cpu import _lib, _pointer, empty, struct
from stretto.kernels.csr import Csr
from stretto.kernels.reference_statistics import STATISTICS
from stretto.kernels.schema import DTYPES, accumulate_type
from stretto.memory import pages


class _Struct(ctypes.Structure):
    """stretto_statistics of csrc/abi.h."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("place", ctypes.c_int64 * len(STATISTICS)),
        ("x", ctypes.c_void_p),
        ("ld_x", ctypes.c_int64),
        ("own", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("ld_out", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("grad", "packed", "down", "dx")],
    )


def statistics(csr: Csr, x: Tensor, own: Tensor | None, names: tuple[str, ...]) -> Tensor:
    """Statistics of x_j + own_i over neighbours. -> [n, s, k]"""
    x, own = x.contiguous(), None if own is None else own.contiguous()
    pages.read_at_random(x)
    out = empty((csr.num_rows, len(names), x.size(1)), x.dtype)
    if out.numel():
        _call(csr, _struct(x, own, names, out=out.data_ptr()), x.dtype, 0)
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
    pointers = {"grad": grad.data_ptr(), "packed": packed.data_ptr(), "down": _pointer(down), "dx": _pointer(dx)}
    fields = _struct(x, own, names, **pointers)
    if x.size(1):
        _call(csr, fields, x.dtype, 1)
        if dx is not None and dx.numel():
            pages.read_at_random(packed)
            _call(csr_t, fields, x.dtype, 2)
    return dx, down


def _struct(x: Tensor, own: Tensor | None, names: tuple[str, ...], **pointers: int | None) -> _Struct:
    width = x.size(1)
    place = [names.index(name) * width if name in names else -1 for name in STATISTICS]
    fields = _Struct(width, (ctypes.c_int64 * len(STATISTICS))(*place), x.data_ptr(), width, _pointer(own), **pointers)
    fields.ld_out = len(names) * width
    return fields


def _call(csr: Csr, fields: _Struct, dtype: torch.dtype, step: int) -> None:
    threads = torch.get_num_threads()
    native.check(_lib().stretto_neighbour_statistics(struct(csr), DTYPES[dtype], ctypes.byref(fields), step, threads))
