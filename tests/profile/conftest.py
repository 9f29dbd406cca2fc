"""One thread, so that tests which share cores do not wait for one another; and scripts to be profiled."""

import pytest
import torch

from stretto.machine.timing import Timing


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


@pytest.fixture
def paced(monkeypatch):
    """Clocks: a layer is three times faster alone."""
    from stretto.profile import recommend

    def in_turns(steps, *_):
        return {name: Timing((3.0 if name.startswith("stock") else 1.0,) * 4) for name in steps}

    monkeypatch.setattr(recommend, "_in_turns", in_turns)
