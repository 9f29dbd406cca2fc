"""One thread, so that tests which share cores do not wait for one another; and scripts to be profiled."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def written(tmp_path):
    """Writes a script and tells where."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write
