"""Seconds of one call: by the wall on a processor, by the card's own events on a card.

A card works while the host goes on: the wall would count the host's part of a call, which in a step is hidden behind
the calls before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stretto.tune.timing import on_card, timed


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are; a model without any is on the processor."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def by_wall(call: Callable[[], Any]) -> float:
    """Seconds until a call returns."""
    return timed(call)[1]


def until_idle(call: Callable[[], Any]) -> float:
    """Seconds until a card that had nothing to do has done a call: what a lone op takes there."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def work_clock(device: torch.device | str) -> Callable[[Callable[[], Any]], float]:
    """The clock for an op's own work on this device."""
    return on_card if torch.device(device).type == "cuda" else by_wall


def call_clock(device: torch.device | str) -> Callable[[Callable[[], Any]], float]:
    """The clock for an op from its call to its end, as a traced step has it."""
    return until_idle if torch.device(device).type == "cuda" else by_wall
