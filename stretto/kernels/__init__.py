"""The kernels, tensors in and tensors out. The device of the first tensor chooses who runs them.

CPU: libstretto (cpu.py) where it is loaded, CUDA: Triton (triton/) where it is installed; else the reference.
STRETTO_BACKEND=torch: torch's own (vendor.py), whatever the device.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from stretto import settings
from stretto.kernels import cpu, native, reference, vendor
from stretto.kernels.csr import Csr
from stretto.kernels.room import has_own_memory, room
from stretto.kernels.schema import DTYPES, Reduce, accumulate_type

__all__ = [
    "DTYPES",
    "Csr",
    "Reduce",
    "accumulate_type",
    "backend",
    "forced",
    "has_own_memory",
    "name_of",
    "room",
    "triton_kernels",
]

_forced: ModuleType | None = None


def backend(device: torch.device) -> ModuleType:
    """The module that holds the kernels for a device."""
    if settings.torch_kernels():
        return vendor
    if _forced is not None:
        return _forced
    if device.type == "cpu":
        return cpu if native.library() is not None else reference
    if device.type == "cuda":
        return triton_kernels() or reference
    return reference


@functools.cache
def triton_kernels() -> ModuleType | None:
    """The kernels in Triton, or None where it is not installed. Imported when first asked for."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("stretto.kernels.triton")


@contextmanager
def forced(module: ModuleType) -> Iterator[None]:
    """Run every kernel by `module`, whatever the device: tests run Triton's on the CPU under TRITON_INTERPRET=1."""
    global _forced
    before, _forced = _forced, module
    try:
        yield
    finally:
        _forced = before


def name_of(device: torch.device) -> str:
    """What report() calls the kernels of a device."""
    module = backend(device)
    if module is cpu:
        return f"native/{native.isa()}"
    return {reference: "reference", vendor: "torch"}.get(module, "triton")
