"""The kernels of edge messages on the CPU: pointers out of tensors, then one call into libstretto per pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.kernels import abi, native
from stretto.kernels.cpu import struct
from stretto.kernels.csr import Csr
from stretto.kernels.reference_edge import ACTS
from stretto.kernels.schema import CPU, DTYPES, accumulate_type
from stretto.memory import pages
from stretto.memory.pool import empty

FORWARD, BY_COLUMN, BY_ROW, _, SUM_BY_ROW, PAIRS = range(6)  # stretto_messages_pass of csrc/abi.h

Terms = tuple[Tensor | None, ...]  # row, col, edge of the first factor, then of the second


MESSAGES = abi.packer(abi.MESSAGES)
_ORDER = (0, 3, 1, 4, 2, 5)  # row of both factors, col of both, edge of both


def _rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor with its columns side by side; a slice of the columns of a wider array stays where it is."""
    return tensor if tensor is None or tensor.stride(1) == 1 else tensor.contiguous()


_ABSENT = (0,) * 6


def _points(tensors: Terms) -> tuple[Sequence[int], Sequence[int]]:
    """Addresses of the six terms, or of their gradients, and their steps from row to row."""
    addresses, steps = [0] * 6, [0] * 6
    for place, at in enumerate(_ORDER):
        tensor = tensors[at]
        if tensor is not None:
            addresses[place], steps[place] = tensor.data_ptr(), tensor.stride(0)
    return addresses, steps


def _rooted(root: tuple[Tensor, float] | None) -> tuple[int, int, float]:
    return (0, 0, 0.0) if root is None else (root[0].data_ptr(), root[0].stride(0), root[1])


def edge_messages(
    csr: Csr, tensors: Terms, acts: tuple[str, str], *, root: tuple[Tensor, float] | None = None
) -> Tensor:
    """Sum of act(row_i + col_j + edge) * act2(row2_i + col2_j + edge2), plus c * r_i of root (r, c). -> [n, k]."""
    tensors = tuple(map(_rows, tensors))
    pages.read_at_random(tensors[1], tensors[4])
    first = next(t for t in tensors if t is not None)
    width, dtype = first.size(1), first.dtype
    out = empty((csr.num_rows, width), dtype)
    if out.numel():
        codes = ACTS.index(acts[0]), ACTS.index(acts[1])
        addresses, steps = _points(tensors)
        fields = MESSAGES.pack(
            width, *codes, *addresses, out.data_ptr(), 0, *_ABSENT, *steps, *_ABSENT, *_rooted(root), 0, 0
        )
        native.kernel("stretto_edge_messages", struct(csr), DTYPES[dtype], fields, FORWARD)
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
    if into is None:
        into = tuple(
            empty(t.shape, t.dtype) if need and t is not None else None for t, need in zip(tensors, needs, strict=True)
        )
    row, col, edge, row2, col2, edge2 = into
    width = grad.size(1)
    if not width:
        return into
    addresses, steps = _points(tensors)
    terms = width, ACTS.index(acts[0]), ACTS.index(acts[1]), *addresses, 0, grad.data_ptr()
    rest = *_rooted(root), *((0, 0) if pairs is None else (pairs.data_ptr(), pairs.size(1)))

    def run(graph: Csr, step: int, *wanted: Tensor | None) -> None:
        places, dsteps = _points(wanted)
        fields = MESSAGES.pack(*terms, *places, *steps, *dsteps, *rest)
        native.kernel("stretto_edge_messages", struct(graph), DTYPES[grad.dtype], fields, step)

    if pairs is not None:
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
    native.kernel("stretto_softplus", DTYPES[x.dtype], x, grad, x.numel(), shift, out)
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
    if out.numel():
        terms = {"x": x, "edge": edge, "temperature": temperature, "out": out, "most": most, "inverse": inverse}
        fields = abi.filled(abi.SOFTMAX_SUM, width=x.size(1), act=ACTS.index(act), shift=shift, **terms)
        native.kernel("stretto_edge_softmax_sum", struct(csr), DTYPES[x.dtype], fields, 0)
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
    dheat = torch.zeros(x.size(1), dtype=acc, device=CPU) if needs[2] else None
    if x.numel():
        terms = dict(zip(("out", "most", "inverse"), kept, strict=True), x=x, edge=edge, temperature=heat, grad=grad)
        numbers = {"width": x.size(1), "act": ACTS.index(act), "detached": int(detached), "shift": shift}
        fields = abi.filled(abi.SOFTMAX_SUM, **numbers, **terms, dx=dx, dedge=dedge, dtemperature=dheat)
        native.kernel("stretto_edge_softmax_sum", struct(csr_t), DTYPES[x.dtype], fields, 1)
    return dx, dedge, dheat
