"""Networks inside layers as chains of Linears and activations, for ops.edge_layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn.models import MLP
from torch_geometric.nn.models.schnet import ShiftedSoftplus

from stretto.layers.base import LINEAR, hooked
from stretto.layers.gin import only_relu
from stretto.ops.edge_layer import Chain

KNOWN = (*LINEAR, torch.nn.ReLU, ShiftedSoftplus, torch.nn.Sequential, MLP)


def chain_of(*modules: Any) -> Chain | None:
    """The modules one after the other, or None where something else is among them, or somebody watches one."""
    stages: list[Any] = []
    tensors: list[Any] = []
    for module in modules:
        if not _add(module, stages, tensors):
            return None
    return Chain(tuple(stages), tuple(tensors))


def _add(module: Any, stages: list[Any], tensors: list[Any]) -> bool:
    """Whether a module is a part of a chain, which is then added to what there is."""
    kind = type(module)
    if kind not in KNOWN or hooked(module):
        return False
    if kind in LINEAR:
        return _add_linear(module, stages, tensors)
    if kind is torch.nn.ReLU:
        stages.append(("relu", None))
    elif kind is ShiftedSoftplus:
        stages.append(("softplus", module.shift))
    else:
        inside = _inside(module)
        return inside is not None and all(_add(inner, stages, tensors) for inner in inside)
    return True


def _inside(module: Any) -> list[Any] | None:
    """The modules that a network runs one after the other, or None: it is no such network."""
    if type(module) is torch.nn.Sequential:
        return list(module._modules.values())
    if type(module) is not MLP or not only_relu(module):
        return None
    first, *others = module.lins
    return [first, *(part for linear in others for part in (module.act, linear))]


def _add_linear(linear: Any, stages: list[Any], tensors: list[Any]) -> bool:
    # Its own table: a module's attributes are looked up by a Python function. A weight that is not there is made
    # by somebody else (a hook, a plain attribute).
    table = linear._parameters
    weight, bias = table.get("weight"), table.get("bias")
    if weight is None or "bias" not in table or isinstance(weight, UninitializedParameter):
        return False
    stages.append(("dense", int(bias is not None)))
    tensors += [weight] if bias is None else [weight, bias]
    return True
