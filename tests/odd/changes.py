"""What may be odd about one tensor of a call: where it lies, its type, its layout, its length, its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

Change = Callable[[Tensor], Any]

FAR = 2**40  # an index that 32 bits would cut to 0


def _every_second(t: Tensor) -> Tensor:
    """The same values, every second of a wider array."""
    wide = torch.full((*t.shape[:-1], 2 * t.size(-1)), 7 if t.dtype != torch.bool else 1).to(t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


def _turned(t: Tensor) -> Tensor:
    """The same values, columns one after the other in memory."""
    return t.t().contiguous().t() if t.dim() == 2 else t


def _offset(t: Tensor) -> Tensor:
    """The same values, not at the start of their storage and with a gap between rows."""
    if t.dim() < 2:
        return torch.cat([t.new_zeros(1), t])[1:] if t.dim() else t
    return torch.cat([t, t.new_zeros(t.size(0), 3, *t.shape[2:])], 1)[:, : t.size(1)]


def _as_subclass(t: Tensor) -> Tensor:
    class Mine(Tensor):
        pass

    return t.as_subclass(Mine)


# Of a tensor of values: features, weights, attributes.
VALUES: dict[str, Change] = {
    "on meta": lambda t: t.to("meta"),
    **{
        f"as {dtype}".replace("torch.", ""): lambda t, dtype=dtype: t.to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int8, torch.bool, torch.cfloat)
    },
    "every second column": _every_second,
    "columns first": _turned,
    "with a gap": _offset,
    "one row for all": lambda t: t[:1].expand_as(t),
    "one column for all": lambda t: t[..., :1].expand_as(t),
    "upside down": lambda t: t.flip(0),
    "a row less": lambda t: t[:-1],
    "a row more": lambda t: torch.cat([t, t[-1:]]),
    "no rows": lambda t: t[:0],
    "a column less": lambda t: t[..., :-1],
    "no columns": lambda t: t[..., :0],
    "flat": lambda t: t.reshape(-1),
    "a number": lambda t: t.sum(),
    "a dimension more": lambda t: t.unsqueeze(-1),
    "a dimension before": lambda t: t.unsqueeze(0),
    "twice in front": lambda t: torch.stack([t, t]),
    "sparse": lambda t: t.to_sparse(),
    "of a class of its own": _as_subclass,
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "an array": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "None": lambda t: None,
    "text": lambda t: "x",
}


def _put(t: Tensor, value: int) -> Tensor:
    t = t.clone()
    t.view(-1)[-1:] = value
    return t


def _csr(t: Tensor, pointers: Callable[[Tensor], Tensor], columns: Callable[[Tensor], Tensor] = lambda c: c) -> Tensor:
    """The adjacency, rows destinations, as torch's CSR whose pointers or columns nobody has checked."""
    n = int(t.max()) + 1 if t.numel() else 1
    right = torch.sparse_coo_tensor(t.flip(0), torch.ones(t.size(1), dtype=torch.float64), (n, n)).coalesce()
    right = right.to_sparse_csr()
    crow, col = pointers(right.crow_indices().clone()), columns(right.col_indices().clone())
    return torch.sparse_csr_tensor(crow, col, right.values(), (n, n), check_invariants=False)


def _csc(t: Tensor, pointers: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor] = lambda r: r) -> Tensor:
    right = _csr(t, lambda p: p)
    ends, values = (right.crow_indices().clone(), right.col_indices().clone()), right.values()
    return torch.sparse_csc_tensor(pointers(ends[0]), rows(ends[1]), values, right.shape, check_invariants=False)


def _fall(pointers: Tensor) -> Tensor:
    """Pointers that go down in between, with the right ends."""
    if pointers.numel() > 3:
        pointers[1], pointers[2] = pointers[-1], pointers[0]
    return pointers


def _beyond(pointers: Tensor) -> Tensor:
    pointers[-1] += 1000
    return pointers


# Of a tensor of indices [2, E].
INDICES: dict[str, Change] = {
    "on meta": lambda t: t.to("meta"),
    **{
        f"as {dtype}".replace("torch.", ""): lambda t, dtype=dtype: t.to(dtype)
        for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8, torch.float32, torch.bool, torch.cfloat)
    },
    "learned": lambda t: t.double().requires_grad_(),
    "every second column": _every_second,
    "columns first": _turned,
    "with a gap": _offset,
    "one edge for all": lambda t: t[:, :1].expand_as(t),
    "one end for both": lambda t: t[:1].expand_as(t),
    "negative": lambda t: _put(t, -1),
    "very negative": lambda t: _put(t, -FAR),
    "one too far": lambda t: _put(t, 12),
    "too far": lambda t: _put(t, 1000),
    "far": lambda t: _put(t, FAR),
    "as far as can be": lambda t: _put(t, 2**63 - 1),
    "no edges": lambda t: t[:, :0],
    "an edge less": lambda t: t[:, :-1],
    "three rows": lambda t: torch.cat([t, t[:1]]),
    "one row": lambda t: t[:1],
    "flat": lambda t: t.reshape(-1),
    "a dimension more": lambda t: t.unsqueeze(-1),
    "turned": lambda t: t.t(),
    "an EdgeIndex": lambda t: EdgeIndex(t),
    "an EdgeIndex too small": lambda t: EdgeIndex(t, sparse_size=(3, 3)),
    "a class of its own": _as_subclass,
    "an array": lambda t: t.numpy(),
    "a list": lambda t: t.tolist(),
    "None": lambda t: None,
    "sparse": lambda t: t.to_sparse(),
}

# Sparse matrices that torch does not check, and dies of: ours must raise.
BROKEN: dict[str, Change] = {
    "csr that falls": lambda t: _csr(t, _fall),
    "csr that leads too far": lambda t: _csr(t, _beyond),
    "csr that does not start at 0": lambda t: _csr(t, lambda p: p + 1),
    "csr with a column far out": lambda t: _csr(t, lambda p: p, lambda c: _put(c, FAR)),
    "csr with a negative column": lambda t: _csr(t, lambda p: p, lambda c: _put(c, -1)),
    "csc that falls": lambda t: _csc(t, _fall),
    "csc that leads too far": lambda t: _csc(t, _beyond),
    "csc with a row far out": lambda t: _csc(t, lambda p: p, lambda c: _put(c, FAR)),
}


def change_of(t: Tensor) -> dict[str, Change]:
    """The table for a tensor: indices have two rows of integers, or one where they are types."""
    return VALUES if t.is_floating_point() else INDICES


def leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor in a nest of tuples, lists and dicts, and the way to it."""
    if isinstance(value, Tensor):
        return [(at, value)]
    if isinstance(value, (tuple, list)):
        return [found for i, part in enumerate(value) for found in leaves(part, (*at, i))]
    if isinstance(value, dict):
        return [found for key, part in value.items() for found in leaves(part, (*at, key))]
    return []


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """The same nest with something else at the end of that way."""
    if not at:
        return new
    if isinstance(value, dict):
        return {k: replaced(part, at[1:], new) if k == at[0] else part for k, part in value.items()}
    return type(value)(replaced(part, at[1:], new) if i == at[0] else part for i, part in enumerate(value))
