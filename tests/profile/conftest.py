"""One thread, so that tests which share cores do not wait for one another."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
