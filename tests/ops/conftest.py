"""Ops are tested on small graphs with one thread: a second one would only wait, and slow a busy machine down.

That no result depends on threads is shown in tests/kernels/test_threads.py, and here by the hub.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(own_world):
    """The shared fixture puts the number back."""
    torch.set_num_threads(1)
