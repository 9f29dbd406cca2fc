"""Every constructor option of every accelerated layer: what must run fast, and what is expected to decline.

Adding a layer to CONVS without a line here, or in the two files beside it, fails a test.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential, Sigmoid

from tests.layers.options_attention import ATTENTION
from tests.layers.options_edges import EDGES
from tests.layers.spec import IN, OUT, PAIR, PLAIN, VALUES, WEIGHTED, Spec, sequential


def _gin(nn: Any = None, **options: Any) -> torch.nn.Module:
    return pyg.GINConv(sequential() if nn is None else nn(), **options)


FLOW = {"flow": "target_to_source"}
LINEAR: dict[type, Spec] = {
    pyg.GCNConv: Spec(
        lambda **o: pyg.GCNConv(IN, o.pop("out", OUT), **o),
        (
            {},
            {"out": 7},
            {"improved": True},
            {"cached": True},
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
        lambda **o: pyg.SAGEConv(IN, o.pop("out", OUT), **o),
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
        (*PLAIN, *VALUES, *PAIR),
        pair=lambda **o: pyg.SAGEConv((IN, 3), OUT, **o),
    ),
    pyg.GraphConv: Spec(
        lambda **o: pyg.GraphConv(IN, o.pop("out", OUT), **o),
        ({}, {"out": 7}, {"aggr": "mean"}, {"aggr": "max"}, {"bias": False}, {"flow": "target_to_source"}),
        ({"aggr": "mul"},),
        (*WEIGHTED, *PAIR),
        pair=lambda **o: pyg.GraphConv((IN, 3), OUT, **o),
    ),
    pyg.GINConv: Spec(
        _gin,
        (
            {},
            {"eps": 0.3},
            {"train_eps": True},
            {"aggr": "mean"},
            {"aggr": "max"},
            {"nn": lambda: Linear(IN, OUT)},
            {"nn": lambda: sequential(norm=True)},
            {"nn": lambda: Sequential(ReLU(), Linear(IN, OUT))},
            {"nn": lambda: pyg.MLP([IN, 6, OUT])},
            {"nn": lambda: pyg.MLP([IN, 6, OUT], norm=None, act_first=True)},
            {"nn": lambda: pyg.MLP([IN, OUT])},
            {"nn": lambda: pyg.MLP([IN, 6, OUT], plain_last=False, norm="layer_norm")},
            {"nn": lambda: pyg.MLP([IN, 6, 3, OUT], bias=False, act="tanh")},
            {"nn": lambda: pyg.MLP([IN, 6, OUT], dropout=0.5)},
            {"nn": lambda: pyg.MLP([IN, 6, OUT], dropout=[0.2, 0.5])},
            {"nn": lambda: pyg.MLP([IN, OUT], plain_last=False, act=None)},
            {"flow": "target_to_source"},
            {"flow": "target_to_source", "aggr": "max"},
        ),
        ({"aggr": "mul"},),
        (*PLAIN, *VALUES, *PAIR),
        pair_width=IN,
    ),
    pyg.SGConv: Spec(
        lambda **o: pyg.SGConv(IN, o.pop("out", OUT), **o),
        (
            {},
            {"K": 3},
            {"K": 2, "out": 7},
            {"add_self_loops": False},
            {"bias": False},
            FLOW,
            {"K": 3, "out": 7, **FLOW},
        ),
        ({"cached": True}, {"K": 0}, {"aggr": "max"}),
        ("plain", "edge_index_class", "coo", "csr", "weight"),
    ),
    pyg.SSGConv: Spec(
        lambda **o: pyg.SSGConv(IN, o.pop("out", OUT), alpha=0.2, **o),
        ({}, {"K": 3}, {"K": 2, "out": 7}, {"add_self_loops": False}, {"bias": False}, {"K": 3, "out": 7, **FLOW}),
        ({"cached": True}, {"aggr": "mean"}),
        (*PLAIN, "weight"),
    ),
    pyg.TAGConv: Spec(
        lambda **o: pyg.TAGConv(IN, o.pop("out", OUT), **o),
        ({}, {"K": 1}, {"K": 4, "out": 7}, {"normalize": False}, {"bias": False}, {"normalize": False, **FLOW}, FLOW),
        ({"K": 0}, {"aggr": "mean"}),
        (*PLAIN, "weight"),
    ),
    pyg.LGConv: Spec(lambda **o: pyg.LGConv(**o), ({}, {"normalize": False}, FLOW), ({"aggr": "max"},), WEIGHTED),
    pyg.APPNP: Spec(
        lambda **o: pyg.APPNP(**{"K": 3, "alpha": 0.1, **o}),
        ({}, {"K": 1}, {"add_self_loops": False}, {"alpha": 0.0}, {"normalize": False}, {"cached": True}, FLOW),
        ({"dropout": 0.5}, {"aggr": "mean"}),
        WEIGHTED,
    ),
    pyg.ChebConv: Spec(
        lambda **o: pyg.ChebConv(IN, o.pop("out", OUT), **{"K": 3, **o}),
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
        lambda **o: pyg.GCN2Conv(IN, 0.2, **o),
        (
            {},
            {"shared_weights": False},
            {"theta": 0.5, "layer": 2},
            {"add_self_loops": False},
            {"normalize": False},
            {"theta": 0.5, "layer": 2, "shared_weights": False},
            {"cached": True},
            FLOW,
        ),
        ({"aggr": "max"},),
        WEIGHTED,
        initial=True,
    ),
    pyg.ARMAConv: Spec(
        lambda **o: pyg.ARMAConv(IN, o.pop("out", OUT), **o),
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
            FLOW,
        ),
        ({"aggr": "mean"},),
        ("plain", "edge_index_class", "weight", "weight_grad"),
    ),
    pyg.LEConv: Spec(
        lambda **o: pyg.LEConv(IN, o.pop("out", OUT), **o),
        ({}, {"out": 7}, {"bias": False}, {"out": 7, "bias": False}, {"flow": "target_to_source"}),
        ({"aggr": "mean"},),
        (*WEIGHTED, "pair"),
        pair=lambda **o: pyg.LEConv((IN, 3), OUT, **o),
    ),
    pyg.ClusterGCNConv: Spec(
        lambda **o: pyg.ClusterGCNConv(IN, o.pop("out", OUT), **o),
        ({}, {"out": 7}, {"diag_lambda": 1.0}, {"bias": False}, {"diag_lambda": -0.5, "out": 7}),
        ({"aggr": "mean"}, {"flow": "target_to_source"}, {"add_self_loops": False}),
        ("plain", "edge_index_class"),
    ),
    pyg.MFConv: Spec(
        lambda **o: pyg.MFConv(IN, o.pop("out", OUT), **o),
        ({}, {"max_degree": 3}, {"max_degree": 0}, {"bias": False}, {"flow": "target_to_source"}),
        ({"aggr": "mean"},),
        ("plain", "edge_index_class", *PAIR),
        pair=lambda **o: pyg.MFConv((IN, 3), OUT, **o),
    ),
}

SPECS: dict[type, Spec] = {**LINEAR, **ATTENTION, **EDGES}
