"""Whether this thread's calls of kernels are being written down (tape.py), and by whom."""

from __future__ import annotations

import threading
from typing import Any


class Recorder(threading.local):
    """Who writes down what this thread calls, if someone does."""

    tape: Any = None


recorder = Recorder()


def recording() -> bool:
    """Whether this thread's calls are written down."""
    return recorder.tape is not None


def unsettled() -> None:
    """What is called now is still being chosen: not to be written down, but to be tried again."""
    if recorder.tape is not None:
        recorder.tape.playable = recorder.tape.settled = False


def unrecorded() -> None:
    """What is called now cannot be written down."""
    if recorder.tape is not None:
        recorder.tape.playable = False


def keep(*owners: object) -> None:
    """What is called now reads memory of these: they live as long as what is written down."""
    if recorder.tape is not None:
        recorder.tape.keep(*owners)
