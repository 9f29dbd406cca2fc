"""A model is after an analysis what it was before: buffers, caches, modes, gradients, random numbers."""

import random

import numpy as np
import pytest
import torch
from torch_geometric import nn as pyg

import stretto.analyze
import stretto.profile
from stretto import datasets
from stretto.analyze import Machine
from stretto.observe.models import as_data
from stretto.observe.put_back import put_back, uncached

MACHINE = Machine()


def data():
    return as_data(datasets.load_graph("er:200:800"), width=16)


class Net(torch.nn.Module):
    """A cached layer, one with statistics, dropout, and a cache of the user's own."""

    def __init__(self, conv):
        super().__init__()
        self.conv, self.norm, self.drop = conv, torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3)
        self.seen = {}
        self.degree = None

    def forward(self, x, edge_index):
        if self.degree is None or len(self.degree) != len(x):
            self.degree = torch.bincount(edge_index[1], minlength=x.size(0)).float()
        self.seen["rows"] = x.size(0)
        return self.drop(self.norm(self.conv(x, edge_index))) * self.degree[:, None]


CONVS = {
    "gcn": lambda: pyg.GCNConv(16, 8, cached=True),
    "sgc": lambda: pyg.SGConv(16, 8, K=2, cached=True),
}
DOORS = {
    "analyze": lambda model, d: stretto.analyze(model, d, machine=MACHINE, procs=[1, 2]),
    "validate": lambda model, d: stretto.analyze(model, d, machine=MACHINE, procs=[1, 2]).validate(
        repeats=1, workers=0
    ),
    "profile": lambda model, d: stretto.profile(model, d, machine=MACHINE, repeats=1),
    "schemes": lambda model, d: stretto.analyze(model, d, machine=MACHINE, procs=[1]).schemes(fanout=2, batch=64),
}


def state(model):
    """Everything of a model that a step may change."""
    return {
        "values": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "caches": {
            name: {key: value for key, value in vars(module).items() if key.startswith("_cached")}
            for name, module in model.named_modules()
        },
        "seen": dict(model.seen),
        "degree": model.degree,
        "random": (torch.get_rng_state(), float(np.random.get_state()[1].sum()), random.getstate()[1][:8]),
    }


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("conv", ["gcn", "sgc"])
@pytest.mark.parametrize("door", DOORS)
def test_everything_is_as_before(door, conv, used):
    torch.manual_seed(3)
    graph, model = data(), Net(CONVS[conv]())
    model.conv.eval()  # a mode of its own
    if used:  # caches filled, gradients there
        model(graph.x, graph.edge_index).square().sum().backward()
    before = state(model)
    DOORS[door](model, graph)
    after = state(model)
    assert after["values"].keys() == before["values"].keys()
    for name, value in before["values"].items():
        assert torch.equal(after["values"][name], value), name
    for name, gradient in before["gradients"].items():
        assert (after["gradients"][name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(after["gradients"][name], gradient)
    assert after["modes"] == before["modes"]
    for name, cache in before["caches"].items():
        assert after["caches"][name].keys() == cache.keys()
        assert all(after["caches"][name][key] is value for key, value in cache.items()), name
    assert after["seen"] == before["seen"]
    assert after["degree"] is before["degree"]
    assert torch.equal(after["random"][0], before["random"][0])
    assert after["random"][1:] == before["random"][1:]


@pytest.mark.parametrize("conv", [pyg.GCNConv, pyg.SGConv])
def test_a_cached_layer_computes_the_same_after_an_analysis(conv):
    graph = data()
    torch.manual_seed(0)
    cached, plain = conv(16, 8, cached=True), conv(16, 8)
    plain.load_state_dict(cached.state_dict())
    report = stretto.analyze(cached, graph, machine=MACHINE, procs=[1])
    torch.testing.assert_close(cached(graph.x, graph.edge_index), plain(graph.x, graph.edge_index))
    assert report.lifted  # with the caches of the whole graph in place the probe would not have run
    assert stretto.analyze(cached, graph, machine=MACHINE, procs=[1]).work == report.work


def test_lazy_parameters_may_be_made():
    graph, model = data(), pyg.SAGEConv(-1, 8)
    report = stretto.analyze(model, graph, machine=MACHINE, procs=[1])
    assert report.lifted
    assert model(graph.x, graph.edge_index).shape == (graph.num_nodes, 8)


def _change(model):
    assert model.conv._cached_edge_index is None
    model.norm.running_mean.add_(1)
    model.norm.running_var = torch.zeros(8)
    model.register_buffer("late", torch.ones(1))
    model.extra = 1
    raise ZeroDivisionError


def test_what_happens_inside_is_undone_even_after_an_error():
    model = Net(pyg.GCNConv(16, 8, cached=True))
    model.conv._cached_edge_index = kept_cache = (torch.zeros(2, 3), None)
    with pytest.raises(ZeroDivisionError), uncached(model):
        _change(model)
    assert model.conv._cached_edge_index is kept_cache
    assert not model.norm.running_mean.any()
    assert bool(model.norm.running_var.eq(1).all())
    assert not hasattr(model, "late")
    assert not hasattr(model, "extra")
    with put_back(model):
        model.seen["a"] = 1
    assert model.seen == {}
