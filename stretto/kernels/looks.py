"""What a tensor looks like now: how every cache knows whether what it made from a tensor still holds.

A cache keeps look(tensor) beside a weak reference to the tensor, and serves what it made while both are as they were.
A version alone does not tell: `w.data = other`, `model.half().float()`, `vector_to_parameters` and `swap_tensors` put
another storage under the same number. Nor does an address: memory is reused, so the storage is named by a weak
reference, which no later storage equals.

Fused optimizers (`Adam(fused=True)`) write parameters and raise no version. What may be trained is therefore told by
settled(), and nothing that was made of it is kept from one call to the next. What no look shows is named in
docs/all_of_stretto.md (aliases behind torch's back), and stretto.forget() is for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import Parameter

from stretto.lifetime import popped_from

Look = tuple[Hashable, ...]
_trained: dict[int, weakref.ref[Tensor]] = {}  # by id: leaves that a cache has met while they required a gradient


def look(tensor: Tensor) -> Look | None:
    """What changes when the tensor's content may have changed; None where that cannot be told.

    It cannot of what was made in inference mode, which counts no edits, nor of a subclass, which may keep its content
    elsewhere (of PyG's EdgeIndex ask the tensor inside).
    """
    if type(tensor) not in _PLAIN or tensor.is_inference():
        return None
    if tensor.layout is not torch.strided:
        parts = tuple([look(part) for part in _parts(tensor.detach())])
        return None if None in parts else (tensor.layout, tensor.shape, tensor._version, parts)
    return (
        weakref.ref(tensor.untyped_storage()),  # torch keeps one object a storage, for as long as the storage lives
        tensor.data_ptr(),
        tensor._version,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def settled(tensor: Tensor) -> Look | None:
    """look() of a tensor that nobody trains; None of any other: nothing made of it may be kept.

    Trained is what requires a gradient or has one, a Parameter even while it is frozen, a view of either, and a leaf
    that a cache has met while it required a gradient.
    """
    base = tensor._base
    if tensor.requires_grad or (base is not None and base.requires_grad):
        note_trained(tensor)
        return None
    if _is_trained(tensor) or (base is not None and _is_trained(base)):
        return None
    return look(tensor)


def forget() -> None:
    """Take every tensor for new: also what has been trained may be a constant from now on."""
    _trained.clear()


_PLAIN = (Tensor, Parameter)


def note_trained(tensor: Tensor) -> None:
    """Remember a leaf that requires a gradient, or is looked at by a view that does, for the day on which its
    requires_grad is switched off. A Parameter shows what it is."""
    tensor = tensor if tensor._base is None else tensor._base
    if tensor.is_leaf and type(tensor) is Tensor and id(tensor) not in _trained:
        number = id(tensor)
        _trained[number] = popped_from(_trained, number, tensor)


def _is_trained(tensor: Tensor) -> bool:
    if type(tensor) is Parameter and tensor.is_floating_point():
        return True
    return tensor.grad is not None or id(tensor) in _trained


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The arrays that a sparse tensor is made of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
