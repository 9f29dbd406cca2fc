"""A call site of a layer: the module, what it was called with, and how often a step calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.observe.nested import mapped
from stretto.profile.captured import operands
from stretto.profile.surroundings import Surroundings


class Site(NamedTuple):
    """A layer, what it was called with, how often a step calls it, and whether each step brings another graph.

    forward: further calls of a step, to which no gradient comes back: an evaluation, or a generator that is detached.
    evaluation: what those are called with, where it was seen; an evaluation has no Dropout before its layers.
    changing: those of its tensors, by id, that are others in every step (features after a Dropout, a GAN's noise): what
    an accelerated layer keeps of a constant it cannot keep of them.
    around: what was set around the call, autocast first of all; None: what is set anyway.
    grads: what came back to each tensor of its result that asks for gradients, by position, where it was seen.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: float = 1
    forward: float = 0
    new_graph: bool = False
    changing: frozenset[int] = frozenset()
    evaluation: Site | None = None
    around: Surroundings | None = None
    grads: dict[int, Tensor] | None = None

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any) -> Site:
        """The site of a call that is being made."""
        return cls(module, detached(args), detached(kwargs), around=Surroundings.now(), grads={})

    def answered(self, out: Any) -> None:
        """Note the gradients that will come back to this result."""
        grads = {} if self.grads is None else self.grads
        for place, tensor in enumerate(learned(out)):
            tensor.register_hook(lambda grad, place=place: grads.__setitem__(place, grad.detach()))

    def gradients(self, out: Any) -> list[tuple[Tensor, Tensor]]:
        """The tensors of a result that gradients come back to, each with the one it had in the model: rows without a
        loss are zeros, and a sum would hand out one number for all. Ones, where none was seen."""
        ends, seen = learned(out), self.grads or {}
        if not seen:
            return [(end, torch.ones_like(end)) for end in learned(out[0] if isinstance(out, tuple) else out)]
        pairs = [(end, seen[place]) for place, end in enumerate(ends) if place in seen]
        return [(end, grad if grad.shape == end.shape else torch.ones_like(end)) for end, grad in pairs]

    def again(self) -> AbstractContextManager[None]:
        """The block runs in what was set around the call."""
        return nullcontext() if self.around is None else self.around.again()

    def called(self) -> Any:
        """What the module answers to the same call, in what was set around it."""
        with self.again():
            return self.module(*self.args, **self.kwargs)

    def others(self, args: Any, kwargs: Any) -> frozenset[int]:
        """`changing`, after a call with these arguments."""
        before, now = operands((self.args, self.kwargs)), operands((args, kwargs))
        same = {id(a) for a, b in zip(before, now, strict=False) if a is b}
        return self.changing | {id(t) for t in before if t.is_floating_point() and id(t) not in same}


def learned(out: Any) -> list[Tensor]:
    """The tensors of a result that ask for gradients; several of a layer of nodes of several types."""
    return [t for t in operands(out) if t.requires_grad]


def backward(ends: list[tuple[Tensor, Tensor]]) -> None:
    """The backward pass from tensors with their gradients."""
    if ends:
        torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])


def detached(value: Any) -> Any:
    """The value with every tensor inside cut from its graph; those that carried gradients still ask for them."""
    return each_tensor(value, lambda t: t.detach().requires_grad_() if t.requires_grad else t)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with every tensor inside changed."""
    return mapped(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def indices(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among arguments that are an edge_index [2, E]."""
    result = operands((args, kwargs))
    return [t for t in result if t.dim() == 2 and t.size(0) == 2 and t.dtype in (torch.int64, torch.int32)]
