"""torch.utils.checkpoint runs a layer again in backward and raises if it then saves other tensors than in forward: no
plan is tried, nothing is kept across steps and nothing is timed while it does. Also hooks on what is saved, and
forward-mode differentiation, which our functions do not know."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch.autograd import forward_ad
from torch.nn import Linear, ReLU, Sequential
from torch.utils.checkpoint import checkpoint

import stretto
from stretto.compile import CHOOSER, HOIST, choose, hoist
from stretto.layers import record_of
from stretto.ops import kept_scores
from stretto.ops.pick import picker
from tests.layers.options import SPECS
from tests.layers.test_convs import data_for, pair_of, run

N, WIDTH = 60, 8
EDGES = torch.randint(N, (2, 400), generator=torch.Generator().manual_seed(0))
X = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Checkpointed(torch.nn.Module):
    def __init__(self, layer, reentrant=False):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, *args, **kwargs):
        return checkpoint(self.layer, *args, use_reentrant=self.reentrant, **kwargs)


@pytest.fixture(autouse=True)
def everything_is_tried(monkeypatch):
    """No decision made yet, and no graph too small to be worth a trial."""
    for module, name in ((choose, "SMALL"), (kept_scores, "LEAST"), (hoist, "MANY")):
        monkeypatch.setattr(module, name, 0)
    monkeypatch.setattr(choose, "CLOSE", 100.0)
    CHOOSER.clear()
    HOIST.clear()
    yield
    CHOOSER.clear()


@pytest.mark.parametrize("conv", SPECS, ids=lambda c: c.__name__)
def test_every_layer_can_be_checkpointed(conv):
    spec = SPECS[conv]
    stock, fast = pair_of(spec, spec.options[0])
    data = data_for(spec, spec.options[0], "unsorted", spec.takes[0])
    wanted = run(stock, data)
    assert isinstance(wanted, list)
    for learned in (data.learned, *([()] if list(stock.parameters()) else []), data.learned):
        told = run(stock, replace(data, learned=learned))
        for _ in range(5):
            got = run(Checkpointed(fast), replace(data, learned=learned))
            assert isinstance(got, list), got
            for mine, theirs in zip(got, told, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert record_of(fast).path == "fast", record_of(fast).reason


SEVERAL = {
    "GCN": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "SAGE": lambda: pyg.SAGEConv(WIDTH, WIDTH),
    "TAG": lambda: pyg.TAGConv(WIDTH, WIDTH, K=2),
    "GIN": lambda: pyg.GINConv(Sequential(Linear(WIDTH, 5), ReLU(), Linear(5, WIDTH))),
    "GAT": lambda: pyg.GATConv(WIDTH, WIDTH),
    "GATv2": lambda: pyg.GATv2Conv(WIDTH, WIDTH // 2, heads=2),
    "Transformer": lambda: pyg.TransformerConv(WIDTH, WIDTH // 2, heads=2),
    "RGCN": lambda: pyg.RGCNConv(WIDTH, WIDTH, 3, num_bases=2),
}


class Stack(torch.nn.Module):
    """Three layers of one signature, of which the first reads a constant."""

    def __init__(self, make, wrap):
        super().__init__()
        self.layers = torch.nn.ModuleList([make() for _ in range(3)])
        self.wrap = wrap

    def forward(self, x, *args):
        for layer in self.layers:
            x = self.wrap(layer, x, *args).tanh()
        return x


def plainly(layer, *args):
    return layer(*args)


def checkpointed(layer, *args):
    return checkpoint(layer, *args, use_reentrant=False)


@pytest.mark.parametrize("name", SEVERAL)
def test_trials_in_steps_between_do_not_show(name):
    """Steps with and without checkpoints in turn: the latter try plans and settle, the former stay what they were."""
    stock = Stack(SEVERAL[name], plainly).double()
    fast = stretto.accelerate(copy.deepcopy(stock))
    args = (EDGES, torch.arange(400) % 3) if name == "RGCN" else (EDGES,)
    for step in range(24):
        fast.wrap = checkpointed if step % 3 else plainly
        grads = []
        for model in (stock, fast):
            model.zero_grad()
            model(X, *args).square().sum().backward()
            grads.append([p.grad for p in model.parameters()])
        for mine, theirs in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)
    assert record_of(fast.layers[1]).path == "fast"
    if name in ("GATv2", "Transformer"):  # one plan; whether scores are kept is the choice
        assert any(key[0] == "attention" for key, _ in picker.choices())
    else:
        decisions = [d for d in CHOOSER._known().values() if len(d.candidates) > 1]
        assert any(d.steady is not None and d.chosen is not None for d in decisions)


def test_features_of_few_nonzeros_are_not_looked_at_in_between():
    words = torch.zeros(N, WIDTH)
    words[:, 0] = torch.arange(N) % 40 == 0
    model = Stack(SEVERAL["GCN"], checkpointed)
    stretto.accelerate(model)
    for _ in range(4):
        model(words, EDGES).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_of_attention_draws_the_same_again(reentrant):
    conv = stretto.accelerate(pyg.GATConv(WIDTH, 4, heads=2, dropout=0.5).double())
    grads = []
    for model in (conv, Checkpointed(conv, reentrant)):
        torch.manual_seed(5)
        x = X.clone().requires_grad_()
        model(x, EDGES).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("strict", [False, True])
def test_a_lazy_layer_may_begin_inside_a_checkpoint(strict):
    conv = stretto.accelerate(pyg.SAGEConv(-1, 4), strict=strict)
    model, x = Checkpointed(conv), X.float().requires_grad_()
    for path in ("stock", "fast"):
        model(x, EDGES).sum().backward()
        assert record_of(conv).path == path


def test_shadow_mode_leaves_checkpoints_alone(monkeypatch):
    monkeypatch.setenv("STRETTO_SHADOW", "3")
    conv = stretto.accelerate(pyg.GCNConv(WIDTH, 4).double())
    for _ in range(6):
        Checkpointed(conv)(X.clone().requires_grad_(), EDGES).sum().backward()
    assert record_of(conv).path == "fast"


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("conv", [c for c in SPECS if c in (pyg.GCNConv, pyg.GATConv, pyg.EdgeConv, pyg.PNAConv)])
def test_tangents_of_forward_mode_come_through(conv, grad):
    spec = SPECS[conv]
    stock, fast = pair_of(spec, spec.options[0])
    x, *rest = data_for(spec, spec.options[0], "unsorted", spec.takes[0]).args
    found = []
    for layer in (stock, fast):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            out = layer(forward_ad.make_dual(x, torch.ones_like(x)), *rest)
            found.append(forward_ad.unpack_dual(out).tangent)
    torch.testing.assert_close(found[1], found[0])
    assert "forward-mode" in record_of(fast).reason
    fast(x, *rest)
    assert record_of(fast).path == "fast"
