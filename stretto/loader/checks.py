"""What native code may read is looked at here first: numbers, arrays, pointers of rows, indices of nodes.

Every function raises a StrettoError that names the caller, the argument, what was wanted and what came. They are called
when an array is bound (given to a sampler, a store or a walk), so that nothing is looked at per batch.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import IndexRangeError, fail
from stretto.kernels import build, on_host

INDEX = (torch.int64, torch.int32)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOST_THREADS = 1024  # of one loader: beyond, a machine only runs out of them


def count(who: str, name: str, value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """An integer in [least, most]."""
    try:
        number = operator.index(value)
    except TypeError:
        fail(f"{who}: '{name}' is {value!r}, wanted an integer")
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        fail(f"{who}: '{name}' is {value!r}, wanted an integer")
    if number < least:
        fail(f"{who}: '{name}' is {number}, wanted at least {least}")
    if number > most:
        fail(f"{who}: '{name}' is {number}, wanted at most {most}")
    return number


def shape_of(value: Any) -> str:
    """A value in the words of an error: what kind of array it is."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    place = "" if on_host(value) else f" on {value.device}"
    layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
    return f"{str(value.dtype).removeprefix('torch.')}{layout} of shape {list(value.shape)}{place}"


def readable(value: Any) -> bool:
    """Whether native code can read an array by its address: a dense tensor in memory, all of it there."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or not on_host(value):
        return False
    return not value.is_conj() and not value.is_neg() and is_whole(value)


def is_whole(value: Tensor) -> bool:
    """Whether all of a tensor's values lie in its memory: `untyped_storage().resize_(0)` leaves only a shape.

    torch itself reads what is no longer there.
    """
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or not on_host(value):
        return True
    if value.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (value.storage_offset() + last + 1) * value.element_size() <= value.untyped_storage().nbytes()


def is_dense(value: Any) -> bool:
    """Whether torch can read every value of it where it is: a dense tensor, all of it there, on any device but meta."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and is_whole(value)


def whole(who: str, name: str, value: Any) -> None:
    """All values of an array are in memory, where it is an array."""
    if isinstance(value, Tensor) and not is_whole(value):
        fail(f"{who}: {name!r} is {shape_of(value)}, but its memory was let go or made smaller")


def row_stride(value: Tensor) -> int | None:
    """Bytes from one row (along dimension 0) to the next, where the values of a row lie side by side; else None."""
    if not readable(value) or value.dim() == 0:
        return None
    if value.numel() == 0:
        return 0
    return int(value.stride(0)) * value.element_size() if value[0].is_contiguous() else None


def vector(who: str, name: str, value: Any, dtypes: Sequence[torch.dtype], length: int | None = None) -> Tensor:
    """A one-dimensional array that native code reads where it lies: one of these types, of this length."""
    wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    wanted = f"a contiguous tensor of {wanted} in memory, of shape [{'n' if length is None else length}]"
    fits = readable(value) and value.dtype in dtypes and value.dim() == 1 and value.is_contiguous()
    if not fits or (length is not None and value.numel() != length):
        strided = readable(value) and not value.is_contiguous()
        fail(f"{who}: '{name}' is {shape_of(value)}{' with strides' if strided else ''}, wanted {wanted}")
    array: Tensor = value
    return array


def indices(who: str, name: str, value: Any, size: int | None = None, *, of: str = "node") -> Tensor:
    """Indices on the CPU, int64, one-dimensional and contiguous; each in [0, size), where a size is given."""
    if not is_dense(value) or value.dim() != 1 or value.dtype not in INTEGERS:
        fail(f"{who}: '{name}' is {shape_of(value)}, wanted integers of shape [n]")
    array: Tensor = value.detach().to("cpu", torch.int64).contiguous()
    if size is not None:
        in_range(who, name, array, size, of=of)
    return array


def real(who: str, name: str, value: Any) -> Tensor:
    """Real numbers that torch can read, of whatever type and shape."""
    if not is_dense(value) or value.is_complex():
        fail(f"{who}: '{name}' is {shape_of(value)}, wanted real numbers in a dense tensor")
    array: Tensor = value
    return array


def in_range(who: str, name: str, index: Tensor, size: int, *, of: str = "node") -> None:
    """Every one of these integers lies in [0, size)."""
    least, most = build.minmax(index)
    if least < 0 or most >= size:
        wrong = most if least >= 0 else least
        raise IndexRangeError(f"{who}: '{name}' has {of} {wrong}, wanted 0 <= {of} < {size}")


def pointers(who: str, name: str, value: Any, num_rows: int, num_edges: int, *, rising: bool = True) -> None:
    """Pointers of rows: num_rows + 1 of them, from 0 to num_edges; rising: and none below the one before it."""
    if not is_dense(value) or value.dtype not in INTEGERS:
        fail(f"{who}: '{name}' is {shape_of(value)}, wanted integers of shape [{num_rows + 1}], one more than rows")
    if value.dim() != 1 or value.numel() != num_rows + 1:
        fail(f"{who}: '{name}' has shape {list(value.shape)}, wanted [{num_rows + 1}], one more than rows")
    first, last = int(value[0]), int(value[-1])
    if first != 0 or last != num_edges:
        fail(f"{who}: '{name}' goes from {first} to {last}, wanted from 0 to {num_edges}, the number of edges")
    if rising and bool((value[1:] < value[:-1]).any()):
        at = int((value[1:] < value[:-1]).nonzero()[0])
        fail(f"{who}: '{name}' decreases from {int(value[at])} to {int(value[at + 1])} after row {at}")


def edges(who: str, name: str, edge_index: Any, num_sources: int, num_targets: int) -> tuple[Tensor, Tensor]:
    """Sources and targets of an edge_index [2, E] of int64 or int32, all of them nodes."""
    fits = is_dense(edge_index) and edge_index.dim() == 2 and edge_index.size(0) == 2
    if not fits or (edge_index.dtype not in INDEX and edge_index.numel()):  # an empty list makes a tensor of floats
        fail(f"{who}: '{name}' is {shape_of(edge_index)}, wanted int64 or int32 of shape [2, E]")
    edge_index = edge_index.detach().cpu()
    source, target = edge_index if edge_index.dtype in INDEX else edge_index.long()
    for end, index, size in (("source", source, num_sources), ("target", target, num_targets)):
        in_range(who, name, index, size, of=end)
    return source, target


def state(value: Tensor) -> tuple[Any, ...]:
    """What changes whenever a tensor is edited through torch, or put on other memory, or given another shape."""
    address = value.data_ptr() if readable(value) else 0
    version = 0 if value.is_inference() else value._version
    strides = value.stride() if value.layout == torch.strided else None
    return address, version, value.dtype, value.shape, strides, value.device


def fixed(*arrays: Tensor | None) -> None:
    """Keep torch from moving the memory of arrays that threads read: `x.resize_()` to more than there is would free it.

    torch refuses to resize what NumPy has seen; a smaller `resize_` changes the shape alone and is still allowed.
    """
    for array in arrays:
        if array is not None and array.untyped_storage().resizable():
            with torch.inference_mode(False):
                torch.empty(0, dtype=torch.uint8).set_(array.untyped_storage()).numpy()
