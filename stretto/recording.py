"""Whether this thread's calls of kernels are being written down (ops/program.py), and by whom."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch


class Recorder(threading.local):
    """Who writes down what this thread calls, if someone does."""

    program: Any = None


recorder = Recorder()


def unsettled() -> None:
    """What is called now is still being chosen, or was found by looking at values: it is not to be written down."""
    if recorder.program is not None:
        recorder.program.refuse("a choice that is still open")


def looked(t: Any) -> bool:
    """The value of this tensor, which no optimizer writes, is looked at: what is written down holds while it stays.

    Whether something is written down.
    """
    if recorder.program is None:
        return False
    recorder.program.looked_at.append((t, t._version, t.data_ptr()))
    return True


def finite(t: Any) -> bool:
    """Whether the sum of all values is finite. What is written down is run only where it is."""
    if recorder.program is not None:
        recorder.program.expect_finite(t.detach())
        return True
    return math.isfinite(
        float(t.detach().sum(dtype=torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype))
    )


class Recorded:
    """libstretto, as callers see it while their calls are written down."""

    def __init__(self, library: Any, program: Any) -> None:
        self._library, self._program = library, program

    def __getattr__(self, name: str) -> Any:
        function, program = getattr(self._library, name), self._program

        def call(*arguments: Any) -> Any:
            program.native(name, function, arguments)
            return function(*arguments)

        return call
