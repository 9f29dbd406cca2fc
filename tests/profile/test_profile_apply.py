"""Advice applied: nothing is changed that was not asked for, nothing is said that was not done."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from torch_geometric import nn as pyg

import stretto
from stretto import StrettoError, datasets
from stretto.analyze import Machine
from stretto.analyze.graph_stats import graph_stats
from stretto.compile.hoist import HOIST
from stretto.layers.layer import stock_of
from stretto.machine.timing import Timing
from stretto.observe.models import as_data, make
from stretto.observe.put_back import put_back
from stretto.page.text import finite
from stretto.profile import recommend
from stretto.profile.call_site import Site
from stretto.profile.captured import operands


def data():
    return as_data(datasets.load_graph("er:60:200"), width=12)


class Normed(torch.nn.Module):
    """A layer, a norm with running means, a norm that is frozen, and dropout."""

    def __init__(self, outputs=lambda x: x) -> None:
        super().__init__()
        self.conv, self.norm, self.frozen = pyg.SAGEConv(12, 8), torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8)
        self.outputs = outputs

    def forward(self, x, edge_index):
        x = self.frozen(self.norm(self.conv(x, edge_index)))
        return self.outputs(torch.nn.functional.dropout(x, 0.5, self.training))


def paced(monkeypatch, layer: float, step: tuple[float, ...]):
    """Clocks that say how many times faster the layer alone is, and the step in each round."""

    def in_turns(steps, *_):
        pace = {name: (layer if "," in name else 1.0,) * len(step) for name in steps if name.startswith("stock")}
        fast = {name: (1.0,) * len(step) if "," in name else tuple(1 / s for s in step) for name in steps}
        return {name: Timing(samples) for name, samples in (fast | pace).items()}

    monkeypatch.setattr(recommend, "_in_turns", in_turns)


def applied(monkeypatch, layer=2.0, step=(2.0,) * 8, model=None, mode="train"):
    model = Normed() if model is None else model
    profile = stretto.profile(model, data(), machine=Machine(), repeats=1, mode=mode)
    paced(monkeypatch, layer, step)
    return profile, profile.apply()


def accelerated(model) -> bool:
    return any(stock_of(type(module)) is not None for module in model.modules())


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_model_is_left_as_it_was_found(monkeypatch, mode):
    model = Normed()
    model.frozen.eval()
    if mode == "infer":
        model.eval()
    graph = data()
    model(graph.x, graph.edge_index).sum().backward()
    modes = [m.training for m in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    drawn = torch.get_rng_state()
    profile = stretto.profile(model, graph, machine=Machine(), repeats=1, mode=mode)
    profile.replay(repeats=1)
    paced(monkeypatch, 2.0, (2.0,) * 8)
    assert profile.apply()["applied"]
    assert accelerated(model)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_buffers_come_back_even_from_an_error():
    model = Normed()

    def broken() -> None:
        with put_back(model):
            model.norm.running_mean += 1
            model.eval()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert not model.norm.running_mean.any()
    assert model.training


@pytest.mark.parametrize(
    "step", [(0.1, 3.0, 0.5, 0.6, 2.0, 0.7, 0.4, 0.9), (0.1, 3.0, 1.5, 1.6, 2.0, 0.7, 1.4, 0.9)], ids=["below", "above"]
)
def test_a_gain_that_is_not_beyond_doubt_is_not_applied(monkeypatch, step):
    profile, done = applied(monkeypatch, step=step)
    assert (done["speedup"][0] > 1) == (step[2] > 1)
    assert not done["applied"]
    assert done["reason"].startswith("not applied: with 1 layer accelerated the step is ")
    assert done["reason"].endswith("as fast: a tie")
    assert not accelerated(profile.workload.model)


def test_a_loss_is_called_one(monkeypatch):
    profile, done = applied(monkeypatch, step=(0.6, 0.7) * 4)
    assert done["reason"].startswith("not applied: ")
    assert done["reason"].endswith(": slower")
    assert not accelerated(profile.workload.model)
    paced(monkeypatch, 0.67, (1.0,) * 8)
    (row,) = profile.recommend()
    assert row["advice"] == "nothing to gain"
    assert row["reason"].startswith("0.67x (0.67-0.67)")
    assert row["reason"].endswith(": slower")
    assert profile.apply()["reason"] == "nothing to gain"


OUTPUTS = {
    "a dict": (lambda x: {"a": x}, True),
    "a nested list": (lambda x: [x, (x, {"b": x})], True),
    "nothing to compare": (lambda x: x.sum().item(), False),
    "not a number": (lambda x: x * math.nan, False),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_output_is_compared(monkeypatch, kind):
    outputs, wanted = OUTPUTS[kind]
    if kind == "nothing to compare":
        model, step = Normed(), lambda m, d: (m(d.x, d.edge_index), None)[1]
        profile = stretto.profile(model, data(), machine=Machine(), repeats=1, mode="infer", step=step)
        paced(monkeypatch, 2.0, (2.0,) * 8)
        done = profile.apply()
    else:
        _, done = applied(monkeypatch, model=Normed(outputs))
    assert done["applied"] is wanted
    if not wanted:
        assert done["reason"].startswith("not applied: ")


def test_other_outputs_are_noticed(monkeypatch):
    from stretto.plug.classes import fast_of

    fast = fast_of(pyg.SAGEConv)
    monkeypatch.setattr(fast, "forward", lambda self, x, edge_index: 2 * pyg.SAGEConv.forward(self, x, edge_index))
    profile, done = applied(monkeypatch, model=make("sage", 12, 8, 8))
    assert done["reason"].startswith("not applied: outputs differ by")
    assert not accelerated(profile.workload.model)


def test_numbers_without_a_word_in_json_are_null():
    once = graph_stats(torch.tensor([[0, 1], [1, 2]]), 3)  # no row is used twice
    assert once.reuse_distance == math.inf
    assert json.loads(json.dumps(finite(asdict(once)), allow_nan=False))["reuse_distance"] is None
    profile = stretto.profile(make("sage", 12, 8, 8), data(), machine=Machine(), repeats=1)
    profile.replays = [{"op": "a", "ratio": math.inf, "interval": (math.nan, 1.0)}]
    assert json.loads(profile.to_json())["replays"] == [{"op": "a", "ratio": None, "interval": [None, 1.0]}]
    assert "Infinity" not in profile.to_json()


class Dropping(torch.nn.Module):
    """As in most examples: features lose some of their values before the first layer."""

    def __init__(self, share):
        super().__init__()
        self.share, self.conv = share, pyg.GCNConv(12, 8)

    def forward(self, x, edge_index):
        return self.conv(torch.nn.functional.dropout(x, self.share, self.training and self.share > 0), edge_index)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_layer_whose_input_changes_is_judged_without_what_a_constant_one_saves(share, monkeypatch):
    """A X of a constant is kept from step to step; of features after a Dropout nothing can be."""
    kept = []
    keep = HOIST.keep
    monkeypatch.setattr(HOIST, "keep", lambda *given, **named: kept.append(1) or keep(*given, **named))
    profile = stretto.profile(Dropping(share), data(), machine=Machine(), repeats=1)
    (site,) = recommend.sites_of(profile).values()
    assert [id(t) in site.changing for t in operands(site.args)] == [share > 0, False]
    rows = profile.recommend(repeats=2)
    assert [row["site"] for row in rows if row["kind"] == "layer"] == ["conv"]
    assert bool(kept) == (share == 0)


def test_a_step_with_an_optimizer_is_refused_before_it_trains():
    model, data = torch.nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step(model, data):
        loss = model(data).sum()
        loss.backward()
        optimizer.step()
        return loss

    before = [p.clone() for p in model.parameters()]
    with pytest.raises(StrettoError, match="'step' steps Adam, wanted a function that returns the loss"):
        stretto.profile(model, data, step=step, machine=Machine())
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    model(data).sum().backward()
    optimizer.step()  # afterwards it is the user's again
    assert optimizer.state


def gradients_of(module, found):
    """What comes back to the module's result, in every backward pass from now on."""
    module.register_full_backward_hook(lambda module, into, out: found.append(out[0].clone()))


def test_a_layer_is_timed_with_the_gradients_it_had():
    """Rows without a loss are zeros there, which is less work; one number for all rows would be more."""
    model = make("sage", 12, 8, int(data().y.max()) + 1)
    profile, came = stretto.profile(model, data(), machine=Machine(), repeats=1), []
    gradients_of(model.convs[0], came)
    sites = recommend.sites_of(profile)
    in_model = came[-1]
    assert 0 < in_model.count_nonzero() < in_model.numel()
    assert all(list(site.grads) == [0] for site in sites.values())
    recommend._layer_step(model.convs[0], sites["convs.0"], True)()
    assert torch.equal(came[-1], in_model)


def test_gradients_that_were_not_seen_are_ones():
    layer, came = torch.nn.Linear(3, 2), []
    gradients_of(layer, came)
    recommend._layer_step(layer, Site(layer, (torch.randn(4, 3),), {}), True)()
    assert torch.equal(came[0], torch.ones(4, 2))
