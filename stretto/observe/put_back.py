"""A model as it was found: what the steps of an analysis change is put back at their end.

That is buffers (BatchNorm's statistics), modes, gradients, plain attributes (PyG's caches of a normalised graph or of
A X among them) and the states of the random generators. Parameters are left alone: no step here has an optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.errors import fail

INTERNAL = frozenset(vars(nn.Module()))  # of every module: its parameters, buffers, children and hooks
OURS = "_stretto"  # attributes of accelerated layers: what the tuner has found stays found
CACHED = "_cached"  # of PyG's layers with cached=True
HOLDERS = (dict, list, set)


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Whatever steps run inside the block, the model and the random generators are as before at its end."""
    modules = [(module, _attributes(module), _buffers(module), module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    drawn = _random_states()
    try:
        yield
    finally:
        for module, attributes, buffers, training in modules:
            module.training = training
            _put_buffers(module, buffers)
            if attributes is not None:
                _put_attributes(module, attributes)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        _put_random_states(drawn)


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """As put_back(), and PyG's caches are empty at first: for a step on another graph than the model's own."""
    with put_back(model):
        for module in model.modules():
            for name in vars(module):
                if name.startswith(CACHED):
                    setattr(module, name, None)
        yield


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


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]] | None:
    """Name -> (value, what it held); None of a module whose first call makes it another: that is not taken back."""
    if any(p is not None and is_lazy(p) for p in module._parameters.values()):
        return None
    return {
        name: (value, value.copy() if type(value) in HOLDERS else None)
        for name, value in vars(module).items()
        if name not in INTERNAL and not name.startswith(OURS)
    }


def _put_attributes(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    state = vars(module)
    for name in [name for name in state if name not in before and name not in INTERNAL]:
        if not name.startswith(OURS):
            del state[name]
    for name, (value, saved) in before.items():
        if saved is not None:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(saved)
        state[name] = value


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Name -> (the tensor, its values)."""
    return {
        name: (buffer, buffer.detach().clone() if buffer is not None and _plain(buffer) else None)
        for name, buffer in module._buffers.items()
    }


def _plain(buffer: Tensor) -> bool:
    """Whether steps may change it in place: not a matrix, which a layer replaces, nor one that is yet to be made."""
    return not is_lazy(buffer) and buffer.layout == torch.strided


def _put_buffers(module: nn.Module, before: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
    for name in [name for name in module._buffers if name not in before]:
        del module._buffers[name]
    for name, (buffer, values) in before.items():
        module._buffers[name] = buffer
        if buffer is not None and values is not None and not torch.equal(buffer, values):
            with torch.no_grad():
                buffer.copy_(values)


def _random_states() -> tuple[Any, ...]:
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cards, np.random.get_state(), random.getstate()


def _put_random_states(states: tuple[Any, ...]) -> None:
    here, cards, by_numpy, by_python = states
    torch.set_rng_state(here)
    if cards:
        torch.cuda.set_rng_state_all(cards)
    np.random.set_state(by_numpy)
    random.setstate(by_python)
