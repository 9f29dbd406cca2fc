"""explain(): every plan of a layer, one of them chosen, with the kernels that run it and the memory it avoids."""

import json

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv

import stretto
from stretto.nn import gat
from stretto.report import explain
from stretto.tune.variants import VARIANTS

NODES, EDGES, WIDE, NARROW = 2000, 20000, 64, 16


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = GCNConv(WIDE, NARROW), GATConv(NARROW, 4), GATv2Conv(4, 4)

    def forward(self, x, edge_index):
        return self.third(self.second(self.first(x, edge_index).relu(), edge_index), edge_index)


@pytest.fixture
def explained(monkeypatch, tmp_path):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    torch.manual_seed(0)
    edge_index = torch.randint(NODES, (2, EDGES))
    x = torch.randn(NODES, WIDE, requires_grad=True)  # not constant: nothing is hoisted, every order stays open
    net = stretto.accelerate(Net())
    for _ in range(40):  # plans and kernels are tried in the first steps
        net(x, edge_index).sum().backward()
    return explain(net, x, edge_index)


def test_every_plan_is_told_and_one_is_chosen(explained):
    first, second, third = explained.layers
    assert first.conv == "GCNConv"
    assert sum(candidate.chosen for candidate in first.candidates) == 1
    assert {width for c in first.candidates for width in c.spmm_widths} == {WIDE, NARROW}
    assert all(candidate.predicted_ms > 0 for candidate in first.candidates)
    assert first.avoided_bytes >= EDGES * NARROW * 4
    assert {c.plan for c in second.candidates} == {gat.REUSE, gat.FOLDED}
    assert [c.plan for c in second.candidates if c.chosen] == [gat.REUSE]
    assert not any(c.kernels for c in second.candidates)  # attention is a kernel of its own
    assert not third.candidates  # it has one way to run; the reason line tells it
    assert third.reason


def test_the_chosen_plan_names_its_kernels(explained):
    names = {variant.name for variant in VARIANTS["spmm"]["cpu"]}
    chosen = next(c for c in explained.layers[0].candidates if c.chosen)
    if stretto.kernels.name_of(torch.device("cpu")) == "reference":
        pytest.skip("without the native library there is one kernel")
    assert chosen.kernels
    assert set(chosen.kernels) <= names
    assert all(not c.kernels for c in explained.layers[0].candidates if not c.chosen)


def test_as_text_and_as_json(explained):
    text = str(explained)
    assert "messages never built" in text
    assert "->" in text
    layers = json.loads(explained.to_json())
    assert [layer["layer"] for layer in layers] == ["first", "second", "third"]
    assert layers[0]["backend"] == explained.layers[0].backend != ""


def test_attention_tells_what_it_does_not_build():
    conv = stretto.accelerate(GATConv(8, 16, heads=2))
    told = stretto.explain(conv, torch.randn(50, 8), torch.randint(0, 50, (2, 900)))
    (layer,) = told.layers
    assert layer.avoided_bytes >= 850 * 32 * 4
    assert layer.backend
    assert "never built" in str(told)
