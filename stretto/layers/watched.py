"""Whether what stands inside a layer does more than its class says: someone watches its calls, or has changed it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from stretto.layers.own_class import replaced_forward

# The types of a weight that a module multiplies with and nothing else: a class derived from Tensor (quantised values,
# an adapter) computes by itself.
_PLAIN = (type(None), torch.nn.Parameter, Tensor, torch.nn.parameter.UninitializedParameter)


def hooked(*modules: Any) -> bool:
    """Whether someone watches a module's calls, or has put another forward on it or on its class (torch's or PyG's), or
    a weight that is no parameter (another network's result) or computes by itself."""
    return any(
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        or "forward" in m.__dict__
        or "weight" in m.__dict__
        or "bias" in m.__dict__
        or type(m._parameters.get("weight")) not in _PLAIN
        or replaced_forward(type(m))
        for m in modules
    )


_EVERYWHERE = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def watched_everywhere() -> bool:
    """Whether someone watches the calls of all modules, those inside a layer too. Not we, who follow what runs."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("stretto.")
        for hooks in _EVERYWHERE
        if hooks
        for hook in hooks.values()
    )
