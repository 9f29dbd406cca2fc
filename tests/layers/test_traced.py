"""An accelerated model of to_hetero is still a GraphModule: saved, copied, recompiled and restored as one."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.layers import record_of

KINDS = [("a", "own", "a"), ("b", "to", "a"), ("a", "to", "b")]
X = {kind: torch.randn(30, 6, generator=torch.Generator().manual_seed(at)) for at, kind in enumerate("ab")}
EDGES = {kind: torch.randint(30, (2, 90), generator=torch.Generator().manual_seed(at)) for at, kind in enumerate(KINDS)}


class One(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.SAGEConv((6, 6), 3)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index).relu()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return stretto.accelerate(pyg.to_hetero(One(), (["a", "b"], KINDS)))


def saved(model):
    torch.save(model, io.BytesIO())


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ACTIONS = {
    "torch.save": saved,
    "pickle": pickle.dumps,
    "recompile": lambda model: model.recompile(),
    "recompile twice": lambda model: (model.recompile(), model.recompile()),
    "deepcopy": copy.deepcopy,
    "a new graph": lambda model: setattr(model, "graph", copy.deepcopy(model.graph)),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_the_model_runs_on_as_before(model, action):
    wanted, kind = model(X, EDGES), type(model)
    ACTIONS[action](model)
    assert type(model) is kind
    torch.testing.assert_close(model(X, EDGES), wanted)
    assert "side by side" in record_of(model).plan
    stretto.restore(model)
    assert type(model) is kind.__base__
    torch.testing.assert_close(model(X, EDGES), wanted)


@pytest.mark.parametrize("made", [copy.deepcopy, loaded, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same(model, made):
    wanted = model(X, EDGES)
    other = made(model)
    torch.testing.assert_close(other(X, EDGES), wanted)
    torch.testing.assert_close(made(other)(X, EDGES), wanted)
    torch.testing.assert_close(stretto.accelerate(other)(X, EDGES), wanted)
    assert "side by side" in record_of(other).plan


def test_an_edited_graph_takes_effect_when_it_is_recompiled(model):
    wanted = model(X, EDGES)
    relus = [node for node in model.graph.nodes if node.target == "relu"]
    assert relus
    for node in relus:
        node.target = "neg"
    torch.testing.assert_close(model(X, EDGES), wanted)
    model.recompile()
    changed = model(X, EDGES)
    assert "side by side" in record_of(model).plan
    for kind, value in wanted.items():
        torch.testing.assert_close((-changed[kind]).relu(), value)
        assert not torch.equal(changed[kind], value)
    stretto.restore(model)
    torch.testing.assert_close(model(X, EDGES), changed)
