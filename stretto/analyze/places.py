"""Where the results of an op lie, and how much new memory it was given."""

from __future__ import annotations

import resource
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int]  # address, bytes


def pages_handed_out() -> int:
    """Pages that the system has handed out to this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def results(out: Any) -> list[Tensor]:
    """The dense tensors among the results of an op, in order."""
    given = out if isinstance(out, (tuple, list)) else (out,)
    return [t for t in given if isinstance(t, Tensor) and t.layout == torch.strided]


def places_of(out: Any) -> list[Place]:
    """The memory of each dense tensor among the results of an op, in order."""
    storages = [tensor.untyped_storage() for tensor in results(out)]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages]


def overlap(one: Place, other: Place) -> bool:
    """Whether two places share a byte."""
    return max(one[0], other[0]) < min(one[0] + one[1], other[0] + other[1])
