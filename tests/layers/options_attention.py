"""The options of the attention layers."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch_geometric.nn.models.attentive_fp import GATEConv

from tests.layers.spec import DIM, IN, OUT, PLAIN, Spec

_SHARED = (
    {},
    {"heads": 3, "out": 7},
    {"heads": 2, "out": 2},
    {"heads": 3, "concat": False},
    {"heads": 2, "out": 7, "concat": False},
    {"negative_slope": 0.5},
    {"add_self_loops": False},
    {"bias": False},
    {"residual": True, "heads": 2},
    {"residual": True, "heads": 2, "concat": False},
    {"edge_dim": DIM},
    {"edge_dim": DIM, "heads": 2, "out": 7},
    {"edge_dim": DIM, "fill_value": 0.5},
    {"edge_dim": DIM, "fill_value": "max"},
    {"edge_dim": DIM, "fill_value": "add"},
    {"edge_dim": DIM, "fill_value": "min"},
    {"edge_dim": DIM, "fill_value": "mul"},
    {"dropout": 1.0, "heads": 2},  # nothing is left, in stock as here
    {"negative_slope": 0.0},
    {"negative_slope": -0.5, "heads": 2},
    {"negative_slope": 1.5, "edge_dim": DIM},
    {"edge_dim": DIM, "fill_value": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)},
    {"edge_dim": DIM, "add_self_loops": False, "heads": 2},
    {"flow": "target_to_source", "edge_dim": DIM},
)
CHANNELS = {"a": IN, "b": 3}
METADATA = (["a", "b"], [("a", "to", "b"), ("b", "back", "a"), ("b", "among", "b")])
_INPUTS = (*PLAIN, "pair", "no_attr", "weights_wanted")


def _relations(kind: Any = pyg.SAGEConv, inner: str = "mean", **options: Any) -> torch.nn.Module:
    """Layers for the relations of inputs.hetero, two or three of them into b."""
    aggr, among, third = options.pop("aggr", "sum"), options.pop("among", None), options.pop("third", None)
    layers = {
        ("a", "to", "b"): kind((IN, 3), OUT, aggr=inner, **options),
        ("b", "back", "a"): kind((3, IN), OUT, aggr=inner, **options),
        ("b", "among", "b"): kind((3, 3), OUT, aggr=inner, **options) if among is None else among(),
    }
    if third is not None:
        layers["a", "again", "b"] = third()
    return pyg.HeteroConv(layers, aggr=aggr)


def _gate(flow: str = "source_to_target", **options: Any) -> torch.nn.Module:
    conv = GATEConv(IN, IN, DIM, **options)
    conv.flow = flow
    return conv


ATTENTION: dict[type, Spec] = {
    GATEConv: Spec(
        _gate,
        ({}, {"flow": "target_to_source"}, {"dropout": 0.0}),
        (),
        ("plain", "edge_index_class", "pair"),
        "attr",
        pair_width=IN,
        random=({"dropout": 0.4},),
    ),
    pyg.GATConv: Spec(
        lambda **o: pyg.GATConv(IN, o.pop("out", OUT), **o),
        _SHARED,
        ({"aggr": "mean"}, {"aggr": "max"}),
        (*_INPUTS, "pair_none", "size"),
        "auto",
        pair=lambda **o: pyg.GATConv((IN, 3), OUT, **o),
        random=({"dropout": 0.4}, {"dropout": 0.4, "heads": 2, "out": 9, "edge_dim": DIM}),
    ),
    pyg.GATv2Conv: Spec(
        lambda **o: pyg.GATv2Conv(IN, o.pop("out", OUT), **o),
        (*_SHARED, {"share_weights": True}),
        ({"aggr": "mean"},),
        _INPUTS,
        "auto",
        pair=lambda **o: pyg.GATv2Conv((IN, 3), OUT, **o),
        random=({"dropout": 0.4},),
    ),
    pyg.TransformerConv: Spec(
        lambda **o: pyg.TransformerConv(IN, o.pop("out", OUT), **o),
        (
            {},
            {"heads": 3, "out": 7},
            {"heads": 2, "concat": False},
            {"beta": True},
            {"beta": True, "concat": False, "heads": 2},
            {"bias": False},
            {"root_weight": False},
            {"edge_dim": DIM, "heads": 2},
            {"edge_dim": DIM, "concat": False, "heads": 3},
            {"flow": "target_to_source", "edge_dim": DIM},
            {"dropout": 1.0, "edge_dim": DIM},
        ),
        ({"aggr": "mean"},),
        (*PLAIN, "pair", "weights_wanted"),
        "auto",
        pair=lambda **o: pyg.TransformerConv((IN, 3), OUT, **o),
        random=({"dropout": 0.4, "edge_dim": DIM},),
    ),
    pyg.AGNNConv: Spec(
        lambda **o: pyg.AGNNConv(**o),
        ({}, {"requires_grad": False}, {"add_self_loops": False}, {"flow": "target_to_source"}),
        ({"aggr": "mean"},),
    ),
    pyg.SuperGATConv: Spec(
        lambda **o: pyg.SuperGATConv(IN, o.pop("out", OUT), **o),
        (
            {},
            {"heads": 3, "attention_type": "SD"},
            {"heads": 2, "concat": False},
            {"negative_slope": 0.5, "attention_type": "SD", "concat": False, "heads": 2},
            {"add_self_loops": False},
            {"bias": False},
            {"edge_sample_ratio": 0.6, "neg_sample_ratio": 0.8},
            {"is_undirected": True},
            {"flow": "target_to_source"},
            {"flow": "target_to_source", "add_self_loops": False, "attention_type": "SD"},
            {"dropout": 1.0, "negative_slope": -0.5},
            {"negative_slope": 1.5, "attention_type": "SD"},
        ),
        ({"aggr": "mean"},),
        ("plain",),
        random=({"dropout": 0.4},),
    ),
    pyg.HANConv: Spec(
        lambda **o: pyg.HANConv(CHANNELS, o.pop("out", OUT), METADATA, **o),
        ({}, {"heads": 2}, {"heads": 2, "out": 6, "negative_slope": 0.5}),
        ({"flow": "target_to_source"},),
        ("hetero", "hetero_one_way", "semantic"),
        random=({"dropout": 0.4}, {"dropout": 0.4, "heads": 2, "out": 6}),
    ),
    pyg.HGTConv: Spec(
        lambda **o: pyg.HGTConv(CHANNELS, o.pop("out", OUT), METADATA, **o),
        ({}, {"heads": 2}, {"out": IN}, {"heads": 3, "out": 3}),
        ({"flow": "target_to_source"},),
        ("hetero", "hetero_one_way"),
    ),
    pyg.HeteroConv: Spec(
        _relations,
        (
            {},
            {"aggr": "mean"},
            {"kind": pyg.GraphConv},
            {"kind": pyg.GraphConv, "aggr": "mean", "inner": "mean"},
            {"inner": "sum", "bias": False},
            {"root_weight": False},
            {"among": lambda: pyg.GCNConv(3, OUT)},
            {"third": lambda: pyg.GATConv((IN, 3), OUT, add_self_loops=False)},
            {"third": lambda: pyg.SAGEConv((IN, 3), OUT, aggr="max"), "aggr": "mean"},
            {"project": True},
        ),
        (
            {"aggr": "max"},
            {"aggr": "cat"},
            {"aggr": None},
            {"inner": "max"},
            {"normalize": True},
            {"kind": lambda c, o, **k: pyg.GATConv(c, o, add_self_loops=False)},
        ),
        ("hetero", "hetero_twice"),
    ),
}
