"""Kernels are tested once per instruction set this machine has."""

import pytest
import torch

from stretto.kernels import native


@pytest.fixture(params=native.isas() or ["none"])
def isa(request, own_world):
    """The instruction set in use, one thread; the shared fixture puts back what was."""
    if native.library() is None:
        pytest.skip(f"libstretto is not loaded: {native.why_not()}")
    native.set_isa(request.param)
    torch.set_num_threads(1)
    return request.param
