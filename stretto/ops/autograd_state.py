"""What autograd says of itself: for functions that keep results beside what it saves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_kept: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


class _Here(threading.local):
    several = False


_here = _Here()


def saved_elsewhere() -> bool:
    """Whether hooks are on that may move what is saved for backward to another place, or hold it against another pass.

    torch.utils.checkpoint does the latter: it runs a layer again in backward, and raises if other tensors are saved
    than in forward. While hooks are on nothing is tried, and no call may be served otherwise than the one before.
    """
    return _hooks is not None and bool(_hooks(True))


def again_in_backward() -> bool:
    """Whether a forward pass is being run again inside of a backward pass, as torch.utils.checkpoint does."""
    return saved_elsewhere() and torch._C._current_graph_task_id() != -1


def is_last() -> bool:
    """Inside backward: whether the graph is given up, so that what was kept will not be read again."""
    return _kept is not None and not _here.several and not _kept()


@contextmanager
def saved_here() -> Iterator[None]:
    """What is saved inside is nobody's but ours, whatever hooks are on."""
    if not saved_elsewhere():
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # of several pairs only the inner one is asked
        yield


def _same(tensor: Any) -> Any:
    return tensor


@contextmanager
def several_times() -> Iterator[None]:
    """Inside the block backward may run several times, so nothing that it reads may be freed."""
    before, _here.several = _here.several, True
    try:
        yield
    finally:
        _here.several = before
