"""The kernels of edge messages on the CPU: pointers out of tensors, then one call into libstretto per pass."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stretto.kernels import native, pages
from stretto.kernels.cpu import _lib, _pointer, empty, struct
from stretto.kernels.csr import Csr
from stretto.kernels.reference_edge import ACTS
from stretto.kernels.schema import DTYPES, accumulate_type

_Pair = ctypes.c_void_p * 2


class _MessagesStruct(ctypes.Structure):
    """stretto_messages of csrc/abi.h."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("act", ctypes.c_int64 * 2),
        *[(name, _Pair) for name in ("row", "col", "edge")],
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        *[(name, _Pair) for name in ("drow", "dcol", "dedge")],
    )


class _SoftmaxSumStruct(ctypes.Structure):
    """stretto_softmax_sum of csrc/abi.h."""

    _fields_ = (
        *[(name, ctypes.c_int64) for name in ("width", "act", "detached")],
        ("shift", ctypes.c_double),
        *[
            (name, ctypes.c_void_p)
            for name in ("x", "edge", "temperature", "out", "most", "inverse", "grad", "dx", "dedge", "dtemperature")
        ],
    )


def _call(name: str, csr: Csr, dtype: torch.dtype, fields: ctypes.Structure, step: int) -> None:
    function = getattr(_lib(), name)
    native.check(function(struct(csr), DTYPES[dtype], ctypes.byref(fields), step, torch.get_num_threads()))


def _messages_struct(tensors: tuple[Tensor | None, ...], acts: tuple[str, str]) -> _MessagesStruct:
    row, col, edge, row2, col2, edge2 = (None if t is None else t.data_ptr() for t in tensors)
    width = next(t.size(1) for t in tensors if t is not None)
    codes = (ctypes.c_int64 * 2)(ACTS.index(acts[0]), ACTS.index(acts[1]))
    return _MessagesStruct(width, codes, _Pair(row, row2), _Pair(col, col2), _Pair(edge, edge2))


def edge_messages(csr: Csr, tensors: tuple[Tensor | None, ...], acts: tuple[str, str]) -> Tensor:
    """Sum of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2). -> [n, k]"""
    tensors = tuple(None if t is None else t.contiguous() for t in tensors)
    pages.read_at_random(tensors[1], tensors[4])
    fields = _messages_struct(tensors, acts)
    dtype = next(t.dtype for t in tensors if t is not None)
    out = empty((csr.num_rows, fields.width), dtype)
    fields.out = out.data_ptr()
    if out.numel():
        _call("stretto_edge_messages", csr, dtype, fields, 0)
    return out


def edge_messages_grad(
    csr: Csr,
    csr_t: Csr,
    tensors: tuple[Tensor | None, ...],
    acts: tuple[str, str],
    grad: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors that need one."""
    tensors, grad = tuple(None if t is None else t.contiguous() for t in tensors), grad.contiguous()
    pages.read_at_random(*tensors, grad)
    fields = _messages_struct(tensors, acts)
    found = [
        empty(t.shape, t.dtype) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)
    ]
    fields.grad = grad.data_ptr()
    row, col, edge, row2, col2, edge2 = map(_pointer, found)
    fields.drow, fields.dcol, fields.dedge = _Pair(row, row2), _Pair(col, col2), _Pair(edge, edge2)
    if fields.width:
        if any(p is not None for p in (col, col2, edge, edge2)):
            _call("stretto_edge_messages", csr_t, grad.dtype, fields, 1)
        if any(p is not None for p in (row, row2)):
            _call("stretto_edge_messages", csr, grad.dtype, fields, 2)
    return tuple(found)


def softmax_sum(
    csr: Csr, x: Tensor, edge: Tensor | None, temperature: Tensor, act: str, shift: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax aggregation; out, and the two statistics backward needs, in the accumulation type. [n, k] each."""
    acc = accumulate_type(x.dtype)
    x, temperature = x.contiguous(), temperature.to(acc).contiguous()
    pages.read_at_random(x)
    edge = None if edge is None else edge.contiguous()
    out, most, inverse = (empty((csr.num_rows, x.size(1)), acc) for _ in range(3))
    fields = _SoftmaxSumStruct(
        width=x.size(1),
        act=ACTS.index(act),
        shift=shift,
        x=x.data_ptr(),
        edge=_pointer(edge),
        temperature=temperature.data_ptr(),
        out=out.data_ptr(),
        most=most.data_ptr(),
        inverse=inverse.data_ptr(),
    )
    if out.numel():
        _call("stretto_edge_softmax_sum", csr, x.dtype, fields, 0)
    return out, most, inverse


def softmax_sum_grad(
    csr: Csr,
    csr_t: Csr,
    x: Tensor,
    edge: Tensor | None,
    temperature: Tensor,
    act: str,
    shift: float,
    detached: bool,
    kept: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, edge and temperature."""
    acc = accumulate_type(x.dtype)
    x, heat, grad = x.contiguous(), temperature.to(acc).contiguous(), grad.contiguous()
    pages.read_at_random(grad)
    edge = None if edge is None else edge.contiguous()
    dx = empty(x.shape, x.dtype) if needs[0] else None
    dedge = empty(edge.shape, edge.dtype) if needs[1] and edge is not None else None
    dheat = torch.zeros(x.size(1), dtype=acc) if needs[2] else None
    out, most, inverse = kept
    fields = _SoftmaxSumStruct(
        width=x.size(1),
        act=ACTS.index(act),
        detached=int(detached),
        shift=shift,
        x=x.data_ptr(),
        edge=_pointer(edge),
        temperature=heat.data_ptr(),
        out=out.data_ptr(),
        most=most.data_ptr(),
        inverse=inverse.data_ptr(),
        grad=grad.data_ptr(),
        dx=_pointer(dx),
        dedge=_pointer(dedge),
        dtemperature=_pointer(dheat),
    )
    if x.numel():
        _call("stretto_edge_softmax_sum", csr_t, x.dtype, fields, 1)
    return dx, dedge, dheat
