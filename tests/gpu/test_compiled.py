"""On a GPU: torch.compile of stock as a candidate, under STRETTO_TUNE=full, by Inductor itself."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import stretto
from stretto.layers import compiled
from stretto.layers.compiled import COMPILED, OURS, TRIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
NODES, EDGES, WIDTH = 20_000, 450_000, 64


@pytest.fixture(autouse=True)
def full(monkeypatch):
    monkeypatch.setenv("STRETTO_TUNE", "full")
    compiled.forget()
    yield
    compiled.forget()
    torch._dynamo.reset()


def inputs():
    x = torch.randn(NODES, WIDTH, device=CUDA, requires_grad=True)
    return x, torch.randint(0, NODES, (2, EDGES), device=CUDA)


def both(layer, x, edge_index):
    out = layer(x, edge_index)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("wins", [COMPILED, OURS])
@pytest.mark.parametrize("kind", [pyg.GCNConv, pyg.GATConv])
def test_turns_are_valid_steps_and_the_choice_stands(kind, wins, monkeypatch):
    monkeypatch.setattr(compiled, "MARGIN", 1e9 if wins == COMPILED else 0.0)
    stock = kind(WIDTH, WIDTH).cuda()
    layer = stretto.accelerate(copy.deepcopy(stock))
    x, edge_index = inputs()
    wanted = both(stock, x, edge_index)
    for _ in range(compiled.WARM + 2 * TRIES + 2):
        for one, other in zip(both(layer, x, edge_index), wanted, strict=True):
            assert (one - other).norm() <= 1e-3 * other.norm()
    found = stretto.layers.record_of(layer).race
    assert found.chosen == wins, str(found)
    assert all(0 < seconds < 1 for seconds in found.best.values())
    assert stretto.report(layer).rows[0].path == ("compiled" if wins == COMPILED else "fast")
    assert COMPILED in str(stretto.explain(layer, x, edge_index))


def test_a_captured_step_runs_ours_whatever_was_chosen(monkeypatch):
    monkeypatch.setattr(compiled, "MARGIN", 1e9)
    layer = stretto.accelerate(pyg.SAGEConv(WIDTH, WIDTH).cuda())
    x, edge_index = inputs()

    def step():
        out = layer(x, edge_index)
        return torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])

    monkeypatch.setenv("STRETTO_TUNE", "on")
    for _ in range(30):
        wanted = step()
    monkeypatch.setenv("STRETTO_TUNE", "full")
    for _ in range(compiled.WARM + 2 * TRIES + 2):
        step()
    assert stretto.layers.record_of(layer).race.chosen == COMPILED
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    assert stretto.report(layer).rows[0].path == "fast"
    captured.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
