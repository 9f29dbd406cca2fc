"""Kernels are tested once per instruction set this machine has."""

import pytest

from stretto.kernels import native


@pytest.fixture(params=native.isas() or ["none"])
def isa(request):
    """The instruction set in use; the shared fixture puts the old one back."""
    if native.library() is None:
        pytest.skip(f"libstretto is not loaded: {native.why_not()}")
    native.set_isa(request.param)
    return request.param
