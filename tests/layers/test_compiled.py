"""torch.compile of stock as a candidate under STRETTO_TUNE=full: tried in valid steps, frozen, kept, told, declined."""

import copy
import json

import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import stretto
from stretto import settings
from stretto.layers import compiled
from stretto.layers.compiled import COMPILED, OURS, TRIES

NODES, EDGES = 60, 400
LAYERS = {
    "gcn": lambda: GCNConv(8, 5),
    "sage": lambda: SAGEConv(8, 5),
    "gat": lambda: GATConv(8, 3, heads=2),
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))),
}
WARM = 2
SETTLED = WARM + 2 * TRIES + 1  # calls after which a way is chosen: the last try is taken note of one call later


@pytest.fixture(autouse=True)
def full(monkeypatch):
    """Allowed, with a backend that only traces; nothing is remembered before or after."""
    monkeypatch.setenv("STRETTO_TUNE", "full")
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiled, "WARM", WARM)
    compiled.forget()
    yield
    compiled.forget()
    torch._dynamo.reset()


@pytest.fixture
def compiled_wins(monkeypatch):
    monkeypatch.setattr(compiled, "MARGIN", 1e9)


@pytest.fixture
def ours_wins(monkeypatch):
    monkeypatch.setattr(compiled, "MARGIN", 0.0)


def inputs(requires_grad=True):
    return torch.randn(NODES, 8, requires_grad=requires_grad), torch.randint(0, NODES, (2, EDGES))


def both(layer, x, edge_index):
    out = layer(x, edge_index)
    wanted = [x, *layer.parameters()]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), wanted)]


def chosen(layer):
    return stretto.layers.record_of(layer).race.chosen


@pytest.mark.parametrize("name", LAYERS)
def test_every_turn_is_a_valid_step_and_the_choice_stands(name, compiled_wins):
    stock = LAYERS[name]()
    ours = stretto.accelerate(copy.deepcopy(stock))
    x, edge_index = inputs()
    paths = []
    for _ in range(SETTLED + 2):
        for one, other in zip(both(ours, x, edge_index), both(stock, x, edge_index), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        paths.append(stretto.report(ours).rows[0].path)
    assert chosen(ours) == COMPILED
    assert paths[-1] == "compiled"
    assert paths[: SETTLED - 1].count("compiled") == 0
    for one, other in zip(ours.buffers(), stock.buffers(), strict=True):  # a try apart from the step leaves no trace
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_ours_stands_where_it_is_as_fast(ours_wins):
    layer = stretto.accelerate(SAGEConv(8, 5))
    x, edge_index = inputs()
    for _ in range(SETTLED + 1):
        both(layer, x, edge_index)
    assert chosen(layer) == OURS
    row = stretto.report(layer).rows[0]
    assert row.path == "fast"
    assert "torch.compile of stock" in str(stretto.explain(layer, x, edge_index))


def test_without_gradients_forward_alone_is_timed(compiled_wins):
    layer = stretto.accelerate(GCNConv(8, 5))
    x, edge_index = inputs(requires_grad=False)
    with torch.no_grad():
        wanted = layer(x, edge_index)
        for _ in range(SETTLED):
            torch.testing.assert_close(layer(x, edge_index), wanted, rtol=1e-4, atol=1e-5)
    assert chosen(layer) == COMPILED


def test_the_choice_is_told_and_kept_on_disk(compiled_wins):
    layer = stretto.accelerate(SAGEConv(8, 5))
    x, edge_index = inputs()
    for _ in range(SETTLED):
        both(layer, x, edge_index)
    row = stretto.report(layer).rows[0]
    assert (row.path, row.plan, row.kernel) == ("compiled", COMPILED, "torch.compile")
    assert "ms" in row.reason
    told = stretto.explain(layer, x, edge_index)
    assert COMPILED in str(told)
    assert told.to_dict()["layers"][0]["race"]
    (file,) = settings.cache_folder().glob("layers-*.json")
    (kept,) = json.loads(file.read_text())["choices"].values()
    assert kept["way"] == COMPILED
    assert set(kept["ms"]) == {OURS, COMPILED}
    compiled.forget()  # another process
    both(layer, x, edge_index)
    found = stretto.layers.record_of(layer).race
    assert (found.chosen, found.how) == (COMPILED, "measured earlier")
    assert stretto.report(layer).rows[0].path == "compiled"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_cannot_be_compiled_is_declined_with_its_reason(where, monkeypatch):
    def fails(graph, example_inputs):
        raise RuntimeError("no such backend here")

    def fails_later(graph, example_inputs):
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=fails)(
            graph, example_inputs
        )

    monkeypatch.setattr(compiled, "BACKEND", fails if where == "forward" else fails_later)
    stock = SAGEConv(8, 5)
    layer = stretto.accelerate(copy.deepcopy(stock))
    x, edge_index = inputs()
    for _ in range(WARM + 2):
        for one, other in zip(both(layer, x, edge_index), both(stock, x, edge_index), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    found = stretto.layers.record_of(layer).race
    assert (found.chosen, found.how) == (OURS, "declined")
    assert "no such backend here" in str(stretto.explain(layer, x, edge_index))
    assert stretto.report(layer).rows[0].path == "fast"


def test_what_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(compiled, "MESSAGES", 1 << 40)
    layer = stretto.accelerate(SAGEConv(8, 5))
    x, edge_index = inputs()
    for _ in range(WARM + 1):
        both(layer, x, edge_index)
    found = stretto.layers.record_of(layer).race
    assert found.how == "declined"
    assert "GiB" in found.reason


@pytest.mark.parametrize("how", ["on", "analytic", "off"])
def test_without_leave_nothing_is_compiled(how, monkeypatch, compiled_wins):
    monkeypatch.setenv("STRETTO_TUNE", how)
    layer = stretto.accelerate(SAGEConv(8, 5))
    x, edge_index = inputs()
    for _ in range(SETTLED + 1):
        both(layer, x, edge_index)
    assert stretto.layers.record_of(layer).race is None
    assert not compiled._races


def test_deterministic_mode_runs_ours(compiled_wins):
    layer = stretto.accelerate(SAGEConv(8, 5))
    x, edge_index = inputs()
    for _ in range(SETTLED):
        both(layer, x, edge_index)
    torch.use_deterministic_algorithms(True)
    try:
        layer(x, edge_index)
        assert stretto.report(layer).rows[0].path == "fast"
    finally:
        torch.use_deterministic_algorithms(False)


def test_layers_alike_share_a_choice_and_nothing_is_left_on_the_users_tensors(compiled_wins):
    torch.manual_seed(0)
    net = stretto.accelerate(nn.ModuleList([SAGEConv(8, 8), SAGEConv(8, 8)]))
    x, edge_index = inputs()
    for _ in range(SETTLED):
        net[1](net[0](x, edge_index).relu(), edge_index).sum().backward()
    assert chosen(net[0]) == chosen(net[1]) == COMPILED
    assert stretto.layers.record_of(net[0]).race is stretto.layers.record_of(net[1]).race
    hooks = [t._backward_hooks for t in (x, *net.parameters())]
    assert all(not found for found in hooks)


def test_steps_whose_gradients_nobody_asks_for_settle_nothing():
    layer = stretto.accelerate(SAGEConv(8, 5))
    x, edge_index = inputs()
    for _ in range(SETTLED + compiled.MOST_PENDING + 5):
        layer(x, edge_index)
    found = stretto.layers.record_of(layer).race
    assert not found.chosen
    assert len(found.pending) <= compiled.MOST_PENDING + 1
    assert all(len(p._backward_hooks or ()) <= compiled.MOST_PENDING + 1 for p in layer.parameters())


def test_the_users_random_numbers_are_left_alone(ours_wins):
    layer = stretto.accelerate(GATConv(8, 3, heads=2))
    x, edge_index = inputs()
    for _ in range(WARM):
        both(layer, x, edge_index)
    before = torch.get_rng_state()
    both(layer, x, edge_index)  # compiles
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_inductor_itself(monkeypatch, compiled_wins):
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    stock = GCNConv(8, 5)
    layer = stretto.accelerate(copy.deepcopy(stock))
    x, edge_index = inputs()
    for _ in range(SETTLED + 1):
        for one, other in zip(both(layer, x, edge_index), both(stock, x, edge_index), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert chosen(layer) == COMPILED
