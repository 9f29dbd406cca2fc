"""The kernels, tensors in and tensors out. The device of the first tensor chooses who runs them.

CPU: libstretto (cpu.py) where it is loaded, else the reference. Elsewhere: the backends of BACKENDS, else the reference.
"""

from __future__ import annotations

from types import ModuleType

import torch

from stretto.kernels import cpu, native, reference
from stretto.kernels.csr import Csr
from stretto.kernels.schema import DTYPES, Reduce, accumulate_type

__all__ = ["DTYPES", "Csr", "Reduce", "accumulate_type", "backend", "name_of"]


def backend(device: torch.device) -> ModuleType:
    """The module that holds the kernels for a device."""
    if device.type == "cpu" and native.library() is not None:
        return cpu
    return reference


def name_of(device: torch.device) -> str:
    """What report() calls the kernels of a device."""
    module = backend(device)
    return f"native/{native.isa()}" if module is cpu else "reference"
