"""A model as it was found: modes, gradients and buffers, and the state of random numbers, put back after a look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.analyze.clock import device_of
from stretto.errors import fail


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Steps may be taken inside the block; afterwards only time has passed. A change of classes stays."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not nn.parameter.is_lazy(b)]
    device = device_of(model)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, grad in grads:
            parameter.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                if buffer.shape == value.shape and not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def no_optimizer() -> Iterator[None]:
    """A step that would train the model is refused before it changes anything."""

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        fail(
            f"profile: 'step' steps {type(optimizer).__name__}, wanted a function that returns the loss and changes no "
            "parameter; a whole training step is profiled as a script: stretto profile train.py"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
