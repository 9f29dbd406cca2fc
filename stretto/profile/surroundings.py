"""What is set around a call of a model and decides what it computes: autocast, the default type, deterministic ways.

A step has left its `with` blocks when it is over, and a script what it set for its whole process. A model or a layer
that is called again is called in what was around it then; all else runs in what was set before.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.observe.trace import Trace
from stretto.page.text import duration

CHECK = ("aten::isnan", "aten::_is_any_true", "aten::_local_scalar_dense")  # of one gradient, by anomaly detection


@dataclass(frozen=True)
class Surroundings:
    """autocast: (device, type) where it is on. deterministic: whether it is asked for, and whether a warning does."""

    autocast: tuple[tuple[str, torch.dtype], ...]
    default: torch.dtype
    deterministic: tuple[bool, bool]

    @classmethod
    def now(cls) -> Surroundings:
        """Those of this moment."""
        return cls(
            tuple((d, torch.get_autocast_dtype(d)) for d in _devices() if torch.is_autocast_enabled(d)),
            torch.get_default_dtype(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """The block runs in them; what is set already is not set anew, for that takes its time."""
        before = Surroundings.now()
        if before == self:
            yield
            return
        wanted = dict(self.autocast)
        with ExitStack() as stack:
            stack.callback(before._set)
            for device in _devices():
                stack.enter_context(torch.autocast(device, wanted.get(device), enabled=device in wanted))
            self._set()
            yield

    def _set(self) -> None:
        """What has no block of its own."""
        torch.set_default_dtype(self.default)
        on, warn = self.deterministic
        torch.use_deterministic_algorithms(on, warn_only=warn)


def _devices() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@contextmanager
def process_kept() -> Iterator[None]:
    """What a script may set for its whole process, put back when it is over. Threads stay as they are: what is timed
    afterwards is timed as the script runs."""
    around, grads, folder = Surroundings.now(), torch.is_grad_enabled(), os.getcwd()
    arguments, path = sys.argv, list(sys.path)
    anomalies = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    start_method = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path
        os.chdir(folder)
        torch.set_grad_enabled(grads)
        around._set()
        torch.autograd.set_detect_anomaly(*anomalies)
        if multiprocessing.get_start_method(allow_none=True) != start_method:
            multiprocessing.set_start_method(start_method, force=True)


def anomaly_remarks(trace: Trace) -> list[str]:
    """What torch.autograd's anomaly detection adds to a step: it looks for NaN in every gradient."""
    backward = [op for op in trace if op.phase == "backward"]
    starts = range(len(backward) - len(CHECK) + 1)
    result = [
        backward[i : i + len(CHECK)] for i in starts if tuple(op.name for op in backward[i : i + len(CHECK)]) == CHECK
    ]
    if not result:
        return []
    seconds = sum(op.seconds for check in result for op in check)
    count = f"{len(CHECK) * len(result)} of {len(trace.ops)} ops"
    return [
        f"anomaly detection of torch.autograd is on: {count} of a step look for NaN in its gradients and take "
        f"{duration(seconds)}, besides what it does between ops; a step without it has none of that"
    ]


def imported_beside(script: str, before: set[str]) -> frozenset[str]:
    """Names of the modules that a script has imported since from its own folder: a second run begins without them, for
    they keep what the first one made (a model that has learned, an optimizer)."""
    folder = Path(script).resolve().parent
    result = set()
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        beside = file.endswith(".py") and folder in Path(file).resolve().parents
        if beside and "site-packages" not in file and name.partition(".")[0] != "stretto":
            result.add(name)
    return frozenset(result)
