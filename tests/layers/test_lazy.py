"""Layers whose input channels are found at their first call (-1): accelerated or not, before and after that call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, Module, ReLU, Sequential

import stretto
from stretto.layers import record_of
from tests.layers.inputs import flat
from tests.layers.options import SPECS
from tests.layers.options_attention import METADATA
from tests.layers.spec import DIM, IN, OUT
from tests.layers.test_convs import data_for

# Every layer that takes -1; the kind of input is the usual one, or that of two sets of nodes.
LAZY: dict[str, tuple[type, str, Callable[[], Module]]] = {
    "GCN": (pyg.GCNConv, "", lambda: pyg.GCNConv(-1, OUT)),
    "SAGE": (pyg.SAGEConv, "", lambda: pyg.SAGEConv(-1, OUT)),
    "SAGE of two": (pyg.SAGEConv, "pair", lambda: pyg.SAGEConv((-1, -1), OUT)),
    "Graph": (pyg.GraphConv, "", lambda: pyg.GraphConv(-1, OUT)),
    "Graph of two": (pyg.GraphConv, "pair", lambda: pyg.GraphConv((-1, -1), OUT)),
    "GIN": (pyg.GINConv, "", lambda: pyg.GINConv(Sequential(pyg.Linear(-1, 6), ReLU(), Linear(6, OUT)))),
    "SG": (pyg.SGConv, "", lambda: pyg.SGConv(-1, OUT, K=2)),
    "SSG": (pyg.SSGConv, "", lambda: pyg.SSGConv(-1, OUT, alpha=0.2)),
    "ARMA": (pyg.ARMAConv, "", lambda: pyg.ARMAConv(-1, OUT)),
    "LE": (pyg.LEConv, "", lambda: pyg.LEConv(-1, OUT)),
    "Cluster": (pyg.ClusterGCNConv, "", lambda: pyg.ClusterGCNConv(-1, OUT)),
    "MF": (pyg.MFConv, "", lambda: pyg.MFConv(-1, OUT, max_degree=2)),
    "GAT": (pyg.GATConv, "", lambda: pyg.GATConv(-1, OUT, heads=2, residual=True)),
    "GAT of two": (pyg.GATConv, "pair", lambda: pyg.GATConv((-1, -1), OUT, add_self_loops=False)),
    "GATv2": (pyg.GATv2Conv, "", lambda: pyg.GATv2Conv(-1, OUT, heads=2)),
    "GATv2 of two": (pyg.GATv2Conv, "pair", lambda: pyg.GATv2Conv((-1, -1), OUT, add_self_loops=False)),
    "Transformer": (pyg.TransformerConv, "", lambda: pyg.TransformerConv(-1, OUT, heads=2)),
    "Transformer of two": (pyg.TransformerConv, "pair", lambda: pyg.TransformerConv((-1, -1), OUT)),
    "SuperGAT": (pyg.SuperGATConv, "", lambda: pyg.SuperGATConv(-1, OUT)),
    "FiLM": (pyg.FiLMConv, "", lambda: pyg.FiLMConv(-1, OUT)),
    "ResGated": (pyg.ResGatedGraphConv, "", lambda: pyg.ResGatedGraphConv(-1, OUT)),
    "GINE": (pyg.GINEConv, "", lambda: pyg.GINEConv(Linear(IN, OUT), edge_dim=-1)),
    "Edge": (pyg.EdgeConv, "", lambda: pyg.EdgeConv(pyg.Linear(-1, OUT))),
    "NN": (pyg.NNConv, "pair", lambda: pyg.NNConv((IN, -1), OUT, Linear(DIM, IN * OUT))),
    "GMM": (pyg.GMMConv, "", lambda: pyg.GMMConv(-1, OUT, DIM, 2)),
    "GEN": (pyg.GENConv, "", lambda: pyg.GENConv(-1, OUT)),
    "Hypergraph": (pyg.HypergraphConv, "", lambda: pyg.HypergraphConv(-1, OUT)),
    "HAN": (pyg.HANConv, "", lambda: pyg.HANConv(-1, OUT, METADATA)),
    "HGT": (pyg.HGTConv, "", lambda: pyg.HGTConv(-1, OUT, METADATA)),
}


def made(layer: str) -> Module:
    torch.manual_seed(1)
    return LAZY[layer][2]().eval()


def called(model: Module, data):
    torch.manual_seed(2)  # the first call draws the weights
    return flat(model(*data.args, **data.kwargs))


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAZY)
def test_lazy_layers_equal_stock(layer):
    conv, kind, _ = LAZY[layer]
    spec = SPECS[conv]
    data = data_for(spec, {}, "wide" if kind == "pair" else "unsorted", kind or spec.takes[0], torch.float32)
    stock, fast = made(layer), stretto.accelerate(made(layer))
    copied = copy.deepcopy(fast)
    for _ in range(3):
        wanted = called(stock, data)
        close(called(fast, data), wanted)
    assert record_of(fast).path == "fast", record_of(fast).reason
    close(called(copied, data), wanted)
    close(list(fast.state_dict().values()), list(stock.state_dict().values()))


@pytest.mark.parametrize("layer", [name for name in LAZY if name not in ("ARMA", "GMM")])  # stock cannot load these
def test_weights_may_be_loaded_into_lazy_layers(layer):
    conv, kind, _ = LAZY[layer]
    spec = SPECS[conv]
    data = data_for(spec, {}, "wide" if kind == "pair" else "unsorted", kind or spec.takes[0], torch.float32)
    stock = made(layer)
    wanted = called(stock, data)
    fast = stretto.accelerate(made(layer))
    fast.load_state_dict(stock.state_dict())
    close(called(fast, data), wanted)
