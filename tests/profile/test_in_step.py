"""What a layer saves in a step of which the host hides a part: the step runs with that layer alone accelerated."""

import pytest
import torch

import stretto
from stretto import datasets
from stretto.analyze import Machine
from stretto.layers.layer import stock_of
from stretto.machine.timing import Timing
from stretto.observe.models import as_data, make
from stretto.profile import in_step, recommend, script
from stretto.profile.words import advice_line

SCRIPT = """
import torch
from torch_geometric.nn import GCNConv
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([GCNConv(12, 8), GCNConv(8, 4)])
    def forward(self, x, edge_index):
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)
x, edge_index = torch.randn(40, 12), torch.randint(40, (2, 160))
net, head = Net(), torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=1e-3)
for _ in range(60):
    optimizer.zero_grad()
    head(net(x, edge_index)).sum().backward()
    optimizer.step()
"""


def profiled(monkeypatch):
    """As on a card, where calls return before they are done."""
    monkeypatch.setattr(in_step, "hidden", lambda device: True)
    data = as_data(datasets.load_graph("er:60:200"), width=12)
    return stretto.profile(make("gcn", 12, 8, 8), data, machine=Machine(), repeats=1)


def paced(monkeypatch, table):
    """Every step has its seconds in the table; the steps that ran are noted."""
    ran = {}

    def in_turns(steps, *_):
        ran.update(steps)
        return {name: Timing((table[name],) * 6) for name in steps}

    monkeypatch.setattr(recommend, "_in_turns", in_turns)
    return ran


ALONE = {"stock, convs.0": 0.6, "accelerated, convs.0": 0.1, "stock, convs.1": 0.3, "accelerated, convs.1": 0.3}


def test_what_a_layer_saves_is_what_the_step_saves(monkeypatch):
    profile = profiled(monkeypatch)
    steps = {recommend.WHOLE: 1.0, in_step.name_of("convs.0"): 0.8, in_step.name_of("convs.1"): 0.9}
    paced(monkeypatch, ALONE | steps)
    first, second = profile.recommend()
    assert (first["advice"], first["share"], first["saves_ms"]) == (
        "accelerate",
        pytest.approx(0.2),
        pytest.approx(200),
    )
    assert first["reason"].endswith("; 1.25x (1.25-1.25) in the step")
    assert second["advice"] == "nothing to gain"  # alone it is no faster
    assert (second["share"], second["saves_ms"]) == (0, 0)
    assert "saves 20% of a step (200 ms of it)" in advice_line(first)


def test_a_layer_that_costs_the_step_time_saves_none(monkeypatch):
    profile = profiled(monkeypatch)
    steps = {recommend.WHOLE: 1.0, in_step.name_of("convs.0"): 1.1, in_step.name_of("convs.1"): 1.0}
    paced(monkeypatch, ALONE | steps)
    first = profile.recommend()[0]
    assert (first["share"], first["saves_ms"]) == (0, 0)


def test_one_layer_of_a_copy_is_accelerated(monkeypatch):
    profile = profiled(monkeypatch)
    model = profile.workload.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    plain = in_step.Workload.run

    def run(self, *args):
        seen.append([stock_of(type(conv)) is not None for conv in self.model.convs])
        return plain(self, *args)

    monkeypatch.setattr(in_step.Workload, "run", run)
    profile.recommend(repeats=2, budget=None)
    assert [True, False] in seen
    assert [False, True] in seen
    assert [False, False] in seen  # the whole step, stock
    assert [True, True] not in seen  # that would be no prediction
    assert not any(stock_of(type(module)) is not None for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all("in the step" in row["reason"] for row in profile.advice)


def test_layers_of_a_script_are_timed_in_what_it_asks_of_its_models(monkeypatch, written):
    monkeypatch.setattr(in_step, "hidden", lambda device: True)
    seen = []
    plain = script.Watched.run

    def run(self, *args):
        fast = [stock_of(type(conv)) is not None for conv in self.model.get_submodule("Net").convs]
        before = [call.module for call in self.calls]
        plain(self, *args)
        seen.append((fast, all(one in set(self.model.modules()) for one in before)))

    monkeypatch.setattr(script.Watched, "run", run)
    found = script.profile_script(written(SCRIPT), [], Machine(), repeats=2, budget=None)
    ran = [fast for fast, _ in seen]
    assert [True, False] in ran
    assert [False, True] in ran
    assert [False, False] in ran
    assert [True, True] not in ran
    assert all(own for _, own in seen)  # a copy calls its own modules, never the script's
    assert [row["site"] for row in found.advice] == ["Net.convs.0", "Net.convs.1"]
    assert all("in the step" in row["reason"] and row["in_step"] for row in found.advice)


def test_a_card_that_is_full_leaves_layers_alone(monkeypatch, written):
    monkeypatch.setattr(in_step, "hidden", lambda device: True)

    def full(*_):
        raise torch.OutOfMemoryError("out of memory\nand much more")

    monkeypatch.setattr(in_step, "step_with", full)
    found = script.profile_script(written(SCRIPT), [], Machine(), repeats=2, budget=None)
    assert "layers were timed alone: with the step, OutOfMemoryError: out of memory" in found.remarks
    assert all("alone, on its own inputs" in row["reason"] and "in_step" not in row for row in found.advice)


def test_a_processor_hides_nothing():
    assert not in_step.hidden(torch.device("cpu"))
    assert in_step.hidden(torch.device("cuda"))
