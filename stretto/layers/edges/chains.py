"""Networks inside layers as chains of Linears and activations, for ops.edge_layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn.models import MLP
from torch_geometric.nn.models.schnet import ShiftedSoftplus

from stretto.layers.base import LINEAR, hooked
from stretto.layers.gin import _only_relu
from stretto.ops.edge_layer import Chain


def chain_of(*modules: Any) -> Chain | None:
    """The modules one after the other, or None where something else is among them, or somebody watches one."""
    stages: list[Any] = []
    tensors: list[Any] = []
    for module in modules:
        if not _add(module, stages, tensors):
            return None
    return Chain(tuple(stages), tuple(tensors))


def _add(module: Any, stages: list[Any], tensors: list[Any]) -> bool:
    kind = type(module)
    if kind in LINEAR:
        # Its own table: a module's attributes are looked up by a Python function. A weight that is not there is made
        # by somebody else (a hook, a plain attribute).
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if hooked(module) or weight is None or "bias" not in module._parameters:
            return False
        if isinstance(weight, UninitializedParameter):
            return False
        stages.append(("dense", int(bias is not None)))
        tensors += [weight] if bias is None else [weight, bias]
    elif kind is torch.nn.Sequential:
        if hooked(module):
            return False
        for inner in module._modules.values():
            if not _add(inner, stages, tensors):
                return False
    elif kind is torch.nn.ReLU and not hooked(module):
        stages.append(("relu", None))
    elif kind is ShiftedSoftplus and not hooked(module):
        stages.append(("softplus", module.shift))
    elif kind is MLP and not hooked(module) and _only_relu(module):
        for at, linear in enumerate(module.lins):
            if at:
                stages.append(("relu", None))
            if not _add(linear, stages, tensors):
                return False
    else:
        return False
    return True
