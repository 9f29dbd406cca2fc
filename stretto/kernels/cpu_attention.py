"""The attention kernels on the CPU: pointers out of tensors, then one call into libstretto per pass."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from stretto.kernels import abi, native
from stretto.kernels.attention import FORMS, TENSORS, Attention
from stretto.kernels.cpu import by_rows, pointer, struct
from stretto.kernels.csr import Csr
from stretto.kernels.schema import CPU, DTYPES, accumulate_type
from stretto.memory import pages
from stretto.memory.pool import empty

ROWS_PER_TASK = 128  # of row_dot, whose sums over them are made one row after the other


class _Call:
    """The C struct of an Attention, with the tensors it points to kept alive."""

    def __init__(self, a: Attention) -> None:
        v = by_rows(a.values)
        self.dtype = v.dtype
        self.acc = accumulate_type(v.dtype)
        self.a = a
        self.rows = rows = a.form in ("gatv2", "dot")
        self.scalar_edge = a.edge is not None and not rows
        self.heads, self.width = a.heads, v.size(2)
        self.kept: list[Tensor | None] = [v]
        self.fields = f = abi.ATTENTION(
            form=FORMS[a.form],
            heads=self.heads,
            width=self.width,
            value_heads=v.size(1),
            right_heads=self.heads,
            slope=a.slope,
            scale=a.scale,
            dropout=a.dropout,
            seed=a.seed & (2**64 - 1),
            alpha_dropped=int(a.dropped),
            v=v.data_ptr(),
            ldv=v.stride(0),
        )
        if a.left is not None and a.right is not None:
            left = by_rows(a.left) if rows else self.scalars(a.left)
            right = (v if a.v is None else by_rows(a.right)) if rows else self.scalars(a.right)
            self.kept += [left, right]
            f.left, f.ldl, f.right, f.ldr = left.data_ptr(), left.stride(0), right.data_ptr(), right.stride(0)
            if rows:
                f.score_width, f.right_heads = left.size(2), right.size(1)
        if a.edge is not None:
            f.edge = self.keep(a.edge.contiguous() if rows else self.scalars(a.edge))
        if a.att is not None:
            f.att = self.keep(self.scalars(a.att))
        if a.attr is not None:
            f.attr, f.attr_width = self.keep(a.attr.contiguous()), a.attr.size(1)
        if a.query is not None:
            f.query = self.keep(a.query.contiguous())
        if a.scores is not None:
            f.scores = self.keep(a.scores)

    def gradients(self, need: dict[str, bool]) -> dict[str, Tensor | None]:
        """An array for the gradient of each tensor that needs one: in its type, or that of the sums for scalars."""
        scalars = ("att",) if self.rows else ("att", "left", "right", "edge")
        return {
            name: empty(t.shape, self.acc if name in scalars else self.dtype) if t is not None and need[name] else None
            for name, t in zip(TENSORS, self.a.tensors, strict=True)
        }

    def scalars(self, t: Tensor) -> Tensor:
        return t.to(self.acc).contiguous()

    def keep(self, t: Tensor) -> int:
        self.kept.append(t)
        return t.data_ptr()

    def run(self, name: str, csr: Csr) -> None:
        pages.read_at_random(*self.kept)
        native.kernel(name, struct(csr), DTYPES[self.dtype], ctypes.byref(self.fields))


def attention(csr: Csr, a: Attention, *, weights: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """out, out_attr (with attributes only), alpha (if wanted) and the row statistics backward needs.

    All in the accumulation type: backward wants them unrounded. With a bias, out has its heads side by side.
    """
    call = _Call(a)
    f, h = call.fields, call.heads
    shape = (h, call.width) if a.bias is None else (h * call.width,)  # not a view: the caller may overwrite it
    out = empty((csr.num_rows, *shape), call.acc)
    if a.bias is not None:
        f.bias = call.keep(call.scalars(a.bias))
    stats = torch.empty(csr.num_rows, h, 2, dtype=call.acc, device=CPU)
    out_attr = None if a.attr is None else torch.empty(csr.num_rows, h, a.attr.size(1), dtype=call.acc, device=CPU)
    alpha = empty((csr.num_edges, h), call.acc) if weights else None
    f.out, f.stats, f.out_attr, f.alpha = out.data_ptr(), stats.data_ptr(), pointer(out_attr), pointer(alpha)
    if csr.num_rows and h:
        call.run("stretto_attention_forward", csr)
    return out, out_attr, alpha, stats


def attention_grad(
    csr: Csr,
    csr_t: Csr,
    a: Attention,
    out: Tensor,
    out_attr: Tensor | None,
    alpha: Tensor | None,
    stats: Tensor,
    grad: Tensor,
    grad_attr: Tensor | None,
    grad_alpha: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of a.tensors where needed, rows in their type, scalars in the accumulation type; of a bias, too."""
    call = _Call(a)
    f, h, acc = call.fields, call.heads, call.acc
    shape = (csr.num_rows, h, call.width)
    grad = by_rows(grad.reshape(shape))
    need = dict(zip(TENSORS, needs, strict=False))  # one more: whether a bias needs its gradient
    dbias = None
    f.stats, f.grad, f.ldg = stats.data_ptr(), call.keep(grad), grad.stride(0)
    if a.attr is not None and grad_attr is not None:
        f.grad_attr = call.keep(grad_attr.contiguous())
    if grad_alpha is not None:
        f.grad_alpha = call.keep(call.scalars(grad_alpha))
    if a.form != "weight":
        wanted = a.bias is not None and needs[-1]
        total, dbias = row_dot(grad.to(out.dtype), out.view(shape), offset=a.bias, sums=wanted)
        _add_row_sums(total, csr, out_attr, alpha, grad_attr, grad_alpha)
        f.row_sum = call.keep(total)
    elif a.bias is not None:
        dbias = grad.sum(0).flatten()
    by_row = need["left"] or need["query"]
    found = call.gradients(need)
    dscore = found["edge"] if call.scalar_edge else None
    if by_row and dscore is None:
        dscore = empty((csr.num_edges, h), acc)
    f.dv = pointer(found["right"] if a.v is None else found["v"])
    f.dright, f.datt, f.dattr, f.dscore = (pointer(t) for t in (found["right"], found["att"], found["attr"], dscore))
    f.dedge = None if call.scalar_edge else pointer(found["edge"])
    f.dleft, f.dquery = pointer(found["left"]), pointer(found["query"])
    call.run("stretto_attention_backward", csr_t)
    if by_row:
        call.run("stretto_attention_left", csr)
    every = tuple(found[name] for name in TENSORS)
    return every if a.bias is None else (*every, dbias)


def _add_row_sums(
    total: Tensor,
    csr: Csr,
    out_attr: Tensor | None,
    alpha: Tensor | None,
    grad_attr: Tensor | None,
    grad_alpha: Tensor | None,
) -> None:
    """total [n, h], which is grad . out, becomes the sum over each row of alpha * d alpha."""
    if grad_attr is not None and out_attr is not None:
        row_dot(grad_attr.to(out_attr.dtype), out_attr, into=total)
    if grad_alpha is not None and alpha is not None:
        products = csr.to_csr_order(alpha * grad_alpha.to(alpha.dtype))
        total.index_add_(0, csr.rows(), products)


def row_dot(
    a: Tensor, b: Tensor, *, offset: Tensor | None = None, into: Tensor | None = None, sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Dot products of equal rows a . (b - offset), added to `into`, and if wanted the sum of a over its rows.

    a, b [n, h, f], offset [h * f] -> [n, h] in the accumulation type, [h * f].
    """
    a, b = by_rows(a), by_rows(b)
    n, heads, width = a.shape
    acc = accumulate_type(a.dtype)
    out = torch.empty(n, heads, dtype=acc, device=CPU) if into is None else into
    if not out.numel():
        return out, torch.zeros(heads * width, dtype=acc, device=CPU) if sums else None
    offset = None if offset is None else offset.to(acc).contiguous()
    tasks = -(-n // ROWS_PER_TASK)
    parts = torch.empty(tasks, heads * width, dtype=acc, device=CPU) if sums else None
    operands = a, a.stride(0), b, b.stride(0), n, heads, width, offset
    native.kernel("stretto_row_dot", DTYPES[a.dtype], *operands, out, int(into is not None), parts, tasks)
    return out, None if parts is None else parts.sum(0)
