"""On a GPU: messages made in blocks of edges, a row cut into pieces, and random numbers of the device drawn again."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.nn import Dropout, Linear, ReLU, Sequential

import stretto
from stretto import Graph, kernels
from stretto.layers import record_of
from stretto.layers.edges import streaming
from stretto.ops import edge_mlp
from tests.gpu.inputs import no_batch_is_passed_by  # noqa: F401 -- a fixture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NODES, EDGES = 200, 20_000


def hub():
    torch.manual_seed(0)
    index = torch.randint(NODES, (2, EDGES))
    index[1, : EDGES // 2] = 7
    return index.cuda()


def test_dropout_is_the_same_in_backward():
    x = torch.randn(NODES, 4, device="cuda", dtype=torch.float64, requires_grad=True)
    drop = Dropout(0.5)
    out = edge_mlp(Graph.of(hub(), NODES), lambda own, other: drop(own * other), x, x, block=300)
    torch.manual_seed(17)
    before = torch.cuda.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.testing.assert_close((grad * x).sum(), 2 * out.sum())  # of degree two in x, for these very masks


LAYERS = {
    "EdgeConv": (lambda: pyg.EdgeConv(Sequential(Linear(12, 6), ReLU(), Linear(6, 4))), None),
    "GATv2Conv": (lambda: pyg.GATv2Conv(6, 4, heads=2, edge_dim=3), 3),
    "GENConv": (lambda: pyg.GENConv(6, 4, edge_dim=3, learn_t=True), 3),
    "NNConv": (lambda: pyg.NNConv(6, 4, Sequential(Linear(3, 5), ReLU(), Linear(5, 24))), 3),
}


def test_a_card_makes_at_once_what_its_memory_holds(monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 0)
    conv = stretto.accelerate(LAYERS["EdgeConv"][0]().cuda())
    x, index = torch.randn(NODES, 6, device="cuda"), hub()
    conv(x, index)
    assert "at once" in record_of(conv).plan
    total = torch.cuda.get_device_properties(0).total_memory
    assert 0 < kernels.room(x.device) <= total // 8
    assert streaming.block_of(Graph.of(index, NODES), x) * streaming.BYTES <= total // 8


@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_blocks(name, monkeypatch):
    monkeypatch.setattr(streaming, "LARGE", 0)
    monkeypatch.setattr(streaming, "BLOCK", 300)
    monkeypatch.setattr(kernels, "room", lambda device: 0)  # as on a card whose memory is full
    make, dim = LAYERS[name]
    stock = make().double().cuda()
    x = torch.randn(NODES, 6, device="cuda", dtype=torch.float64, requires_grad=True)
    args = [x, hub()]
    if dim is not None:
        args.append(torch.randn(EDGES, dim, device="cuda", dtype=torch.float64, requires_grad=True))
    found = []
    for layer in (stock, stretto.accelerate(copy.deepcopy(stock))):
        out = layer(*args)
        leaves = [a for a in args if a.is_floating_point()]
        found.append([out, *torch.autograd.grad(out.pow(2).sum(), [*leaves, *layer.parameters()])])
    assert "in blocks" in record_of(layer).plan
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9 * max(float(wanted.detach().abs().max()), 1.0))
