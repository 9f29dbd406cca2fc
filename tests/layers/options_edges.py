"""The options of the layers with relations or edge features."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn as pyg
from torch.nn import BatchNorm1d, Dropout, Linear, ReLU, Sequential, Tanh
from torch_geometric.nn.models.schnet import CFConv, ShiftedSoftplus

from tests.layers.meta_models import (
    EdgeModel,
    EdgesByLookup,
    GlobalModel,
    NodeModel,
    ResidualEdges,
    SourceNodes,
    TwiceScattered,
)
from tests.layers.spec import DIM, IN, OUT, PLAIN, RELATIONS, Spec, sequential

_ALL = ["mean", "min", "max", "std", "var", "sum"]
_SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]


def _gine(nn: Any = None, **options: Any) -> torch.nn.Module:
    return pyg.GINEConv(sequential() if nn is None else nn(), **{"edge_dim": DIM, **options})


def _edge_conv(nn: Any = None, **options: Any) -> torch.nn.Module:
    return pyg.EdgeConv(sequential(2 * IN) if nn is None else nn(), **options)


def _nn_conv(nn: Any = None, **options: Any) -> torch.nn.Module:
    return pyg.NNConv(IN, OUT, sequential(DIM, IN * OUT) if nn is None else nn(), **options)


def _filters(nn: Any = None, cutoff: float = 4.0) -> torch.nn.Module:
    net = Sequential(Linear(DIM, 6), ShiftedSoftplus(), Linear(6, 6)) if nn is None else nn()
    return CFConv(IN, OUT, 6, net, cutoff)


def _pna(aggregators: Any = ("mean", "max"), scalers: Any = ("identity", "amplification"), **o: Any) -> torch.nn.Module:
    degrees = torch.tensor([1, 3, 5, 2, 1])
    return pyg.PNAConv(o.pop("channels", IN), o.pop("out", OUT), list(aggregators), list(scalers), degrees, **o)


_RELATIONAL = (
    {},
    {"out": 7},
    {"num_bases": 1},
    {"num_bases": 4},
    {"num_bases": 2, "aggr": "add"},
    {"num_blocks": 5, "out": 10},
    {"num_blocks": 1, "aggr": "add"},
    {"aggr": "add"},
    {"root_weight": False},
    {"bias": False},
    {"flow": "target_to_source"},
)


def _meta(edge: Any = EdgeModel, node: Any = NodeModel, rest: Any = GlobalModel) -> torch.nn.Module:
    return pyg.MetaLayer(*(None if model is None else model() for model in (edge, node, rest)))


EDGES: dict[type, Spec] = {
    pyg.MetaLayer: Spec(
        _meta,
        (
            {},
            {"edge": ResidualEdges},
            {"edge": lambda: EdgeModel(norm=True)},
            {"node": SourceNodes},
            {"node": lambda: NodeModel(norm=True)},
            {"node": TwiceScattered},
            {"edge": None},
            {"node": None},
            {"rest": None},
        ),
        ({"edge": EdgesByLookup}, {"edge": None, "node": None}, {"edge": None, "node": TwiceScattered}),
        ("meta",),
    ),
    pyg.RGCNConv: Spec(
        lambda **o: pyg.RGCNConv(IN, o.pop("out", OUT), RELATIONS, **o),
        (*_RELATIONAL, {"aggr": "max"}, {"aggr": "min", "num_bases": 2}, {"is_sorted": True}),
        ({"aggr": "mul"},),
        ("plain", "edge_index_class", "pair", "numbers", "no_numbers"),
        "type",
        pair=lambda **o: pyg.RGCNConv((IN, 3), OUT, RELATIONS, **o),
    ),
    pyg.FastRGCNConv: Spec(
        lambda **o: pyg.FastRGCNConv(IN, o.pop("out", OUT), RELATIONS, **o),
        (*_RELATIONAL, {"is_sorted": True}),
        (),
        ("plain", "edge_index_class", "pair", "no_numbers"),
        "type",
        pair=lambda **o: pyg.FastRGCNConv((IN, 3), OUT, RELATIONS, **o),
    ),
    pyg.FiLMConv: Spec(
        lambda **o: pyg.FiLMConv(IN, o.pop("out", OUT), **o),
        (
            {},
            {"act": None},
            {"aggr": "add"},
            {"act": None, "aggr": "add"},
            {"act": Tanh(), "aggr": "max"},
            {"num_relations": RELATIONS},
            {"num_relations": RELATIONS, "act": None},
            {"nn": Sequential(Linear(IN, 6), ReLU(), Linear(6, 2 * OUT))},
            {"flow": "target_to_source", "aggr": "add"},
            {"flow": "target_to_source", "num_relations": RELATIONS, "act": None},
        ),
        ({"aggr": "mul"},),
        ("typed", *PLAIN, "pair"),
        "type",
        pair=lambda **o: pyg.FiLMConv((IN, 3), OUT, **o),
    ),
    pyg.ResGatedGraphConv: Spec(
        lambda **o: pyg.ResGatedGraphConv(IN, o.pop("out", OUT), **o),
        (
            {},
            {"edge_dim": DIM},
            {"act": Tanh()},
            {"aggr": "mean"},
            {"aggr": "max"},
            {"root_weight": False},
            {"bias": False},
            {"edge_dim": DIM, "aggr": "mean", "out": 7},
            {"flow": "target_to_source", "edge_dim": DIM},
        ),
        ({"aggr": "mul"},),
        ("plain", "edge_index_class", "pair"),
        "auto",
        pair=lambda **o: pyg.ResGatedGraphConv((IN, 3), OUT, **o),
    ),
    pyg.GINEConv: Spec(
        _gine,
        (
            {},
            {"eps": 0.3},
            {"train_eps": True},
            {"aggr": "mean"},
            {"aggr": "max"},
            {"nn": lambda: Linear(IN, OUT)},
            {"nn": lambda: sequential(norm=True)},
            {"flow": "target_to_source"},
        ),
        ({"aggr": "mul"},),
        ("plain", "edge_index_class", "pair", "pair_none", "size"),
        "attr",
        pair_width=IN,
    ),
    pyg.EdgeConv: Spec(
        _edge_conv,
        (
            {},
            {"aggr": "sum"},
            {"aggr": "mean"},
            {"aggr": "min"},
            {"nn": lambda: Linear(2 * IN, OUT)},
            {"nn": lambda: Linear(2 * IN, OUT), "aggr": "sum"},
            {"nn": lambda: Linear(2 * IN, OUT, bias=False), "aggr": "mean"},
            {"nn": lambda: pyg.MLP([2 * IN, 6, OUT])},
            {"nn": lambda: Sequential(Linear(2 * IN, 6), BatchNorm1d(6), ReLU(), Dropout(0.4), Linear(6, OUT))},
            {"flow": "target_to_source"},
            {"flow": "target_to_source", "nn": lambda: Linear(2 * IN, OUT), "aggr": "sum"},
        ),
        ({"aggr": "mul"}, {"nn": lambda: Sequential(ReLU(), Linear(2 * IN, OUT))}),
        (*PLAIN, "pair"),
        pair_width=IN,
    ),
    pyg.CGConv: Spec(
        lambda **o: pyg.CGConv(IN, **{"dim": o.pop("edge_dim", 0), **o}),
        (
            {},
            {"edge_dim": DIM},
            {"aggr": "mean"},
            {"aggr": "max", "edge_dim": DIM},
            {"batch_norm": True},
            {"bias": False, "edge_dim": DIM},
            {"flow": "target_to_source", "edge_dim": DIM},
        ),
        ({"aggr": "mul"},),
        (*PLAIN, "pair"),
        "auto",
        pair=lambda **o: pyg.CGConv((IN, 3), **{"dim": o.pop("edge_dim", 0), **o}),
    ),
    pyg.NNConv: Spec(
        _nn_conv,
        (
            {},
            {"aggr": "mean"},
            {"root_weight": False},
            {"bias": False},
            {"nn": lambda: Linear(DIM, IN * OUT)},
            {"nn": lambda: Sequential(Linear(DIM, 6), Dropout(0.4), ReLU(), Linear(6, IN * OUT, bias=False))},
            {"nn": lambda: pyg.MLP([DIM, 6, IN * OUT])},
            {"nn": lambda: pyg.MLP([DIM, 6, 5, IN * OUT], norm=None, dropout=0.4, act="elu", act_first=True)},
            {"nn": lambda: pyg.MLP([DIM, IN * OUT], bias=False)},
            {"flow": "target_to_source"},
        ),
        (
            {"aggr": "max"},
            {"nn": lambda: Sequential(Linear(DIM, IN * OUT), ReLU())},
            {"nn": lambda: pyg.MLP([DIM, 6, IN * OUT], plain_last=False)},
            {"nn": lambda: pyg.MLP([DIM, 6, IN * OUT], dropout=[0.0, 0.4])},
        ),
        ("plain", "edge_index_class", "pair", "pair_none", "size"),
        "attr",
        pair=lambda **o: pyg.NNConv((IN, 3), OUT, sequential(DIM, IN * OUT), **o),
    ),
    pyg.GMMConv: Spec(
        lambda **o: pyg.GMMConv(IN, o.pop("out", OUT), DIM, 3, **o),
        (
            {},
            {"out": 2},
            {"aggr": "add"},
            {"bias": False},
            {"out": 7},
            {"flow": "target_to_source"},
            {"root_weight": False},
        ),
        ({"separate_gaussians": True}, {"aggr": "max"}),
        ("plain", "edge_index_class", "pair", "pair_none", "size"),
        "attr",
        pair=lambda **o: pyg.GMMConv((IN, 3), OUT, DIM, 3, **o),
    ),
    pyg.GENConv: Spec(
        lambda **o: pyg.GENConv(o.pop("channels", IN), o.pop("out", OUT), **o),
        (
            {},
            {"channels": OUT},
            {"edge_dim": DIM},
            {"aggr": "softmax_sg"},
            {"aggr": "softmax_sg", "edge_dim": DIM},
            {"t": 0.3},
            {"eps": 0.1},
            {"learn_t": True, "t": 0.5},
            {"learn_t": True, "edge_dim": DIM},
            {"aggr": "powermean"},
            {"aggr": "powermean", "p": 2.0, "learn_p": True},
            {"aggr": "power", "p": 2.0, "edge_dim": DIM},
            {"aggr": "mean"},
            {"aggr": "max", "edge_dim": DIM},
            {"aggr": ["mean", "max"]},
            {"msg_norm": True},
            {"flow": "target_to_source", "edge_dim": DIM},
            {"msg_norm": True, "learn_msg_scale": True, "edge_dim": DIM},
            {"norm": "layer", "num_layers": 3, "expansion": 1, "bias": True},
            {"norm": "instance"},
        ),
        (),
        (*PLAIN, "pair", "pair_none", "size"),
        "auto",
        pair=lambda **o: pyg.GENConv((IN, 3), OUT, **{k: v for k, v in o.items() if k != "channels"}),
    ),
    pyg.PNAConv: Spec(
        _pna,
        (
            {},
            {"aggregators": _ALL, "scalers": _SCALERS},
            {"edge_dim": DIM},
            {"aggregators": ["std"], "scalers": ["attenuation"]},
            {"aggregators": ["std", "var"], "edge_dim": DIM},
            {"aggregators": _ALL, "scalers": _SCALERS, "edge_dim": DIM, "towers": 2},
            {"towers": 2},
            {"towers": 2, "channels": 6, "divide_input": True},
            {"towers": 2, "channels": 6, "divide_input": True, "edge_dim": DIM},
            {"post_layers": 3},
            {"pre_layers": 2},
            {"pre_layers": 3, "aggregators": _ALL, "edge_dim": DIM, "towers": 2, "act": "leaky_relu"},
            {"post_layers": 2, "act": "leaky_relu", "act_kwargs": {"negative_slope": 0.3}},
            {"train_norm": True, "scalers": _SCALERS},
            {"flow": "target_to_source"},
        ),
        ({"aggregators": ["mean", "median"]},),
        ("plain", "edge_index_class"),
        "auto",
    ),
    CFConv: Spec(
        _filters,
        ({}, {"cutoff": 1.5}, {"nn": lambda: Sequential(Linear(DIM, 6), Dropout(0.4), ReLU(), Linear(6, 6))}),
        (),
        ("lengths", "lengths_grad"),
    ),
    pyg.HypergraphConv: Spec(
        lambda **o: pyg.HypergraphConv(IN, o.pop("out", OUT), **o),
        ({}, {"out": 7}, {"bias": False}),
        (
            {"use_attention": True},
            {"use_attention": True, "attention_mode": "edge", "heads": 2},
            {"use_attention": True, "heads": 2, "concat": False, "negative_slope": 0.5},
            {"use_attention": True, "dropout": 0.5},
        ),
        ("plain", "weight_hyper"),
    ),
}
