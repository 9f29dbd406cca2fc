"""Every constructor option of every accelerated layer: what the test of all layers runs, and which it expects to decline.

A Spec holds a layer's factory, the options that must run fast, those that must run as stock, and the kinds of input the
layer takes (INPUTS in test_convs.py). Adding a layer to CONVS without a line here fails a test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential, Sigmoid

I, O, D, R = 5, 4, 3, 3  # channels in and out, of edge features, number of relations
Options = dict[str, Any]

PLAIN = ("plain", "edge_index_class", "coo", "csr")
WEIGHTED = (*PLAIN, "weight", "weight_grad", "coo_values", "csr_values")
PAIR = ("pair", "pair_none", "size")


@dataclass(frozen=True)
class Spec:
    """make(**options) builds the layer; `takes` names its inputs; edge: what stands in the third place of a call."""

    make: Callable[..., torch.nn.Module]
    options: tuple[Options, ...] = ({},)
    declined: tuple[Options, ...] = ()
    takes: tuple[str, ...] = PLAIN
    edge: str = ""  # "", "attr" or "type"
    pair: Callable[..., torch.nn.Module] | None = None  # for (x_src, x_dst) of different widths
    pair_width: int = 3
    initial: bool = False  # a second [n, channels] stands after x
    rtol: float = 1e-9


def _sequential(i: int = I, o: int = O, *, norm: bool = False) -> torch.nn.Module:
    if norm:
        return Sequential(Linear(i, 6), BatchNorm1d(6), ReLU(), Linear(6, o))
    return Sequential(Linear(i, 6), ReLU(), Linear(6, o))


def _gin(nn: Any = None, **options: Any) -> torch.nn.Module:
    return pyg.GINConv(_sequential() if nn is None else nn(), **options)


SPECS: dict[type, Spec] = {
    pyg.GCNConv: Spec(
        lambda **o: pyg.GCNConv(I, o.pop("out", O), **o),
        (
            {},
            {"out": 7},
            {"improved": True},
            {"add_self_loops": False},
            {"normalize": False},
            {"bias": False},
            {"flow": "target_to_source"},
            {"normalize": False, "out": 7, "flow": "target_to_source"},
        ),
        ({"aggr": "mean"}, {"aggr": "max"}, {"decomposed_layers": 2}),
        WEIGHTED,
    ),
    pyg.SAGEConv: Spec(
        lambda **o: pyg.SAGEConv(I, o.pop("out", O), **o),
        (
            {},
            {"out": 7},
            {"aggr": "sum"},
            {"aggr": "max"},
            {"aggr": "min"},
            {"normalize": True},
            {"root_weight": False},
            {"project": True},
            {"bias": False},
            {"flow": "target_to_source"},
            {"root_weight": False, "aggr": "add"},
        ),
        ({"aggr": "median"}, {"aggr": ["mean", "max"]}, {"aggr": "softmax"}),
        (*PLAIN, *PAIR),
        pair=lambda **o: pyg.SAGEConv((I, 3), O, **o),
    ),
    pyg.GraphConv: Spec(
        lambda **o: pyg.GraphConv(I, o.pop("out", O), **o),
        ({}, {"out": 7}, {"aggr": "mean"}, {"aggr": "max"}, {"bias": False}, {"flow": "target_to_source"}),
        ({"aggr": "mul"},),
        (*WEIGHTED, *PAIR),
        pair=lambda **o: pyg.GraphConv((I, 3), O, **o),
    ),
    pyg.GINConv: Spec(
        _gin,
        (
            {},
            {"eps": 0.3},
            {"train_eps": True},
            {"aggr": "mean"},
            {"aggr": "max"},
            {"nn": lambda: Linear(I, O)},
            {"nn": lambda: _sequential(norm=True)},
            {"nn": lambda: Sequential(ReLU(), Linear(I, O))},
            {"nn": lambda: pyg.MLP([I, 6, O])},
            {"nn": lambda: pyg.MLP([I, 6, O], norm=None, act_first=True)},
            {"nn": lambda: pyg.MLP([I, O])},
            {"nn": lambda: pyg.MLP([I, 6, O], plain_last=False, norm="layer_norm")},
            {"nn": lambda: pyg.MLP([I, 6, 3, O], bias=False, act="tanh")},
            {"nn": lambda: pyg.MLP([I, 6, O], dropout=0.5)},
            {"nn": lambda: pyg.MLP([I, 6, O], dropout=[0.2, 0.5])},
            {"nn": lambda: pyg.MLP([I, O], plain_last=False, act=None)},
        ),
        ({"aggr": "mul"},),
        (*PLAIN, *PAIR),
        pair_width=I,
    ),
    pyg.SGConv: Spec(
        lambda **o: pyg.SGConv(I, o.pop("out", O), **o),
        ({}, {"K": 3}, {"K": 2, "out": 7}, {"add_self_loops": False}, {"bias": False}),
        ({"cached": True}, {"K": 0}),
        ("plain", "edge_index_class", "coo", "csr", "weight"),
    ),
    pyg.SSGConv: Spec(
        lambda **o: pyg.SSGConv(I, o.pop("out", O), alpha=0.2, **o),
        ({}, {"K": 3}, {"K": 2, "out": 7}, {"add_self_loops": False}, {"bias": False}),
        ({"cached": True},),
        (*PLAIN, "weight"),
    ),
    pyg.TAGConv: Spec(
        lambda **o: pyg.TAGConv(I, o.pop("out", O), **o),
        ({}, {"K": 1}, {"K": 4, "out": 7}, {"normalize": False}, {"bias": False}),
        ({"K": 0},),
        (*PLAIN, "weight"),
    ),
    pyg.LGConv: Spec(lambda **o: pyg.LGConv(**o), ({}, {"normalize": False}), (), WEIGHTED),
    pyg.APPNP: Spec(
        lambda **o: pyg.APPNP(**{"K": 3, "alpha": 0.1, **o}),
        ({}, {"K": 1}, {"add_self_loops": False}, {"alpha": 0.0}, {"normalize": False}),
        (),
        WEIGHTED,
    ),
    pyg.ChebConv: Spec(
        lambda **o: pyg.ChebConv(I, o.pop("out", O), **{"K": 3, **o}),
        (
            {},
            {"K": 5},
            {"K": 5, "out": 7},
            {"K": 1},
            {"K": 2},
            {"K": 4},
            {"normalization": "rw"},
            {"normalization": None},
            {"bias": False},
            {"K": 6, "normalization": "rw"},
            {"flow": "target_to_source"},
        ),
        ({"aggr": "mean"},),
        ("plain", "edge_index_class", "weight", "weight_grad"),
    ),
    pyg.GCN2Conv: Spec(
        lambda **o: pyg.GCN2Conv(I, 0.2, **o),
        (
            {},
            {"shared_weights": False},
            {"theta": 0.5, "layer": 2},
            {"add_self_loops": False},
            {"normalize": False},
            {"theta": 0.5, "layer": 2, "shared_weights": False},
            {"cached": True},
        ),
        ({"aggr": "max"},),
        WEIGHTED,
        initial=True,
    ),
    pyg.ARMAConv: Spec(
        lambda **o: pyg.ARMAConv(I, o.pop("out", O), **o),
        (
            {},
            {"num_stacks": 3, "num_layers": 3},
            {"num_stacks": 2, "num_layers": 3, "shared_weights": True},
            {"out": 7},
            {"act": None},
            {"bias": False},
            {"dropout": 0.5},
            {"dropout": 0.3, "num_stacks": 2, "num_layers": 2},
            {"act": Sigmoid(), "num_stacks": 2},
        ),
        ({"aggr": "mean"},),
        ("plain", "edge_index_class", "weight", "weight_grad"),
    ),
    pyg.LEConv: Spec(
        lambda **o: pyg.LEConv(I, o.pop("out", O), **o),
        ({}, {"out": 7}, {"bias": False}, {"out": 7, "bias": False}, {"flow": "target_to_source"}),
        ({"aggr": "mean"},),
        (*WEIGHTED, "pair"),
        pair=lambda **o: pyg.LEConv((I, 3), O, **o),
    ),
    pyg.ClusterGCNConv: Spec(
        lambda **o: pyg.ClusterGCNConv(I, o.pop("out", O), **o),
        ({}, {"out": 7}, {"diag_lambda": 1.0}, {"bias": False}, {"diag_lambda": -0.5, "out": 7}),
        ({"aggr": "mean"}, {"flow": "target_to_source"}),
        ("plain", "edge_index_class"),
    ),
    pyg.MFConv: Spec(
        lambda **o: pyg.MFConv(I, o.pop("out", O), **o),
        ({}, {"max_degree": 3}, {"max_degree": 0}, {"bias": False}, {"flow": "target_to_source"}),
        ({"aggr": "mean"},),
        ("plain", "edge_index_class", *PAIR),
        pair=lambda **o: pyg.MFConv((I, 3), O, **o),
    ),
}
