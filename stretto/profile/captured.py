"""The inputs that hot ops had in the model, taken from one more step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.kernels.attention import TENSORS, Attention
from stretto.observe.nested import leaves
from stretto.observe.trace import Recorder

if TYPE_CHECKING:
    from stretto.profile.profiling import Group, Profile

Captured = dict[int, tuple[Any, tuple[Any, ...], dict[str, Any]]]  # op -> (function, args, kwargs)


def slowest(profile: Profile, group: Group) -> int:
    """The call of a group that took longest."""
    return max(group.ops, key=lambda i: profile.trace.ops[i].seconds)


def capture(profile: Profile, groups: list[Group]) -> Captured:
    """The inputs of each group's slowest call; a call that this step does not make is missing."""
    workload = profile.workload
    recorder = Recorder(workload.model, full=False, capture=frozenset(slowest(profile, group) for group in groups))
    with recorder.recording():
        workload.run(recorder)
    workload.model.zero_grad(set_to_none=True)
    return recorder.captured


def is_index(value: Any) -> bool:
    """Whether a value is a tensor of places."""
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() > 0


def operands(value: Any) -> list[Tensor]:
    """Every dense tensor inside a value, in the order in which a trace lists them."""
    inside: list[Any] = []
    for leaf in leaves(value):
        inside += [getattr(leaf, name) for name in TENSORS] if isinstance(leaf, Attention) else [leaf]
    return [t for t in inside if isinstance(t, Tensor) and t.layout == torch.strided]
