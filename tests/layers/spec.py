"""What the test of all layers must know of one: how to build it, which options must run fast, which must decline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential

IN, OUT, DIM, RELATIONS = 5, 4, 3, 3  # channels in and out, of edge features, number of relations
Options = dict[str, Any]

PLAIN = ("plain", "edge_index_class", "coo", "csr")
VALUES = ("coo_values", "csr_values")
WEIGHTED = (*PLAIN, "weight", "weight_grad", *VALUES)
PAIR = ("pair", "pair_none", "size")


@dataclass(frozen=True)
class Spec:
    """make(**options) builds the layer; `takes` names its inputs (INPUTS of inputs.py), the first is the usual one."""

    make: Callable[..., torch.nn.Module]
    options: tuple[Options, ...] = ({},)
    declined: tuple[Options, ...] = ()
    takes: tuple[str, ...] = PLAIN
    edge: str = ""  # what stands behind edge_index: nothing, "attr", "type", or "auto": attr if edge_dim is given
    pair: Callable[..., torch.nn.Module] | None = None  # for (x_src, x_dst) of different widths
    width: int = IN
    pair_width: int = 3
    initial: bool = False  # a second [n, channels] stands after x
    random: tuple[Options, ...] = ()  # options whose training draws other random bits than stock
    rtol: float = 1e-9


def sequential(i: int = IN, o: int = OUT, *, norm: bool = False) -> torch.nn.Module:
    if norm:
        return Sequential(Linear(i, 6), BatchNorm1d(6), ReLU(), Linear(6, o))
    return Sequential(Linear(i, 6), ReLU(), Linear(6, o))
