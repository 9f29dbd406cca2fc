"""What the interpreter does between two ops of a step, for a chain of ops that runs without the model.

Between two ops a model runs modules, autograd and Python: an op of tens of microseconds then finds the caches full of
other code, and takes up to a fifth longer than one op right after the other. A chain that stands for the model pauses
as long as it does, and spends the pause as it does: on Python of many functions.
"""

from __future__ import annotations

import inspect
import itertools
import time
from types import FunctionType, ModuleType

import torch
import torch_geometric.utils

MODULES: tuple[ModuleType, ...] = (inspect, torch.nn.functional, torch_geometric.utils)
_subjects = itertools.cycle([f for module in MODULES for f in vars(module).values() if type(f) is FunctionType])


def interpret(until: float) -> None:
    """Run Python until time.perf_counter() says so: what a call of one function after the other would look like."""
    while time.perf_counter() < until:
        inspect.signature(next(_subjects))
