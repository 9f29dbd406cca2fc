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
_Steps = ctypes.c_int64 * 2
_TERMS = ("row", "col", "edge")
FORWARD, BY_COLUMN, BY_ROW, _, SUM_BY_ROW, PAIRS = range(6)  # stretto_messages_pass of csrc/abi.h

Terms = tuple[Tensor | None, ...]  # row, col, edge of the first factor, then of the second


class _MessagesStruct(ctypes.Structure):
    """stretto_messages of csrc/abi.h."""

    _fields_ = (
        ("width", ctypes.c_int64),
        ("act", _Steps),
        *[(name, _Pair) for name in _TERMS],
        ("out", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        *[(f"d{name}", _Pair) for name in _TERMS],
        *[(f"ld_{name}", _Steps) for name in _TERMS],
        *[(f"ld_d{name}", _Steps) for name in _TERMS],
        ("root", ctypes.c_void_p),
        ("ld_root", ctypes.c_int64),
        ("root_scale", ctypes.c_double),
        ("pairs", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int64),
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


def _rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its columns side by side; a slice of the columns of a wider array stays where it is."""
    return tensor if tensor is None or tensor.stride(1) == 1 else tensor.contiguous()


def _point(fields: _MessagesStruct, tensors: Terms, prefix: str = "") -> None:
    """Write addresses and steps of the six terms, or of their gradients."""
    for at, name in enumerate(_TERMS):
        pair = (tensors[at], tensors[at + 3])
        setattr(fields, prefix + name, _Pair(*[_pointer(t) for t in pair]))
        setattr(fields, f"ld_{prefix}{name}", _Steps(*[0 if t is None else t.stride(0) for t in pair]))


def _messages_struct(tensors: Terms, acts: tuple[str, str], root: tuple[Tensor, float] | None) -> _MessagesStruct:
    width = next(t.size(1) for t in tensors if t is not None)
    fields = _MessagesStruct(width, _Steps(ACTS.index(acts[0]), ACTS.index(acts[1])))
    _point(fields, tensors)
    if root is not None:
        fields.root, fields.ld_root, fields.root_scale = root[0].data_ptr(), root[0].stride(0), root[1]
    return fields


def edge_messages(
    csr: Csr, tensors: Terms, acts: tuple[str, str], *, root: tuple[Tensor, float] | None = None
) -> Tensor:
    """Sum of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2), plus c * r_i of root (r, c). -> [n, k]"""
    tensors = tuple(map(_rows, tensors))
    pages.read_at_random(tensors[1], tensors[4])
    fields = _messages_struct(tensors, acts, root)
    dtype = next(t.dtype for t in tensors if t is not None)
    out = empty((csr.num_rows, fields.width), dtype)
    fields.out = out.data_ptr()
    if out.numel():
        _call("stretto_edge_messages", csr, dtype, fields, FORWARD)
    return out


def edge_messages_grad(
    csr: Csr,
    csr_t: Csr,
    tensors: Terms,
    acts: tuple[str, str],
    grad: Tensor,
    needs: tuple[bool, ...],
    *,
    into: Terms | None = None,
    root: tuple[Tensor, float] | None = None,
    pairs: Tensor | None = None,
) -> Terms:
    """Gradients of the tensors that need one; into: where to write them. root: (col, c), as in edge_messages.

    pairs [2, P]: csr and csr_t number pairs of edges, whose features are the same and have one gradient. A row term's
    gradient is that of its edge term, summed: where the latter is made anyway, no activation is computed again.
    """
    tensors, grad = tuple(map(_rows, tensors)), grad.contiguous()
    pages.read_at_random(*tensors, grad)
    fields = _messages_struct(tensors, acts, root)
    if into is None:
        into = tuple(
            empty(t.shape, t.dtype) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)
        )
    fields.grad = grad.data_ptr()
    row, col, edge, row2, col2, edge2 = into
    if not fields.width:
        return into

    def run(graph: Csr, step: int, *wanted: Tensor | None) -> None:
        _point(fields, wanted, "d")
        _call("stretto_edge_messages", graph, grad.dtype, fields, step)

    if pairs is not None:
        fields.pairs, fields.num_pairs = pairs.data_ptr(), pairs.size(1)
        if edge is not None or edge2 is not None:
            run(csr, PAIRS, None, None, edge, None, None, edge2)
        edge = edge2 = None
    if any(t is not None for t in (col, col2, edge, edge2)):
        run(csr_t, BY_COLUMN, None, col, edge, None, col2, edge2)
    summed, summed2 = (None if e is None else r for r, e in ((row, edge), (row2, edge2)))
    if summed is not None or summed2 is not None:
        run(csr, SUM_BY_ROW, summed, None, edge, summed2, None, edge2)
    row, row2 = (r if s is None else None for r, s in ((row, summed), (row2, summed2)))
    if row is not None or row2 is not None:
        run(csr, BY_ROW, row, None, None, row2, None, None)
    return into


def softplus(x: Tensor, shift: float, grad: Tensor | None = None) -> Tensor:
    """log(1 + e^x) - shift, or grad times its slope; fp32 and fp64."""
    x, grad = x.contiguous(), None if grad is None else grad.contiguous()
    out = empty(x.shape, x.dtype)
    threads = torch.get_num_threads()
    native.check(
        _lib().stretto_softplus(
            DTYPES[x.dtype], x.data_ptr(), _pointer(grad), x.numel(), shift, out.data_ptr(), threads
        )
    )
    return out


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
