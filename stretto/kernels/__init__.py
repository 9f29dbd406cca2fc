"""The kernels, tensors in and tensors out. The device of the first tensor chooses who runs them.

CPU: libstretto (cpu*.py) where it is loaded, CUDA: Triton (triton/) where it is installed; else the reference.
STRETTO_BACKEND=torch: torch's own (vendor.py), whatever the device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stretto import settings
from stretto.kernels import native
from stretto.kernels.backend import NATIVE, REFERENCE, VENDOR, Backend
from stretto.kernels.csr import Csr
from stretto.kernels.device import autocast_dtype, autocasts, has_own_memory, in_given_types, kind_of, on_host, room
from stretto.kernels.schema import DTYPES, Reduce, accumulate_type

__all__ = [
    "DTYPES",
    "NATIVE",
    "REFERENCE",
    "VENDOR",
    "Backend",
    "Csr",
    "Reduce",
    "accumulate_type",
    "autocast_dtype",
    "autocasts",
    "backend",
    "forced",
    "has_own_memory",
    "in_given_types",
    "kind_of",
    "name_of",
    "on_host",
    "room",
    "triton_kernels",
]

_forced: Backend | None = None


def backend(device: torch.device) -> Backend:
    """Who runs the kernels of a device."""
    if settings.torch_kernels():
        return VENDOR
    if _forced is not None:
        return _forced
    if device.type == "cpu":
        return NATIVE if native.library() is not None else REFERENCE
    if device.type == "cuda":
        return triton_kernels() or REFERENCE
    return REFERENCE


@functools.cache
def triton_kernels() -> Backend | None:
    """The kernels in Triton, or None where it is not installed. Imported when first asked for."""
    if importlib.util.find_spec("triton") is None:
        return None
    found: Backend = importlib.import_module("stretto.kernels.triton").BACKEND
    return found


@contextmanager
def forced(other: Backend) -> Iterator[None]:
    """Run every kernel by `other`, whatever the device: tests run Triton's on the CPU under TRITON_INTERPRET=1."""
    global _forced
    before, _forced = _forced, other
    try:
        yield
    finally:
        _forced = before


def name_of(device: torch.device) -> str:
    """What report() calls the kernels of a device."""
    found = backend(device)
    return f"native/{native.isa()}" if found is NATIVE else found.name
